r"""A heavy-tailed law around a peak, with a scale of its own on either side of every axis.

.. math:: \theta = c + Q\,\mathrm{diag}(h)\,\tau, \qquad h_j = h_j^- \;(\tau_j < 0)
          \text{ or } h_j^+ \;(\tau_j \ge 0),

with independent t-distributed *steps* :math:`\tau_j` of four degrees of freedom: wide enough to
propose from, or to place points around a posterior that is nearly normal.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

__all__ = ["DEGREES", "SplitT"]

FloatArray = NDArray[np.float64]
DEGREES = 4.0
_LOG_CONSTANT = float(stats.t.logpdf(0.0, DEGREES))
_MOST_SD, _LEAST_SD = 2.0, 1e-3
_STEP = 0.02
_SIDE = 1.5  # sds from the peak at which the fall on either side is measured


class SplitT(NamedTuple):
    """The law: `centre` (H,), orthonormal `axes` (H, H), and `scales` below and above (2, H)."""

    centre: Any
    axes: Any
    scales: Any

    @staticmethod
    def around(
        peak: FloatArray,
        value_and_slope: Callable[[FloatArray], tuple[float, FloatArray]],
        pool: Executor,
        *,
        inflation: float,
    ) -> SplitT:
        """Law around the peak of a log density, whose curvature and sides are measured there."""
        steps = _STEP * np.eye(len(peak))
        slopes = [s for _, s in pool.map(value_and_slope, [*(peak + steps), *(peak - steps)])]
        hessian = (np.stack(slopes[: len(peak)]) - np.stack(slopes[len(peak) :])) / (2.0 * _STEP)
        values, axes = np.linalg.eigh(-0.5 * (hessian + hessian.T))
        sds = np.clip(1.0 / np.sqrt(np.maximum(values, _MOST_SD**-2)), _LEAST_SD, _MOST_SD)
        top = value_and_slope(peak)[0]
        sides = _SIDE * sds * axes
        ends = [*(peak - sides.T), *(peak + sides.T)]
        falls = np.array([top - value for value, _ in pool.map(value_and_slope, ends)])
        stretch = _SIDE / np.sqrt(2.0 * np.maximum(falls, 1e-3))
        stretch = np.clip(np.nan_to_num(stretch, nan=1.0), 0.5, 2.0).reshape(2, -1)
        return SplitT(peak, axes, inflation * sds * stretch)

    @staticmethod
    def of_draws(points: FloatArray, *, inflation: float) -> SplitT:
        """Law around draws (N, H): their median, principal axes, and spread on either side."""
        centre = np.median(points, axis=0)
        _, axes = np.linalg.eigh(np.cov(points, rowvar=False).reshape(len(centre), -1))
        along = (points - centre) @ axes
        sides = np.stack([along < 0.0, along >= 0.0])
        sides |= ~np.any(sides, axis=1, keepdims=True)  # an empty side takes the spread of all
        squares = np.sum(sides * along**2, axis=1) / np.sum(sides, axis=1)
        scales = np.maximum(np.sqrt(squares), _LEAST_SD)
        return SplitT(centre, axes, inflation * scales)

    def point(self, steps: FloatArray) -> FloatArray:
        """Points (..., H) of steps (..., H)."""
        scaled = steps * np.where(steps < 0.0, self.scales[0], self.scales[1])
        return np.asarray(self.centre + scaled @ self.axes.T)

    def steps(self, points: FloatArray) -> FloatArray:
        """Steps (..., H) of points (..., H)."""
        along = (points - self.centre) @ self.axes
        return np.asarray(along / np.where(along < 0.0, self.scales[0], self.scales[1]))

    def log_density(self, steps: FloatArray) -> FloatArray:
        """Log density (...,) of the points at steps (..., H)."""
        scale = np.where(steps < 0.0, self.scales[0], self.scales[1])
        tails = 0.5 * (DEGREES + 1.0) * np.log1p(steps**2 / DEGREES)
        return np.asarray(np.sum(_LOG_CONSTANT - tails - np.log(scale), axis=-1))

    def steps_of(self, probabilities: FloatArray) -> FloatArray:
        """Steps whose distribution functions are `probabilities` (..., H)."""
        return np.asarray(special.stdtrit(DEGREES, probabilities))

    def sample_steps(self, rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
        """Steps (*shape, H)."""
        return np.asarray(rng.standard_t(DEGREES, (*shape, len(self.centre))))
