"""Studies: what the package costs and how it compares. Not installed with it."""
