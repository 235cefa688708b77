r"""Choosing a representation: which one, on which box, with how many functions, and how exact.

Two errors of the Hilbert-space covariance are bounded, as shares of the variance: what lies beyond
the highest frequency is below `TRUNCATION` with prior probability 0.95 (at all but the shortest 5 %
of length-scales), and the correlation of a site with the training sites through the periodic
boundary is below `WRAPPING` on average over the prior of the length-scale.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from bne.errors import InputError
from bne.kernels import Kernel
from bne.priors import Prior, inverse_gamma_between
from bne.processes import Fourier, Hilbert, Representation
from bne.site_processes import Dual, Exact

__all__ = [
    "MAX_FUNCTIONS",
    "TRUNCATION",
    "WRAPPING",
    "Approximation",
    "Geometry",
    "choose",
    "default_lengthscales",
]

FloatArray = NDArray[np.float64]
GPName = Literal["auto", "hilbert", "rff", "exact"]

TRUNCATION = 0.04
WRAPPING = 0.05
MAX_FUNCTIONS = {1: 160, 2: 1000, 3: 1400}
EXACT_LIMIT = 400
_RAISED = 2.0  # from here on the basis is too coarse for the sites
DUAL_LIMIT = 120
_MARGIN = 0.5
_SHORTEST = 0.05
_LEVELS = (np.arange(64) + 0.5) / 64


@dataclass(frozen=True)
class Geometry:
    """The training sites as the choice sees them.

    Parameters
    ----------
    sites : (n, d) in kilometres or the user's units.
    domain : (2, d) lower and upper ends of the box within which predictions will be asked for.
    """

    sites: FloatArray
    domain: FloatArray

    @staticmethod
    def of(sites: FloatArray, domain: FloatArray | None = None) -> Geometry:
        """Geometry of training sites; `domain` (m, d) holds sites to be predicted, or corners.

        Without `domain` the box is that of the training sites, widened on every side by half its
        width.
        """
        low, high = sites.min(axis=0), sites.max(axis=0)
        if domain is None:
            margin = _MARGIN * np.maximum(high - low, 0.1 * np.max(high - low))
            return Geometry(sites, np.stack([low - margin, high + margin]))
        both = np.concatenate([sites, domain])
        low, high = both.min(axis=0), both.max(axis=0)
        slack = 0.01 * np.max(high - low)
        return Geometry(sites, np.stack([low - slack, high + slack]))

    @property
    def dim(self) -> int:
        """Number of coordinates."""
        return int(self.sites.shape[1])

    @property
    def width(self) -> float:
        """The longest side of the box of the training sites."""
        return float(np.max(np.ptp(self.sites, axis=0)))

    @property
    def spacing(self) -> float:
        """Neighbour distance of as many sites, spread evenly over their box."""
        sides = np.maximum(np.ptp(self.sites, axis=0), 0.05 * self.width)
        count = len(np.unique(self.sites, axis=0))
        return float((np.prod(sides) / count) ** (1.0 / self.dim))


def default_lengthscales(
    geometry: Geometry, kernel: Kernel, gp: GPName = "auto"
) -> dict[str, Prior]:
    """Length-scale prior of each process, from the sites.

    98 % of the residual's lie between the typical neighbour distance and the width of the domain;
    the weights, the scale and the skewness, of which a single site says little, begin at a tenth
    of the width. Where a Hilbert basis cannot resolve the lower end, it is raised to what it can,
    unless an exact process can take its place.
    """
    width, spacing = geometry.width, geometry.spacing
    if not width > 0.0:
        raise InputError(
            "all training sites lie at one place, so that no length-scale can be learned; "
            "a fit needs sites at two places at least"
        )
    slow = min(max(2.0 * spacing, 0.1 * geometry.dim * width), 0.3 * width)
    lowest = dict.fromkeys(("weights", "log_scale", "log_skew"), slow)
    lowest["residual"] = min(spacing, 0.25 * width)
    lower_limit = 0.0 if gp in ("exact", "rff") else _resolvable(geometry, kernel)
    few = len(geometry.sites) <= DUAL_LIMIT
    if gp == "auto" and few and lower_limit > _RAISED * lowest["residual"]:
        lower_limit = 0.0
    return {
        name: inverse_gamma_between(max(lower, lower_limit), width)
        for name, lower in lowest.items()
    }


@dataclass(frozen=True)
class Approximation:
    """The chosen representation, with how many coefficients each process takes and a note.

    Where there are far fewer sites than basis functions, a Hilbert-space process is sampled
    through its values at the sites (`Dual`).
    """

    kind: Literal["hilbert", "rff", "exact"]
    representation: Representation
    sizes: dict[str, int]
    note: str

    def features(self, coords: FloatArray) -> Any:
        """Features of the training sites, laid out for products of these sizes."""
        features = self.representation.features(coords)
        if isinstance(self.representation, Hilbert):
            return self.representation.blocks(features, self.sizes.values())
        return features


def choose(
    gp: GPName,
    kernel: Kernel,
    geometry: Geometry,
    lengthscales: Mapping[str, Prior],
    *,
    n_features: int | None = None,
    seed: int = 0,
) -> Approximation:
    """Choose and build a representation.

    Parameters
    ----------
    gp : {"auto", "hilbert", "rff", "exact"}
        ``auto`` takes the Hilbert space, unless its error bound cannot be met and there are few
        enough sites (at most 400) for the exact process.
    kernel : Kernel
    geometry : Geometry
    lengthscales : mapping of process name to Prior
    n_features : int, optional
        Number of functions: about the upper limit for ``hilbert`` (default 160, 1000 and 1400 in
        one, two and three dimensions), the number of random features for ``rff`` (default 128).
    seed : int
        Seed of the random features.
    """
    if gp not in get_args(GPName):
        raise InputError(f"unknown gp {gp!r}; choose one of {', '.join(get_args(GPName))}.")
    limit = n_features or MAX_FUNCTIONS[geometry.dim]
    periods = _periods(geometry, kernel, list(lengthscales.values()))
    needed = max(
        _count(_frequency(kernel, prior, geometry.dim), periods) for prior in lengthscales.values()
    )
    few = len(geometry.sites) <= EXACT_LIMIT
    if gp == "exact" or (gp == "auto" and needed > 1.05 * limit and few):
        return _exact(kernel, geometry, lengthscales)
    if gp == "rff":
        return _fourier(kernel, geometry, lengthscales, n_features or 128, seed)
    return _hilbert(kernel, geometry, lengthscales, limit, periods)


def _exact(kernel: Kernel, geometry: Geometry, priors: Mapping[str, Prior]) -> Approximation:
    n = len(geometry.sites)
    if n > 4 * EXACT_LIMIT:
        raise InputError(
            f"gp='exact' with {n} sites would need {n * n * 8e-9 * 20:.0f} GB; use gp='hilbert'."
        )
    representation = Exact.build(kernel, geometry.sites, *_range(priors))
    return Approximation(
        "exact", representation, dict.fromkeys(priors, n), f"exact Gaussian processes at {n} sites"
    )


def _fourier(
    kernel: Kernel, geometry: Geometry, priors: Mapping[str, Prior], count: int, seed: int
) -> Approximation:
    rng = np.random.default_rng([seed, 7])
    representation = Fourier.build(kernel, geometry.dim, count, rng)
    note = f"{count} random Fourier features, whose spread far from data is too small"
    return Approximation("rff", representation, dict.fromkeys(priors, count), note)


def _hilbert(
    kernel: Kernel,
    geometry: Geometry,
    priors: Mapping[str, Prior],
    limit: int,
    periods: FloatArray,
) -> Approximation:
    highest = _frequency_of(limit, periods)
    wanted = {name: _frequency(kernel, prior, geometry.dim) for name, prior in priors.items()}
    basis = Hilbert.build(kernel, geometry.domain, periods, min(highest, max(wanted.values())))
    squared = np.asarray(basis.squared_frequencies)
    sizes = {
        name: min(max(int(np.sum(squared <= frequency**2)), 3), basis.n_coefficients)
        for name, frequency in wanted.items()
    }
    errors = {
        name: _truncation(kernel, prior, min(wanted[name], highest), geometry.dim)
        for name, prior in priors.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    note = (
        f"Hilbert-space basis of {basis.n_coefficients} functions; beyond its highest frequency "
        f"lie at most {max(errors[worst], TRUNCATION):.1%} of the variance with prior probability "
        "0.95"
    )
    if errors[worst] > 1.1 * TRUNCATION:
        warnings.warn(
            f"With {basis.n_coefficients} basis functions the covariance of the {worst} process is "
            f"off by up to {errors[worst]:.0%} of its variance within its length-scale prior "
            f"(aim: {TRUNCATION:.0%}). Allow more functions (n_features), longer length-scales, "
            "or use gp='exact' with few sites.",
            UserWarning,
            stacklevel=2,
        )
    n = len(geometry.sites)
    if n <= DUAL_LIMIT and n < 0.6 * np.mean(list(sizes.values())):
        dual = Dual.build(basis, geometry.sites, *_range(priors))
        note += f", sampled through the values at the {n} sites"
        return Approximation("hilbert", dual, dict.fromkeys(priors, n), note)
    return Approximation("hilbert", basis, sizes, note)


def _range(priors: Mapping[str, Prior]) -> tuple[float, float]:
    """Length-scales between which factors are interpolated: nearly all that the priors allow."""
    lower = min(float(prior.quantile(1e-4)) for prior in priors.values())
    upper = max(float(prior.quantile(0.999)) for prior in priors.values())
    return lower, upper


def _truncation(kernel: Kernel, prior: Prior, frequency: float, dim: int) -> float:
    return float(kernel.spectral_tail(frequency, prior.quantile(_SHORTEST), dim))


def _frequency(kernel: Kernel, prior: Prior, dim: int) -> float:
    """Lowest highest frequency whose truncation error is within its bound."""

    def excess(log_scaled: float) -> float:
        return float(kernel.spectral_tail(math.exp(log_scaled), 1.0, dim)) - TRUNCATION

    scaled = math.exp(float(optimize.brentq(excess, -3.0, 25.0)))
    return scaled / float(prior.quantile(_SHORTEST))


def _periods(geometry: Geometry, kernel: Kernel, priors: list[Prior]) -> FloatArray:
    """Periods (d,) of the box: the domain and a gap across which correlations have faded."""
    low, high = geometry.sites.min(axis=0), geometry.sites.max(axis=0)
    margin = float(np.min(np.concatenate([low - geometry.domain[0], geometry.domain[1] - high])))
    lengthscales = [prior.quantile(_LEVELS) for prior in priors]

    def excess(distance: float) -> float:
        return max(float(np.mean(kernel.correlation(distance / ls))) for ls in lengthscales) - (
            WRAPPING
        )

    far = max(float(ls[-1]) for ls in lengthscales)
    faded = float(optimize.brentq(excess, 0.0, 50.0 * far))
    return np.asarray(geometry.domain[1] - geometry.domain[0] + max(faded - margin, 0.0))


def _count(frequency: float, periods: FloatArray) -> float:
    """Number of frequencies in a ball, each a point of the lattice 2 pi j / P."""
    dim = len(periods)
    ball = float(math.pi ** (dim / 2) / math.gamma(dim / 2 + 1) * frequency**dim)
    return ball * float(np.prod(periods)) / (2.0 * math.pi) ** dim


def _frequency_of(count: float, periods: FloatArray) -> float:
    return float((count / _count(1.0, periods)) ** (1.0 / len(periods)))


def _resolvable(geometry: Geometry, kernel: Kernel) -> float:
    """Shortest lower end of a length-scale prior that the largest basis resolves."""
    width, limit = geometry.width, 0.97 * MAX_FUNCTIONS[geometry.dim]
    slowest = inverse_gamma_between(0.2 * width, width)

    def excess(log_lower: float) -> float:
        prior = inverse_gamma_between(math.exp(log_lower), width)
        periods = _periods(geometry, kernel, [prior, slowest])
        return math.log(_count(_frequency(kernel, prior, geometry.dim), periods) / limit)

    ends = math.log(1e-4 * width), math.log(0.5 * width)
    if excess(ends[1]) > 0.0:
        return math.exp(ends[1])
    return math.exp(float(optimize.brentq(excess, *ends, xtol=1e-3)))
