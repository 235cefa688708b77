"""The command line: ``bne demo``, ``bne fit``, ``bne predict``, ``bne diagnose``.

Exit status 0; 2 and one line on stderr for bad input; 130 after an interrupt; 1 for a defect of bne
itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from bne.cli._parser import build_parser

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv
        Arguments without the name of the program; those of the process by default.

    Returns
    -------
    int
        Exit status.
    """
    arguments = build_parser().parse_args(argv)
    with _one_line_warnings(), _terminate_like_interrupt():
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from bne.errors import InputError

    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except InputError as error:
        return _fail(2, str(error))
    except OSError as error:
        return _fail(2, f"{error.strerror}: {error.filename}" if error.filename else str(error))
    except KeyboardInterrupt:
        return _fail(130, _after_interrupt(arguments))
    except Exception as error:
        if os.environ.get("BNE_DEBUG") == "1":
            raise
        reason = f"{type(error).__name__}: {error}"
        return _fail(
            1, f"{reason} - a defect of bne; please report it with the trace that BNE_DEBUG=1 shows"
        )
    return 0


def _fail(status: int, message: str) -> int:
    sys.stderr.write(f"bne: {' '.join(message.split())}\n")
    return status


def _after_interrupt(arguments: argparse.Namespace) -> str:
    if arguments.command != "fit":
        return "interrupted; run the same command again to start over"
    if arguments.checkpoint is None:
        return "interrupted; with --checkpoint FILE, a fit can resume where it stopped"
    return f"interrupted; run the same command again to resume from {arguments.checkpoint}"


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Show each warning for users once, on one line; hide those for developers."""
    seen: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        text = " ".join(str(message).split())
        if issubclass(category, UserWarning) and text not in seen:
            seen.add(text)
            sys.stderr.write(f"bne: warning: {text}\n")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


@contextmanager
def _terminate_like_interrupt() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that nothing half-written is left behind."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
