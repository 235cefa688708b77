r"""Mixtures of EMG laws over posterior draws, many sites at once, in compiled programs.

A *tile* is a fixed number of sites, the lanes of one compiled program that runs through the draws.
All points asked for at a site are evaluated in one pass over its draws. No lane sees another and
every sum has a fixed order, so that what is computed for a site does not depend, to the last bit,
on its neighbours. Notation as in `bne.noise`:
:math:`r = (y - \mu)/\sigma`, :math:`\rho = \sigma/\lambda`, :math:`v = \rho - r`; M is the Mills
ratio of the normal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from bne._compile import LANES, compiled
from bne._erfcx import hazard_remainders

__all__ = ["FEW", "Tile", "weight_moments"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]
BoolArray = NDArray[np.bool_]
Columns = tuple[jax.Array, ...]

FEW = 16  # lanes of a tile for the few sites that need more work than their neighbours
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_LARGEST_RATIO = 1e30  # of scale to skew; beyond it the law is normal to all digits
_LARGEST_COARSE_RATIO = 1e9  # the same in single precision
_LARGEST_RESIDUAL = {8: 1e60, 4: 1e15}  # standardised, by bytes of a number; squares stay finite
_THINNED = 256  # draws of a thinned mixture
_BLOCK = 8  # draws added at a time, so that the work on a block outweighs the step to the next
_POINTS = 8  # points per site, at most, of one pass over the draws


# One draw at every lane. Columns: location, 1 / scale and, where there is skewness, scale / skew


def _standardise(y: jax.Array, location: jax.Array, inverse: jax.Array) -> jax.Array:
    largest = _LARGEST_RESIDUAL[y.dtype.itemsize]
    return jnp.clip((y - location) * inverse, -largest, largest)


def _emg_pieces(r: jax.Array, ratio: jax.Array) -> tuple[jax.Array, ...]:
    r"""Normal density at r, its tail beyond r, and :math:`g = \lambda f` with its parts.

    g is :math:`\varphi(r) M(v)` for :math:`v > 0` and
    :math:`e^{\rho(\rho/2 - r)} - \varphi(r) M(-v)` otherwise.
    """
    v = ratio - r
    phi = _INV_SQRT_2PI * jnp.exp(-0.5 * r * r)
    b, x = jnp.abs(r), jnp.abs(v)
    normal = phi / (b + hazard_remainders(b)[0])
    e = hazard_remainders(x)[0]
    part = phi / (x + e)
    body = v > 0.0
    g = jnp.where(body, part, jnp.exp(jnp.minimum(ratio * (0.5 * ratio - r), 0.0)) - part)
    return phi, normal, g, jnp.where(body, part * (e - r), phi - ratio * g)


def _emg_terms(
    y: jax.Array, upper: jax.Array, location: jax.Array, inverse: jax.Array, ratio: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    r"""Probability beyond y, density and its slope.

    .. math:: F = \varphi(r) M(-r) - g \quad (r < 0), \qquad
              1 - F = \varphi(r) M(r) + g \quad (r \ge 0).
    """
    r = _standardise(y, location, inverse)
    _, normal, g, bend = _emg_pieces(r, ratio)
    left = r < 0.0
    tail = jnp.where(left, normal - g, normal + g)
    probability = jnp.where(left != upper, tail, 1.0 - tail)
    return probability, ratio * inverse * g, ratio * inverse * inverse * bend


def _normal_terms(
    y: jax.Array, upper: jax.Array, location: jax.Array, inverse: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`_emg_terms` without skewness."""
    r = _standardise(y, location, inverse)
    phi = _INV_SQRT_2PI * jnp.exp(-0.5 * r * r)
    b = jnp.abs(r)
    tail = phi / (b + hazard_remainders(b)[0])
    density = inverse * phi
    probability = jnp.where((r < 0.0) != upper, tail, 1.0 - tail)
    return probability, density, -r * inverse * density


