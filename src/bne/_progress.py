"""A line of progress on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

__all__ = ["Progress"]

_WIDTH = 24
_INTERVAL = 0.1


class Progress:
    """Shows on stderr how far each step of a fit is; silent unless asked.

    Parameters
    ----------
    show : bool
    steps : sequence of str
        Names of the steps, in order.
    """

    def __init__(self, *, show: bool, steps: Sequence[str]) -> None:
        self._show = show
        self._steps = list(steps)
        self._started = time.monotonic()
        self._last = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._show:
            sys.stderr.write("\n" if self._last else "")
            sys.stderr.flush()

    def __call__(self, step: str, done: int, total: int) -> None:
        """Show that `done` of `total` parts of a step are done."""
        now = time.monotonic()
        if not self._show or (done < total and now - self._last < _INTERVAL):
            return
        self._last = now
        filled = _WIDTH * done // max(total, 1)
        bar = "#" * filled + "." * (_WIDTH - filled)
        place = f"step {self._steps.index(step) + 1} of {len(self._steps)}, {step}"
        seconds = now - self._started
        sys.stderr.write(
            f"\r{place:<24} [{bar}] {100 * done // max(total, 1):3d} % {seconds:6.1f} s"
        )
        sys.stderr.flush()
