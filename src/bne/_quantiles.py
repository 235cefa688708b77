r"""Quantiles and the spread of EMG mixtures, from the terms of a `bne._mixture.Tile`.

A quantile is found in two stages. The *coarse* one works in single precision and units of the
predictive standard deviation, on evenly spaced draws first and on all of them once, at a third of
the cost; the *fine* one, in double precision, then mostly needs a single evaluation of the mixture.
The fine stage alone decides when a quantile is found, within ends that are certain: the coarse one
can only save time. Each pair of a site and a level goes its own way, whatever its neighbours do.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

from bne._mixture import FEW, Tile
from bne.noise import emg_ppf

__all__ = ["half_spread", "quantiles"]

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

_INV_SQRT_2PI = 1.0 / np.sqrt(2.0 * np.pi)
_COARSE_TAIL = 1e-30  # single precision knows no smaller probabilities
_COARSE_STEPS = 8
_LAST_COARSE = 1e-3  # least error in z that the coarse stage is trusted to have measured
_END = 1e-13  # probability beyond the range of integration
_INTERVALS = 32, 2**14  # fewest and most of the trapezoidal rule


@dataclass
class _Search:
    """Pairs of a level and a site on their way to the quantile; every array has the same shape.

    `target` is the standard normal quantile of the smaller tail, which lies above the quantile
    where `upper`. `last` is the distance from it one step ago, infinite after a bisection. `reach`
    is the longest step that may be the last.
    """

    lane: NDArray[np.intp]
    upper: BoolArray
    target: FloatArray
    x: FloatArray
    low: FloatArray
    high: FloatArray
    last: FloatArray
    reach: FloatArray

    def at(self, chosen: BoolArray | slice) -> _Search:
        return replace(
            self, **{item.name: getattr(self, item.name)[chosen] for item in fields(self)}
        )

    def advance(self, mass: FloatArray, density: FloatArray, slope: FloatArray) -> BoolArray:
        r"""Move x; say where it has arrived.

        Halley's step for :math:`\Phi^{-1}(F(x)) = z`, nearly linear in x where the law is nearly
        normal. An error t in z leaves about :math:`C t^3`, with C known from the step before. Where
        a step would leave the bracket, or the last did not halve the error, the bracket is halved.
        """
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            z = special.ndtri(mass)
            gap = self.target - z
            rate = (
                density / (_INV_SQRT_2PI * np.exp(-0.5 * z * z)) * np.where(self.upper, -1.0, 1.0)
            )
            step = gap / rate
            step /= np.clip(1.0 + 0.5 * step * (slope / density + z * rate), 0.5, 2.0)
            error = np.abs(gap)
            below = (gap > 0.0) != self.upper
            self.low, self.high = (
                np.where(below, self.x, self.low),
                np.where(below, self.high, self.x),
            )
            moved = self.x + step
            good = (moved >= self.low) & (moved <= self.high) & (error < 0.5 * self.last)
            left = np.where(np.isinf(self.last), 1.0, error * (error / self.last) ** 3)
        middle = 0.5 * self.low + 0.5 * self.high
        near = (error <= 0.05) & (left <= 1e-12) & (np.abs(step) <= self.reach)
        arrived = good & ((error <= 1e-11) | near)
        stay = (error <= 1e-13) | np.isnan(mass)
        closed = self.high - self.low <= 2.0 * np.spacing(np.maximum(-self.low, self.high))
        self.x = np.where(stay, self.x, np.where(good, moved, middle))
        self.last = np.where(good, error, np.inf)
        return np.asarray(arrived | stay | closed)


def quantiles(tile: Tile, p: FloatArray) -> FloatArray:
    """Quantiles (Q, n) of a tile at levels (Q,) between 0 and 1, which give -inf and inf."""
    q = np.where(p[:, None] < 0.5, -np.inf, np.inf) * np.ones(tile.n)
    inner = (p > 0.0) & (p < 1.0)
    if not inner.any():
        return q
    search = _begin(tile, p[inner])
    _approach(tile, search)
    open_ = ~search.advance(*tile.terms(search.x, search.upper))
    found, rest = search.x, search.at(open_)
    found[open_] = _finish(tile, rest)
    q[inner] = found
    return q


def _begin(tile: Tile, p: FloatArray) -> _Search:
    low, high = _bracket(tile.moments, p)
    level = np.zeros(low.shape)
    tail = np.minimum(p, 1.0 - p)[:, None]
    return _Search(
        lane=np.broadcast_to(np.arange(tile.n), low.shape),
        upper=p[:, None] >= 0.5 + level,
        target=special.ndtri(tail) + level,
        x=np.clip(_start(tile.moments, p), low, high),
        low=low,
        high=high,
        last=level + np.inf,
        reach=level + 0.01 * tile.moments["least_scale"],
    )


def _approach(tile: Tile, search: _Search) -> None:
    """Coarse stage: move x, and set `last` as if the last step had been a fine one."""
    centre, unit = tile.moments["mean"], np.sqrt(tile.moments["total"])
    low, high = (search.low - centre) / unit, (search.high - centre) / unit
    trial = replace(search, x=(search.x - centre) / unit, low=low, high=high)
    done = np.zeros(low.shape, bool)
    for _ in range(_COARSE_STEPS):
        before = trial.x
        trial.advance(*tile.coarse_terms(before, trial.upper, thinned=True))
        trial.x = np.where(done, before, trial.x)
        done |= trial.last < 0.01
        if done.all():
            break
    trial = replace(trial, low=low, high=high, last=search.last)
    trial.advance(*tile.coarse_terms(trial.x, trial.upper, thinned=False))
    use = (search.target > special.ndtri(_COARSE_TAIL)) & np.isfinite(trial.x)
    x = np.clip(centre + unit * trial.x, search.low, search.high)
    search.x = np.where(use, x, search.x)
    search.last = np.where(use, np.maximum(trial.last, _LAST_COARSE), np.inf)


def _finish(tile: Tile, search: _Search) -> FloatArray:
    """Fine stage for the pairs that one step did not settle, gathered in tiles of their own."""
    found = np.empty(search.x.size)
    for start in range(0, found.size, FEW):
        part = search.at(slice(start, start + FEW))
        own, open_ = tile.pick(part.lane), np.full(part.x.size, True)
        while open_.any():
            before = part.x
            arrived = part.advance(*own.terms(before[None], part.upper[None])[:, 0])
            part.x = np.where(open_, part.x, before)
            open_ &= ~arrived
        found[start : start + FEW] = part.x
    return found


def _bracket(m: dict[str, FloatArray], p: FloatArray) -> tuple[FloatArray, FloatArray]:
    r"""Ends (Q, n) between which the quantiles lie for certain.

    The lowest normal quantile among the draws; the highest :math:`\mu + \sigma z + \lambda t` with
    :math:`P(\varepsilon > z) = P(m > \lambda t) = (1-p)/2`; and Cantelli's inequality on both
    sides.
    """
    p = p[:, None]
    z, half = special.ndtri(p), 0.5 * (1.0 - p)
    sd = np.sqrt(m["total"])
    low = m["lowest"] + z * np.where(z < 0.0, m["largest_scale"], m["least_scale"])
    high = m["highest"] - special.ndtri(half) * m["largest_scale"]
    high = high - np.log(half) * m["largest_skew"]
    low = np.maximum(low, m["mean"] - sd * np.sqrt((1.0 - p) / p))
    high = np.minimum(high, m["mean"] + sd * np.sqrt(p / (1.0 - p)))
    return low - 0.1 * sd, high + 0.1 * sd


def _start(m: dict[str, FloatArray], p: FloatArray) -> FloatArray:
    r"""First guesses (Q, n): quantiles of the EMG with the mixture's first three moments.

    An EMG of unit variance and skew c has skewness :math:`2c^3` and excess kurtosis :math:`6c^4`;
    what the mixture has more of the latter adds Cornish and Fisher's
    :math:`(z^3 - 3z)\,\Delta\kappa/24`. Negative skewness mirrors the law.
    """
    sd = np.sqrt(m["total"])
    c = np.clip(np.cbrt(0.5 * m["third"] / (m["total"] * sd)), -0.99, 0.99)
    guess = np.array([np.interp(c, *_standard_quantiles(float(level))) for level in p])
    excess = np.clip(m["fourth"] / m["total"] ** 2 - 3.0 - 6.0 * c**4, -1.0, 3.0)
    z = special.ndtri(p)[:, None]
    return m["mean"] + sd * (guess + (z**3 - 3.0 * z) / 24.0 * excess)


@lru_cache(maxsize=256)
def _standard_quantiles(p: float) -> tuple[FloatArray, FloatArray]:
    """Skews between -0.99 and 0.99, and the quantiles of centred EMGs of unit variance."""
    skews = np.linspace(0.0, 0.99, 34)
    shape = -skews, np.sqrt(1.0 - skews**2), skews
    right, left = emg_ppf(p, *shape), -emg_ppf(1.0 - p, *shape)
    return np.concatenate([-skews[:0:-1], skews]), np.concatenate([left[:0:-1], right])


def half_spread(tile: Tile) -> FloatArray:
    r"""Half the mean absolute difference of two independent values, (n,).

    .. math:: \tfrac12 E|Y - Y'| = \int F (1 - F)\,dt

    by the trapezoidal rule between two far quantiles. The integrand is analytic and vanishes at
    both ends, so that halving the intervals squares the error, or better: they are halved until
    that changes a site's value by less than 1e-7 of it.
    """
    low, high = quantiles(tile, np.array([_END, 1.0 - _END]))
    count, most = _INTERVALS
    value = _rule(tile, low, high, np.arange(1, count) / count) / count
    done = np.zeros(tile.n, bool)
    while count < most and not done.all():
        middle = _rule(tile, low, high, (np.arange(count) + 0.5) / count) / count
        refined = np.where(done, value, 0.5 * (value + middle))
        done |= np.abs(refined - value) <= 1e-7 * refined
        value, count = refined, 2 * count
    return value


def _rule(tile: Tile, low: FloatArray, high: FloatArray, nodes: FloatArray) -> FloatArray:
    """Sum of F (1 - F) over nodes in units of the range, times the range."""
    y = low + (high - low) * nodes[:, None]
    cdf = tile.terms(y, np.zeros(y.shape, bool))[0]
    # Sums along rows: down the columns, NumPy adds a single column in another order than several.
    spread = np.ascontiguousarray((cdf * (1.0 - cdf)).T)
    return np.asarray((high - low) * np.sum(spread, axis=1))