def _emg_log_density(
    y: jax.Array, location: jax.Array, inverse: jax.Array, ratio: jax.Array
) -> jax.Array:
    r = (y - location) * inverse
    v = ratio - r
    x = jnp.abs(v)
    body = v > 0.0
    mills = 1.0 / (x + hazard_remainders(x)[0])
    upper = 1.0 - _INV_SQRT_2PI * jnp.exp(-0.5 * x * x) * mills
    exponent = jnp.where(body, -0.5 * r * r, ratio * (0.5 * ratio - r))
    return exponent + jnp.log(ratio * inverse * jnp.where(body, _INV_SQRT_2PI * mills, upper))


def _normal_log_density(y: jax.Array, location: jax.Array, inverse: jax.Array) -> jax.Array:
    r = (y - location) * inverse
    return -0.5 * r * r + jnp.log(_INV_SQRT_2PI * inverse)


def _emg_deviation(
    y: jax.Array, location: jax.Array, inverse: jax.Array, ratio: jax.Array
) -> jax.Array:
    """E|Y - y|, see `bne.noise.emg_abs_deviation`."""
    r = (y - location) * inverse
    phi, normal, g, _ = _emg_pieces(r, ratio)
    survival = jnp.where(r < 0.0, 1.0 - (normal - g), normal + g)
    folded = 2.0 * phi + jnp.abs(r) * (1.0 - 2.0 * normal)
    return (folded + (2.0 * survival - 1.0) / ratio) / inverse


def _normal_deviation(y: jax.Array, location: jax.Array, inverse: jax.Array) -> jax.Array:
    b = jnp.abs((y - location) * inverse)
    phi = _INV_SQRT_2PI * jnp.exp(-0.5 * b * b)
    return (2.0 * phi + b * (1.0 - 2.0 * phi / (b + hazard_remainders(b)[0]))) / inverse


# Averages over draws; arrays of draws are (S, lanes), points (m, lanes)


def _columns(draw: Columns) -> Columns:
    """Location, 1 / scale and scale / skew of draws (..., lanes), ready for points (m, lanes)."""
    mixture, residual, scale, *skew = (x[..., None, :] for x in draw)
    columns = mixture + residual, 1.0 / scale
    if not skew:
        return columns
    return *columns, jnp.minimum(scale / skew[0], _LARGEST_RATIO)


@compiled
def _coarse_columns(laid: Columns, centre: jax.Array, unit: jax.Array) -> Columns:
    """Columns (S, 1, lanes) of (y - centre) / unit in single precision."""
    location, inverse, *ratio = _columns(laid)
    coarse = [(location - centre) / unit, inverse * unit]
    coarse += [jnp.minimum(x, _LARGEST_COARSE_RATIO) for x in ratio]
    return tuple(x.astype(jnp.float32) for x in coarse)


def _scan(add: Callable[..., Any], start: Any, laid: Columns) -> Any:
    """Carry of `add(carry, block)` over blocks (`_BLOCK`, ...) of draws, then over the rest."""
    size = laid[0].shape[0]
    rest = size % _BLOCK
    blocks = tuple(x[: size - rest].reshape(-1, _BLOCK, *x.shape[1:]) for x in laid)
    carry = lax.scan(lambda carry, block: (add(carry, block), None), start, blocks)[0]
    if not rest:
        return carry
    last = add(jax.tree.map(lambda x: x[:rest], carry), tuple(x[size - rest :] for x in laid))
    return jax.tree.map(lambda old, new: old.at[:rest].set(new), carry, last)


def _sum(total: jax.Array) -> jax.Array:
    """Sum over a block, in the same order whatever the shape."""
    return jnp.asarray(functools.reduce(jnp.add, list(total)))


