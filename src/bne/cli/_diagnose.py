"""``bne diagnose``."""

from __future__ import annotations

import argparse

from bne.cli._output import say, say_json
from bne.storage import read_fit

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> None:
    """Print the verdict on a fit and the table that it rests on."""
    read_fit(arguments.fit)  # a foreign or damaged file is refused before anything slow is imported
    import bne

    diagnosis = bne.load(arguments.fit).diagnose()
    if arguments.json:
        say_json(diagnosis.to_dict())
        return
    say(diagnosis.verdict)
    say(diagnosis.table.to_string(float_format=lambda value: f"{value:.4g}"))
