r"""Predictive laws: at each site, the equal-weight mixture over posterior draws of the noise law.

At site i, draw s says that y is EMG (see `bne.noise`) with location
:math:`\mu_{is} = \sum_k f_{ik}\,\omega_{iks} + \delta_{is}`, scale :math:`\sigma_{is}` and skew
:math:`\lambda_{is}`, so that the predictive law is

.. math:: F_i(y) = \frac1S \sum_s \mathrm{EMG}(y; \mu_{is}, \sigma_{is}, \lambda_{is}).

All properties come from this mixture, in closed form, by root finding or by a quadrature exact to
ten digits, none from simulated responses. *Chunks* of sites are computed and forgotten, which
bounds the memory, several at a time. Neither their size nor the number of threads changes a bit of
the results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from threadpoolctl import threadpool_limits

from bne._compile import LANES
from bne._mixture import Tile, weight_moments
from bne._quantiles import half_spread, quantiles
from bne.errors import InputError

__all__ = ["COMPONENTS", "FieldDraws", "PredictiveLaw", "Summary"]

FloatArray = NDArray[np.float64]
Vector = FloatArray | pd.Series
Table = FloatArray | pd.DataFrame
RandomState = int | np.random.Generator | np.random.SeedSequence | None

COMPONENTS = (
    "total",
    "aleatoric",
    "gaussian_noise",
    "skewed_noise",
    "epistemic",
    "weights",
    "residual",
    "calibration",
    "covariance",
)
"""Parts of the predictive variance, in the order of `PredictiveLaw.decompose`."""

_NOISE_BLOCK = 256  # sites that share a random number generator

# What the posterior says


@dataclass(frozen=True)
class FieldDraws:
    """What S posterior draws say at n sites, in the units of y.

    Parameters
    ----------
    weights : (K, n, S)
        Weights of the base models, without unit.
    mixture : (n, S)
        Sum over the base models of prediction times weight.
    residual : (n, S)
        Residual process plus its prior mean; zeros where there is none.
    scale : (n, S)
        Standard deviation of the normal noise, positive.
    skew : (n, S), optional
        Mean of the exponential noise, non-negative; None for normal noise.
    """

    weights: FloatArray
    mixture: FloatArray
    residual: FloatArray
    scale: FloatArray
    skew: FloatArray | None = None

    def __post_init__(self) -> None:
        shape = self.mixture.shape
        others = {"residual": self.residual, "scale": self.scale}
        if self.skew is not None:
            others["skew"] = self.skew
        wrong = {name: array.shape for name, array in others.items() if array.shape != shape}
        if self.weights.shape[1:] != shape:
            wrong["weights"] = self.weights.shape
        if len(shape) != 2 or 0 in shape or wrong:
            listed = ", ".join(f"{name} {found}" for name, found in wrong.items())
            message = f"Draws must have the shape (sites, draws): mixture {shape}, {listed}"
            raise InputError(message.rstrip(", ") + ".")

    @property
    def location(self) -> FloatArray:
        """Mean of the normal part, mixture + residual, (n, S)."""
        return self.mixture + self.residual

    @property
    def mean_draws(self) -> FloatArray:
        """Mean of y under each draw, mixture + residual + skew, (n, S)."""
        return self.location if self.skew is None else self.location + self.skew

    def sites(self, rows: slice) -> FieldDraws:
        """The draws at some of the sites."""
        skew = None if self.skew is None else self.skew[rows]
        return FieldDraws(
            self.weights[:, rows],
            self.mixture[rows],
            self.residual[rows],
            self.scale[rows],
            skew,
        )


@dataclass(frozen=True)
class Summary:
    """Everything a map shows, computed in one pass (see `PredictiveLaw.summary`).

    Arrays, or pandas objects labelled by the sites where the law has an index: tables with one row
    per site, those of the weights with one column per site.

    Parameters
    ----------
    mean, sd : (n,)
        Of the predictive law, in the units of y.
    quantiles : (n, Q)
        At the levels asked for, in the units of y.
    exceedance : (n,) or None
        Probability of a value above the threshold; None where none was given.
    weight_mean, weight_sd : (K, n)
        Posterior mean and standard deviation of the weights, without unit.
    variance : dict of (n,)
        Parts of the variance by name, see `PredictiveLaw.decompose`, in the units of y squared.
    """

    mean: Vector
    sd: Vector
    quantiles: Table
    exceedance: Vector | None
    weight_mean: Table
    weight_sd: Table
    variance: dict[str, Vector]


# What it means for y


class PredictiveLaw:
    r"""Law of y at n sites: mixtures of EMG laws over S posterior draws, with equal weights.

    .. math:: F_i(y) = \frac1S \sum_s \mathrm{EMG}(y; \mu_{is}, \sigma_{is}, \lambda_{is})

    Methods return arrays, or Series and DataFrames labelled by `index` where one is given. A method
    of y takes a number, one y per site (n,), or m of them per site (n, m), and returns (n,), (n,)
    or (n, m).

    Parameters
    ----------
    n_sites : int
        Number of sites, at least one.
    fields : callable
        Posterior draws of the sites in a slice, as `FieldDraws`. Called once per chunk and method,
        from several threads at once; draw s must be the same draw at all sites.
    index : pandas.Index, optional
        Labels of the sites.
    chunk : int, optional
        Sites computed at a time by each thread, 256 by default. It bounds the memory, and changes
        no result.

    Examples
    --------
    >>> zero = np.zeros((1, 2))
    >>> draws = FieldDraws(np.ones((1, 1, 2)), np.array([[1.0, 3.0]]), zero, zero + 1.0)
    >>> law = PredictiveLaw.of(draws)
    >>> law.mean(), law.var()
    (array([2.]), array([2.]))
    """

    def __init__(
        self,
        n_sites: int,
        fields: Callable[[slice], FieldDraws],
        *,
        index: pd.Index | None = None,
        chunk: int | None = None,
    ) -> None:
        if n_sites < 1:
            raise InputError(f"A predictive law needs at least one site, not {n_sites}.")
        if chunk is not None and chunk < 1:
            raise InputError(f"chunk must be at least one site, not {chunk}.")
        if index is not None and len(index) != n_sites:
            raise InputError(f"index has {len(index)} labels, but there are {n_sites} sites.")
        self.n_sites = n_sites
        self.index = index
        self.chunk = LANES if chunk is None else chunk
        self._fields = fields

    @classmethod
    def of(cls, draws: FieldDraws, index: pd.Index | None = None) -> PredictiveLaw:
        """The law of draws that are in memory already.

        Parameters
        ----------
        draws : FieldDraws
            Posterior draws at all sites.
        index : pandas.Index, optional
            Labels of the sites.
        """
        return cls(draws.mixture.shape[0], draws.sites, index=index)

    def __repr__(self) -> str:
        return f"PredictiveLaw(n_sites={self.n_sites})"

    def mean(self) -> Vector:
        r"""Mean :math:`S^{-1} \sum_s (\mu_{is} + \lambda_{is})`, (n,), in the units of y."""
        return self._vector(self._moments()["mean"])

    def var(self) -> Vector:
        r"""Variance, (n,), in the units of y squared.

        .. math:: \frac1S \sum_s (\sigma_{is}^2 + \lambda_{is}^2)
                  + \mathrm{Var}_s(\mu_{is} + \lambda_{is}),

        the variance over draws with the divisor S, as the mixture has it.
        """
        return self._vector(self._moments()["total"])

    def std(self) -> Vector:
        """Standard deviation, the root of `var`, (n,), in the units of y."""
        return self._vector(np.sqrt(self._moments()["total"]))

    def pdf(self, y: ArrayLike) -> Vector | Table:
        r"""Density :math:`S^{-1} \sum_s f_{is}(y)`, in 1 / (units of y).

        Parameters
        ----------
        y : number, (n,) or (n, m)
            Where to evaluate it, in the units of y.
        """
        return self._at(y, lambda tile, y: tile.terms(y, np.zeros(y.shape, bool))[1])

    def log_pdf(self, y: ArrayLike) -> Vector | Table:
        r"""Log density :math:`\log S^{-1} \sum_s f_{is}(y)`, finite far in the tails.

        Parameters
        ----------
        y : number, (n,) or (n, m)
            Where to evaluate it, in the units of y.
        """
        return self._at(y, Tile.log_density)

    def cdf(self, y: ArrayLike) -> Vector | Table:
        r"""Probability of a value up to y, :math:`F_i(y) = S^{-1} \sum_s F_{is}(y)`.

        Parameters
        ----------
        y : number, (n,) or (n, m)
            Where to evaluate it, in the units of y.
        """
        return self._at(y, lambda tile, y: tile.terms(y, np.zeros(y.shape, bool))[0])

    def sf(self, y: ArrayLike) -> Vector | Table:
        r"""Probability of a value above y, :math:`1 - F_i(y)`, without cancellation.

        Parameters
        ----------
        y : number, (n,) or (n, m)
            Where to evaluate it, in the units of y.
        """
        return self._at(y, _survival)

    def exceedance(self, threshold: ArrayLike) -> Vector | Table:
        r"""Probability that y exceeds a threshold, :math:`1 - F_i(t)`.

        Parameters
        ----------
        threshold : number, (n,) or (n, m)
            In the units of y.
        """
        return self._at(threshold, _survival, name="threshold")

    def ppf(self, p: ArrayLike) -> Vector | Table:
        r"""Quantiles: the roots of :math:`F_i(q) = p`, in the units of y.

        Parameters
        ----------
        p : number or (Q,)
            Levels between 0 and 1, which themselves give minus and plus infinity.

        Returns
        -------
        (n,) or (n, Q)
            With an index, the levels name the columns.
        """
        levels = _levels("p", p)
        found = self._over_tiles(lambda tile, _: {"q": quantiles(tile, levels.ravel()).T})["q"]
        return self._table(found, levels) if levels.ndim else self._vector(found[:, 0])

    def crps(self, y: ArrayLike) -> Vector | Table:
        r"""Continuous ranked probability score for outcomes y; lower is better.

        .. math:: \mathrm{CRPS} = \int (F(t) - 1\{t \ge y\})^2\,dt
                  = E|Y - y| - \tfrac12 E|Y - Y'|
                  = E|Y - y| - \int F(t)\,(1 - F(t))\,dt.

        The mean deviation is exact (see `bne.noise.emg_abs_deviation`); the integral has a relative
        error of about 1e-10 and takes some hundred evaluations of the mixture per site, more where
        scales are much smaller than the skew or the distances between draws (and an error of up to
        1e-7 where they are 1e-4 of it).

        Parameters
        ----------
        y : number, (n,) or (n, m)
            Outcomes, in the units of y.

        Returns
        -------
        (n,) or (n, m)
            In the units of y.
        """
        return self._at(y, lambda tile, y: tile.deviation(y) - half_spread(tile))

    def sample(self, n: int = 1, random_state: RandomState = None, *, noise: bool = True) -> Table:
        r"""Draws of y, joint over the sites.

        .. math:: y_{ij} = \mu_{is_j} + \sigma_{is_j} \varepsilon_{ij} + \lambda_{is_j} m_{ij},
                  \qquad \varepsilon \sim N(0, 1), \quad m \sim \mathrm{Exp}(1)

        where row j takes the posterior draw :math:`s_j` at all sites: draws evenly spaced among
        the S where n is at most S, else all of them in turn.

        Parameters
        ----------
        n : int
            Number of draws, at least one.
        random_state : int, numpy.random.Generator or numpy.random.SeedSequence, optional
            The same int gives the same draws; a Generator is advanced; None is not reproducible.
        noise : bool
            Whether to add the noise. Without it, rows are draws of the mean surface
            :math:`\mu_{is} + \lambda_{is}`, without chance beyond the posterior's.

        Returns
        -------
        (n, n_sites)
            In the units of y. With an index, the sites name the columns.
        """
        if n < 1:
            raise InputError(f"n must be at least one draw, not {n}.")
        seed = _seed(random_state)

        def piece(rows: slice) -> FloatArray:
            draws = self._draws(rows)
            if noise:
                return _responses(draws, n, rows, seed)
            return draws.mean_draws[:, _chosen(draws.mixture.shape[1], n)]

        sites: FloatArray = np.concatenate(self._over_chunks(piece))
        return sites.T if self.index is None else pd.DataFrame(sites.T, columns=self.index)

    def decompose(self) -> pd.DataFrame:
        r"""Parts of the variance, one column for each of `COMPONENTS`, in the units of y squared.

        With :math:`a = \sum_k f_k \omega_k`, residual :math:`\delta` and skew :math:`\lambda`,

        ============  =======================================================================
        total         aleatoric + epistemic
        aleatoric     gaussian_noise :math:`E[\sigma^2]` + skewed_noise :math:`E[\lambda^2]`
        epistemic     :math:`\mathrm{Var}(a + \delta + \lambda)`, the sum of the next four
        weights       :math:`\mathrm{Var}(a)`
        residual      :math:`\mathrm{Var}(\delta)`
        calibration   :math:`\mathrm{Var}(\lambda)`
        covariance    :math:`2\,[\mathrm{Cov}(a, \delta) + \mathrm{Cov}(a, \lambda)
                      + \mathrm{Cov}(\delta, \lambda)]`, of either sign
        ============  =======================================================================

        with moments over the posterior draws.

        Returns
        -------
        pandas.DataFrame
            One row per site.
        """
        moments = self._moments()
        return pd.DataFrame({name: moments[name] for name in COMPONENTS}, index=self.index)

    def weights(self) -> tuple[Table, Table]:
        r"""Posterior mean and standard deviation of the weights :math:`\omega_{ik}`, without unit.

        Returns
        -------
        mean, sd : (K, n)
            With an index, the sites name the columns.
        """
        found = self._over_chunks(lambda rows: weight_moments(self._draws(rows).weights))
        mean, sd = np.concatenate(found, axis=-1)
        return self._across(mean), self._across(sd)

    def summary(
        self, alpha: Sequence[float] = (0.025, 0.5, 0.975), threshold: ArrayLike | None = None
    ) -> Summary:
        """Mean, quantiles, weights and parts of the variance, in one pass over the sites.

        Parameters
        ----------
        alpha : sequence of float
            Levels of the quantiles, between 0 and 1.
        threshold : number or (n,), optional
            Asks for the probability of a value above it; in the units of y.

        Returns
        -------
        Summary
            The same numbers as from the methods one by one.
        """
        levels = np.atleast_1d(_levels("alpha", alpha))
        limits = None if threshold is None else self._points(threshold, "threshold")[0]

        def compute(tile: Tile, rows: slice) -> dict[str, FloatArray]:
            return _properties(tile, levels, None if limits is None else limits[rows])

        def piece(rows: slice) -> dict[str, FloatArray]:
            draws = self._draws(rows)
            mean, sd = weight_moments(draws.weights)
            weights = {"weight_mean": mean.T, "weight_sd": sd.T}
            return weights | _tiled(draws, rows, compute)

        found = _concatenate(self._over_chunks(piece))
        exceedance = found.get("exceedance")
        return Summary(
            mean=self._vector(found["mean"]),
            sd=self._vector(np.sqrt(found["total"])),
            quantiles=self._table(found["quantiles"], levels),
            exceedance=None if exceedance is None else self._vector(exceedance),
            weight_mean=self._across(found["weight_mean"].T),
            weight_sd=self._across(found["weight_sd"].T),
            variance={name: self._vector(found[name]) for name in COMPONENTS},
        )

    # Chunks of sites, tiles of a chunk

    def _draws(self, rows: slice) -> FieldDraws:
        draws = self._fields(rows)
        asked, found = rows.stop - rows.start, draws.mixture.shape[0]
        if found != asked:
            raise InputError(f"fields gave draws at {found} sites where {asked} were asked for.")
        wrong = np.flatnonzero(~_proper(draws))
        if wrong.size:
            site = rows.start + wrong[0]
            label = site if self.index is None else self.index[site]
            raise InputError(
                f"The posterior draws at site {label} are not finite, or have a scale that is not "
                "positive or a negative skew; check the inputs there and the fit."
            )
        return draws

    def _over_chunks(self, piece: Callable[[slice], Any]) -> list[Any]:
        starts = range(0, self.n_sites, self.chunk)
        chunks = [slice(start, min(start + self.chunk, self.n_sites)) for start in starts]
        # Chunks run side by side, so that the products of each belong on one thread.
        with (
            threadpool_limits(1, user_api="blas"),
            ThreadPoolExecutor(min(os.cpu_count() or 1, len(chunks))) as pool,
        ):
            return list(pool.map(piece, chunks))

    def _over_tiles(
        self, compute: Callable[[Tile, slice], dict[str, FloatArray]]
    ) -> dict[str, FloatArray]:
        found = self._over_chunks(lambda rows: _tiled(self._draws(rows), rows, compute))
        return _concatenate(found)

    def _moments(self) -> dict[str, FloatArray]:
        return self._over_tiles(lambda tile, _: tile.moments)

    def _at(
        self, y: ArrayLike, compute: Callable[[Tile, FloatArray], FloatArray], name: str = "y"
    ) -> Vector | Table:
        points, several = self._points(y, name)
        found = self._over_tiles(lambda tile, rows: {"at": compute(tile, points[rows].T).T})["at"]
        return self._table(found) if several else self._vector(found[:, 0])

    def _points(self, y: ArrayLike, name: str) -> tuple[FloatArray, bool]:
        """Values of y as (n, m), and whether there may be several per site."""
        values = _numbers(name, y)
        if values.ndim > 2 or (values.ndim and values.shape[0] != self.n_sites) or not values.size:
            raise InputError(
                f"{name} has the shape {values.shape}; give a number, one value for each of the "
                f"{self.n_sites} sites, or a table with a row for each site."
            )
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            where = f", the first at position {bad[0].tolist()}" if values.ndim else ""
            raise InputError(f"{name} must be finite; {len(bad)} of its values are not{where}.")
        columns = values if values.ndim == 2 else values.reshape(-1, 1)
        return np.broadcast_to(columns, (self.n_sites, columns.shape[1])), values.ndim == 2

    # Labels

    def _vector(self, values: FloatArray) -> Vector:
        return values if self.index is None else pd.Series(values, index=self.index)

    def _table(self, values: FloatArray, columns: FloatArray | None = None) -> Table:
        if self.index is None:
            return values
        return pd.DataFrame(values, index=self.index, columns=columns)

    def _across(self, values: FloatArray) -> Table:
        return values if self.index is None else pd.DataFrame(values, columns=self.index)


# Kernels: arrays of draws and tiles, nothing is checked


def _proper(draws: FieldDraws) -> NDArray[np.bool_]:
    """Whether the draws at each site define a law."""
    total = draws.mixture.sum(axis=1) + draws.residual.sum(axis=1) + draws.scale.sum(axis=1)
    proper = draws.scale.min(axis=1) > 0.0
    if draws.skew is not None:
        total = total + draws.skew.sum(axis=1)
        proper &= draws.skew.min(axis=1) >= 0.0
    return np.asarray(proper & np.isfinite(total))


def _tiled(
    draws: FieldDraws, rows: slice, compute: Callable[[Tile, slice], dict[str, FloatArray]]
) -> dict[str, FloatArray]:
    """Results of `compute(tile, sites)` over the tiles of a chunk, sites first."""
    found = []
    for start in range(rows.start, rows.stop, LANES):
        stop = min(start + LANES, rows.stop)
        own = draws.sites(slice(start - rows.start, stop - rows.start))
        tile = Tile(own.mixture, own.residual, own.scale, own.skew)
        found.append(compute(tile, slice(start, stop)))
    return _concatenate(found)


def _concatenate(found: list[dict[str, FloatArray]]) -> dict[str, FloatArray]:
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


def _survival(tile: Tile, y: FloatArray) -> FloatArray:
    survival: FloatArray = tile.terms(y, np.ones(y.shape, bool))[0]
    return survival


def _properties(tile: Tile, levels: FloatArray, limit: FloatArray | None) -> dict[str, FloatArray]:
    found = {name: tile.moments[name] for name in ("mean", *COMPONENTS)}
    found["quantiles"] = quantiles(tile, levels).T
    if limit is not None:
        found["exceedance"] = _survival(tile, limit.T)[0]
    return found


# Draws of y


def _chosen(size: int, n: int) -> NDArray[np.intp]:
    """Posterior draws that n draws of y take: evenly spaced, or all of them in turn."""
    return (2 * np.arange(n) + 1) * size // (2 * n) if n <= size else np.arange(n) % size


def _responses(draws: FieldDraws, n: int, rows: slice, seed: np.random.SeedSequence) -> FloatArray:
    """Draws of y at the sites of a chunk, (sites, n)."""
    s = _chosen(draws.mixture.shape[1], n)
    y: FloatArray = draws.mixture[:, s] + draws.residual[:, s]
    y += draws.scale[:, s] * _noise(seed, rows, n, np.random.Generator.standard_normal)
    if draws.skew is not None:
        y += draws.skew[:, s] * _noise(seed, rows, n, np.random.Generator.standard_exponential)
    return y


def _noise(
    seed: np.random.SeedSequence,
    rows: slice,
    n: int,
    law: Callable[[np.random.Generator, tuple[int, int]], FloatArray],
) -> FloatArray:
    """Standard noise (sites, n) of any sites, from one generator per block of sites and law."""
    kind = int(law is np.random.Generator.standard_exponential)
    parts = []
    for block in range(rows.start // _NOISE_BLOCK, (rows.stop - 1) // _NOISE_BLOCK + 1):
        first = block * _NOISE_BLOCK
        start, stop = max(rows.start - first, 0), min(rows.stop - first, _NOISE_BLOCK)
        key = (*seed.spawn_key, block, kind)
        own = np.random.SeedSequence(seed.entropy, spawn_key=key, pool_size=seed.pool_size)
        parts.append(law(np.random.default_rng(own), (stop, n))[start:])
    return np.concatenate(parts)


def _seed(random_state: RandomState) -> np.random.SeedSequence:
    if isinstance(random_state, np.random.SeedSequence):
        return random_state
    if isinstance(random_state, np.random.Generator):
        return np.random.SeedSequence(random_state.integers(2**32, size=4).tolist())
    try:
        return np.random.SeedSequence(random_state)
    except (TypeError, ValueError):
        message = "random_state must be a non-negative integer, a Generator, a SeedSequence or None"
        raise InputError(f"{message}, not {random_state!r}.") from None


# Sentences for bad input


def _numbers(name: str, values: ArrayLike) -> FloatArray:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name} must be a number or an array of numbers.") from None


def _levels(name: str, p: ArrayLike) -> FloatArray:
    levels = _numbers(name, p)
    if levels.ndim > 1 or not levels.size:
        raise InputError(f"{name} must be a level or a list of levels, not {levels.shape}.")
    wrong = levels[~((levels >= 0.0) & (levels <= 1.0))]
    if wrong.size:
        raise InputError(f"{name} must lie between 0 and 1; found {wrong.ravel()[0]:g}.")
    return levels