def _average(value: Callable[[Columns], Columns], laid: Columns, like: jax.Array) -> Columns:
    """Means over draws of the values at points, each of the shape and type of `like`."""

    def add(total: Columns, block: Columns) -> Columns:
        return tuple(map(jnp.add, total, value(block)))

    count = len(jax.eval_shape(value, tuple(x[:1] for x in laid)))
    start = (jnp.zeros((_BLOCK, *like.shape), like.dtype),) * count
    totals = _scan(add, start, laid)
    return tuple(_sum(total) / laid[0].shape[0] for total in totals)


@compiled
def _mixture_terms(laid: Columns, y: jax.Array, upper: jax.Array) -> Columns:
    """F (1 - F where `upper`), density and its slope."""
    terms = _emg_terms if len(laid) == 4 else _normal_terms
    return _average(lambda draw: terms(y, upper, *_columns(draw)), laid, y)


@compiled
def _coarse_terms(columns: Columns, u: jax.Array, upper: jax.Array) -> Columns:
    """`_mixture_terms` in single precision, from columns that are made already."""
    terms = _emg_terms if len(columns) == 3 else _normal_terms
    return _average(lambda draw: terms(u, upper, *draw), columns, u)


@compiled
def _mixture_log_density(laid: Columns, y: jax.Array) -> tuple[jax.Array]:
    """Logarithm of the mean density, the largest term taken out of the sum."""
    log_density = _emg_log_density if len(laid) == 4 else _normal_log_density

    def add(carry: Any, draw: Any) -> Any:
        largest, total = carry
        value = log_density(y, *_columns(draw))
        new = jnp.maximum(largest, value)
        reference = jnp.where(new == -jnp.inf, 0.0, new)
        total = total * jnp.exp(largest - reference) + jnp.exp(value - reference)
        return new, total

    zero = jnp.zeros((_BLOCK, *y.shape))
    parts, totals = _scan(add, (zero - jnp.inf, zero), laid)
    largest = jnp.max(parts, axis=0)
    reference = jnp.where(largest == -jnp.inf, 0.0, largest)
    total = _sum(totals * jnp.exp(parts - reference))
    return (largest + jnp.log(total / laid[0].shape[0]),)


@compiled
def _mixture_deviation(laid: Columns, y: jax.Array) -> Columns:
    """E|Y - y|."""
    deviation = _emg_deviation if len(laid) == 4 else _normal_deviation
    return _average(lambda draw: (deviation(y, *_columns(draw)),), laid, y)


@compiled
def _weight_moments(laid: Columns) -> tuple[jax.Array, jax.Array]:
    """Means and standard deviations (K, lanes) of K arrays of draws, exact for equal values."""
    first = [x[0] for x in laid]
    start = (jnp.zeros((_BLOCK, laid[0].shape[1])),) * len(laid)

    def survey(total: Columns, draw: Columns) -> Columns:
        return tuple(t + (x - x0) for t, x, x0 in zip(total, draw, first, strict=True))

    shift = [jnp.sum(total, axis=0) / len(laid[0]) for total in _scan(survey, start, laid)]

    def add(total: Columns, draw: Columns) -> Columns:
        centred = (x - x0 - mean for x, x0, mean in zip(draw, first, shift, strict=True))
        return tuple(t + x * x for t, x in zip(total, centred, strict=True))

    squares = [jnp.sum(total, axis=0) / len(laid[0]) for total in _scan(add, start, laid)]
    means = [x0 + mean for x0, mean in zip(first, shift, strict=True)]
    return jnp.stack(means), jnp.sqrt(jnp.stack(squares))


