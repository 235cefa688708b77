"""``python -m bne.cli``."""

import sys

from bne.cli import main

if __name__ == "__main__":
    sys.exit(main())
