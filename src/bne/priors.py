r"""Prior laws of the positive hyperparameters, written for their logarithms.

The samplers move in :math:`u = \log\theta`; each prior therefore gives the log density of *u*
(Jacobian included, constants dropped), draws of *u*, and quantiles of :math:`\theta`. Its
parameters are arrays, so that fits which differ only in their priors share compiled code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy import interpolate, optimize, special, stats

__all__ = [
    "Family",
    "Prior",
    "ScoreMap",
    "half_normal",
    "inverse_gamma",
    "inverse_gamma_between",
    "log_normal",
]

Family = Literal["half_normal", "inverse_gamma", "log_normal"]
FloatArray = NDArray[np.float64]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prior:
    r"""The law of a positive hyperparameter.

    Parameters
    ----------
    family : {"half_normal", "inverse_gamma", "log_normal"}
        With parameters (scale, unused), (:math:`\alpha`, :math:`\beta`) and (median, sd of the
        logarithm).
    first, second : float
        The two parameters.
    """

    family: Family = field(metadata={"static": True})
    first: Any
    second: Any

    def log_density(self, u: Any) -> Any:
        r"""Log density of :math:`u = \log\theta`, up to a constant (JAX)."""
        if self.family == "half_normal":
            return u - 0.5 * jnp.exp(2.0 * (u - jnp.log(self.first)))
        if self.family == "inverse_gamma":
            return -self.first * u - self.second * jnp.exp(-u)
        return -0.5 * ((u - jnp.log(self.first)) / self.second) ** 2

    def quantile(self, p: float | FloatArray) -> FloatArray:
        r"""Quantiles of :math:`\theta`, in its own units."""
        return np.asarray(self._law().ppf(p), dtype=float)

    def sample_log(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        r"""Draws of :math:`\log\theta`."""
        draws = np.asarray(self._law().rvs(size=size, random_state=rng), dtype=float)
        return np.asarray(np.log(draws))

    def to_dict(self) -> dict[str, str | float]:
        """Return plain values, for storage."""
        return {
            "family": self.family,
            "first": float(self.first),
            "second": float(self.second),
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Prior:
        """Rebuild the prior that `to_dict` described."""
        if values["family"] not in get_args(Family):
            raise ValueError(f"Unknown prior family {values['family']!r}.")
        return Prior(values["family"], float(values["first"]), float(values["second"]))

    def _law(self) -> Any:
        if self.family == "half_normal":
            return stats.halfnorm(scale=self.first)
        if self.family == "inverse_gamma":
            return stats.invgamma(self.first, scale=self.second)
        return stats.lognorm(self.second, scale=self.first)


def half_normal(scale: float) -> Prior:
    r"""Half-normal prior, :math:`p(\theta) \propto \exp(-\theta^2 / 2\,\mathrm{scale}^2)`."""
    return Prior("half_normal", float(scale), 0.0)


def inverse_gamma(alpha: float, beta: float) -> Prior:
    r"""Inverse-gamma prior, :math:`p(\theta) \propto \theta^{-\alpha - 1} e^{-\beta/\theta}`."""
    return Prior("inverse_gamma", float(alpha), float(beta))


def log_normal(median: float, sd: float) -> Prior:
    r"""Log-normal prior, :math:`\log\theta \sim N(\log\mathrm{median}, \mathrm{sd}^2)`."""
    return Prior("log_normal", float(median), float(sd))


def inverse_gamma_between(lower: float, upper: float, *, mass: float = 0.98) -> Prior:
    """Inverse-gamma law with the share `mass` of its probability in [lower, upper].

    The rest is split evenly between the two tails.

    Parameters
    ----------
    lower, upper : float
        Ends of the interval, in the units of the hyperparameter; 0 < lower < upper.
    mass : float
        Probability of the interval.
    """
    if not 0.0 < lower < upper < np.inf:
        raise ValueError(f"A prior needs 0 < lower < upper, got [{lower:g}, {upper:g}].")
    tail = 0.5 * (1.0 - mass)
    ratio = np.log(upper / lower)

    def excess(log_alpha: float) -> float:
        low, high = stats.gamma(np.exp(log_alpha)).ppf([tail, 1.0 - tail])
        return float(np.log(high / max(low, 1e-300)) - ratio)

    alpha = float(np.exp(optimize.brentq(excess, np.log(0.02), np.log(1e7))))
    return inverse_gamma(alpha, lower * float(stats.gamma(alpha).ppf(1.0 - tail)))


class ScoreMap:
    r"""Logarithms of hyperparameters by scores *t* that are standard normal under their priors.

    :math:`\log\theta_j = \log F_j^{-1}(\Phi(t_j))`, a cubic spline for :math:`|t_j|` up to
    `LARGEST`, beyond which scores are held.

    Parameters
    ----------
    priors : iterable of Prior
        One for each hyperparameter.
    """

    LARGEST = 6.0

    def __init__(self, priors: Iterable[Prior]) -> None:
        grid = np.linspace(-self.LARGEST, self.LARGEST, 121)
        levels = special.ndtr(grid)
        self._maps = [interpolate.CubicSpline(grid, np.log(p.quantile(levels))) for p in priors]

    def theta(self, scores: FloatArray, derivative: int = 0) -> FloatArray:
        r"""Values :math:`\log\theta` (..., H) of scores (..., H), or their slopes."""
        held = np.clip(scores, -self.LARGEST, self.LARGEST)
        found = [curve(held[..., j], derivative) for j, curve in enumerate(self._maps)]
        return np.stack(found, axis=-1)