def weight_moments(weights: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Means and standard deviations (K, n) of weights (K, n, S)."""
    found = []
    for start in range(0, weights.shape[1], LANES):
        part = weights[:, start : start + LANES]
        with jax.enable_x64(True):
            moments = _weight_moments(tuple(_laid(x, LANES) for x in part))
        found.append(np.stack(moments)[..., : part.shape[1]])
    mean, sd = np.concatenate(found, axis=-1)
    return mean, sd


def _laid(values: FloatArray, lanes: int) -> FloatArray:
    """Draws (n, S) as (S, lanes), padded by the last site; a view where they lie so already."""
    n, size = values.shape
    if n == lanes:
        return np.ascontiguousarray(values.T, dtype=np.float64)
    laid = np.empty((size, lanes))
    laid[:, :n] = values.T
    laid[:, n:] = values[-1][:, None]
    return laid


@compiled
def _moments(laid: Columns) -> dict[str, jax.Array]:
    """Moments of the mixture, the parts of its variance, and the ranges of its parameters."""
    first = [x[0] for x in laid]
    size, lanes = laid[0].shape
    zero = jnp.zeros((_BLOCK, lanes))

    def survey(carry: Any, draw: Any) -> Any:
        sums, least, most = carry
        sums = [total + (x - x0) for total, x, x0 in zip(sums, draw, first, strict=True)]
        seen = [draw[0] + draw[1], *draw[2:]]
        least = [jnp.minimum(a, b) for a, b in zip(least, seen, strict=True)]
        return sums, least, [jnp.maximum(a, b) for a, b in zip(most, seen, strict=True)]

    infinite = [zero + jnp.inf] * (len(first) - 1)
    start = [zero] * len(first), infinite, [-x for x in infinite]
    sums, least, most = _scan(survey, start, laid)
    least, most = [jnp.min(x, axis=0) for x in least], [jnp.max(x, axis=0) for x in most]
    # Deviations from the first draw, then from their mean: exact for equal draws of any offset.
    shift = [jnp.sum(total, axis=0) / size for total in sums]

    def add(total: Any, draw: Any) -> Any:
        centred = [x - x0 - mean for x, x0, mean in zip(draw, first, shift, strict=True)]
        a, b, c = (centred[0], centred[1], centred[3] if len(draw) == 4 else zero[: len(draw[0])])
        return jax.tree.map(jnp.add, total, _moment_terms(a, b, c, *draw[2:]))

    names = _moment_terms(zero, zero, zero, zero)
    totals = _scan(add, jax.tree.map(jnp.zeros_like, names), laid)
    parts = {name: jnp.sum(total, axis=0) / size for name, total in totals.items()}
    aleatoric = parts["gaussian_noise"] + parts["skewed_noise"]
    means = [x0 + mean for x0, mean in zip(first, shift, strict=True)]
    return parts | {
        "aleatoric": aleatoric,
        "total": aleatoric + parts["epistemic"],
        "mean": sum(means[3:], means[0] + means[1]),
        "lowest": least[0],
        "highest": most[0],
        "least_scale": least[1],
        "largest_scale": most[1],
        "largest_skew": most[2] if len(most) == 3 else jnp.zeros_like(most[0]),
    }


def _moment_terms(
    a: jax.Array, b: jax.Array, c: jax.Array, scale: jax.Array, *skew: jax.Array
) -> dict[str, jax.Array]:
    """What one draw adds, from centred mixture a, residual b and skew c."""
    m = a + b + c
    square = m * m
    normal = scale * scale
    parts = {
        "gaussian_noise": normal,
        "skewed_noise": jnp.zeros_like(a),
        "epistemic": square,
        "weights": a * a,
        "residual": b * b,
        "calibration": c * c,
        "covariance": 2.0 * (a * (b + c) + b * c),
    }
    v, third, fourth = normal, jnp.zeros_like(a), jnp.zeros_like(a)
    if skew:
        squared = skew[0] * skew[0]
        parts["skewed_noise"] = squared
        v, third, fourth = normal + squared, 2.0 * squared * skew[0], 6.0 * squared * squared
    return parts | {
        "third": m * square + 3.0 * m * v + third,
        "fourth": square * square + 6.0 * square * v + 4.0 * m * third + 3.0 * v * v + fourth,
    }


@dataclass(frozen=True)
class Tile:
    """Some sites, laid out for the compiled programs (padded by the last site).

    Parameters
    ----------
    mixture, residual, scale, skew : (n, S)
        As in `bne.prediction.FieldDraws`; no skew for normal noise.
    lanes : int
        Sites that the programs are compiled for, at least n.
    """

    mixture: FloatArray
    residual: FloatArray
    scale: FloatArray
    skew: FloatArray | None = None
    lanes: int = LANES

    @property
    def n(self) -> int:
        """Number of sites."""
        return int(self.mixture.shape[0])

    @cached_property
    def _laid(self) -> tuple[FloatArray, ...]:
        """The draws as (S, lanes)."""
        given = (self.mixture, self.residual, self.scale, self.skew)
        return tuple(_laid(x, self.lanes) for x in given if x is not None)

    @cached_property
    def _coarse(self) -> tuple[tuple[FloatArray, ...], tuple[FloatArray, ...]]:
        """Columns in single precision, of all draws and of some of them, evenly spaced."""
        centre, unit = self._pad(self.moments["mean"]), self._pad(np.sqrt(self.moments["total"]))
        with jax.enable_x64(True):
            columns = tuple(map(np.asarray, _coarse_columns(self._laid, centre, unit)))
        size = self.mixture.shape[1]
        count = min(size, _THINNED)
        chosen = (2 * np.arange(count) + 1) * size // (2 * count)
        return columns, tuple(x[chosen] for x in columns)

    @cached_property
    def moments(self) -> dict[str, FloatArray]:
        """What `_moments` computes, (n,)."""
        with jax.enable_x64(True):
            return {name: np.asarray(x)[: self.n] for name, x in _moments(self._laid).items()}

    def pick(self, lane: IntArray) -> Tile:
        """A tile of at most `FEW` of the sites, in any order, with repetitions."""
        mixture, residual, scale, *skew = (x[:, lane].T for x in self._laid)
        return Tile(mixture, residual, scale, skew[0] if skew else None, FEW)

    def terms(self, y: FloatArray, upper: BoolArray) -> FloatArray:
        """F (1 - F where `upper`), density and its slope at m values of y per site, (3, m, n)."""
        return self._evaluate(partial(_mixture_terms, self._laid), y, upper)

    def coarse_terms(self, u: FloatArray, upper: BoolArray, *, thinned: bool) -> FloatArray:
        """`terms` of u = (y - mean) / sd to about five digits, of all draws or of some of them."""
        columns = self._coarse[1 if thinned else 0]
        points = u.astype(np.float32)
        return self._evaluate(partial(_coarse_terms, columns), points, upper)

    def log_density(self, y: FloatArray) -> FloatArray:
        """Log density at m values of y per site, (m, n)."""
        return np.asarray(self._evaluate(partial(_mixture_log_density, self._laid), y)[0])

    def deviation(self, y: FloatArray) -> FloatArray:
        """Mean absolute deviation E|Y - y| at m values of y per site, (m, n)."""
        return np.asarray(self._evaluate(partial(_mixture_deviation, self._laid), y)[0])

    def _evaluate(self, program: Callable[..., Any], *points: NDArray[Any]) -> FloatArray:
        count = len(points[0])
        padded = [self._pad(x) for x in points]
        found = []
        for start in range(0, count, _POINTS):
            # A single point would be compiled otherwise, and round otherwise, than several.
            chosen = np.minimum(
                np.arange(start, max(min(start + _POINTS, count), start + 2)), count - 1
            )
            with jax.enable_x64(True):
                found.append(np.stack(program(*(x[chosen] for x in padded))))
        whole = np.concatenate(found, axis=1)[:, :count, : self.n]
        return whole.astype(np.float64, copy=False)

    def _pad(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values (..., n) at all lanes, those of the last site repeated."""
        padding = [(0, 0)] * (values.ndim - 1) + [(0, self.lanes - self.n)]
        return np.pad(values, padding, mode="edge")
