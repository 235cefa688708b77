r"""The prior mean of the residual: nothing, a line in the base models, a smooth trend in space.

.. math:: m_0(x) = \beta_0 + \sum_k \beta_k\,(f_k(x) - \bar f_k) + \sum_j g_j(x_j),

in standardised units, with :math:`\beta_0 \sim N(0, 1)`, shrunken slopes
:math:`\beta_k \sim N(0, 1/4)` and cubic splines :math:`g_j` of few knots, constant beyond
the training sites. A convex combination of base models that are all too flat stays too flat; the
slopes can mend that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import BSpline

__all__ = ["PriorMean", "Trend"]

FloatArray = NDArray[np.float64]
PriorMean = Literal["zero", "linear", "gam", "linear+gam"]
_INTERCEPT_SD = 1.0
_SLOPE_SD = 0.5
_SPLINE_SD = 0.7
_INNER_KNOTS = 3
_DEGREE = 3


@dataclass(frozen=True)
class Trend:
    """Columns of the prior mean, each times the prior sd of its coefficient.

    Parameters
    ----------
    kind : {"zero", "linear", "gam", "linear+gam"}
    base_centre : (K,)
        Means of the standardised base models at the training sites.
    knots : per coordinate the knots of its spline
    spline_centre : per coordinate the means of its spline functions at the training sites
    """

    kind: PriorMean
    base_centre: FloatArray
    knots: tuple[FloatArray, ...]
    spline_centre: tuple[FloatArray, ...]

    @staticmethod
    def fit(kind: PriorMean, coords: FloatArray, base: FloatArray) -> Trend:
        """Place the columns by the training sites: `coords` (n, d), standardised `base` (n, K)."""
        if kind not in get_args(PriorMean):
            known = ", ".join(get_args(PriorMean))
            raise ValueError(f"Unknown prior mean {kind!r}; choose one of {known}.")
        knots = tuple(_knots(x) for x in coords.T)
        centre = tuple(_splines(x, t).mean(axis=0) for x, t in zip(coords.T, knots, strict=True))
        return Trend(kind, base.mean(axis=0), knots, centre)

    def columns(self, coords: FloatArray, base: FloatArray) -> FloatArray:
        """Columns (n, p) at sites with `coords` (n, d) and standardised `base` (n, K)."""
        if self.kind == "zero":
            return np.zeros((len(coords), 0))
        parts = [np.full((len(coords), 1), _INTERCEPT_SD)]
        if "linear" in self.kind:
            parts.append(_SLOPE_SD * (base - self.base_centre))
        if "gam" in self.kind:
            for x, knots, centre in zip(coords.T, self.knots, self.spline_centre, strict=True):
                parts.append(_SPLINE_SD * (_splines(x, knots) - centre))
        return np.concatenate(parts, axis=1)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for storage."""
        return {
            "kind": self.kind,
            "base_centre": self.base_centre.tolist(),
            "knots": [t.tolist() for t in self.knots],
            "spline_centre": [c.tolist() for c in self.spline_centre],
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Trend:
        """Rebuild from `to_dict`, bit for bit."""
        return Trend(
            values["kind"],
            np.asarray(values["base_centre"], dtype=float),
            tuple(np.asarray(t, dtype=float) for t in values["knots"]),
            tuple(np.asarray(c, dtype=float) for c in values["spline_centre"]),
        )


def _knots(x: FloatArray) -> FloatArray:
    """Clamped knots with a few inner ones at quantiles of the sites."""
    low, high = float(x.min()), float(x.max())
    if high == low:
        low, high = low - 0.5, high + 0.5
    inner = np.quantile(x, np.linspace(0.0, 1.0, _INNER_KNOTS + 2)[1:-1])
    inner = np.unique(inner[(inner > low) & (inner < high)])
    return np.concatenate([np.repeat(low, _DEGREE + 1), inner, np.repeat(high, _DEGREE + 1)])


def _splines(x: FloatArray, knots: FloatArray) -> FloatArray:
    """B-splines (n, p), one left out since all of them sum to one; constant beyond the knots."""
    inside = np.clip(x, knots[0], knots[-1])
    return np.asarray(BSpline.design_matrix(inside, knots, _DEGREE).toarray()[:, 1:])
