"""What warm-up learns from the draws: centring, metric, and the shift of the residual.

All of it only changes how fast the chains move, never the law they sample; and all of it is plain
NumPy on arrays of draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy import linalg
from sklearn.covariance import ledoit_wolf_shrinkage

from bne.hmc import Metric, metric
from bne.model import (
    NEVER,
    Centring,
    ModelData,
    Structure,
    coefficients,
    information,
    log_prior_sd,
    site_laws,
)

__all__ = [
    "DENSE_LIMIT",
    "Linearised",
    "dense_part",
    "first_metric",
    "gammas",
    "learn_metric",
    "recentre",
]

FloatArray = NDArray[np.float64]
DENSE_LIMIT = 1500
_HYPER_SD = 0.3
_FEW = 0.7  # draws per coordinate
_NEGLIGIBLE = 0.05
_LEAST_SHRINKAGE = 1e-4  # keeps the condition number of a correlation matrix below P * 1e4


@partial(jax.jit, static_argnames=("structure",))
def gammas(
    structure: Structure, positions: Any, data: ModelData
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Coefficients (N, copies, size) and their log prior sds (N, size), of positions (N, P)."""

    def one(position: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        found = {p.name: coefficients(structure, position, data, p)[0] for p in structure.processes}
        spread = {p.name: log_prior_sd(structure, position, data, p) for p in structure.processes}
        return found, spread

    return jax.vmap(one)(positions)


def recentre(
    structure: Structure,
    positions: FloatArray,
    data: ModelData,
    centring: dict[str, Centring],
) -> tuple[FloatArray, ModelData]:
    """Positions (N, P) and data under another centring; the functions stay as they are."""
    found, spread = gammas(structure, positions, data)
    moved = positions.copy()
    for process in structure.processes:
        log_sd = np.asarray(spread[process.name])
        scale = np.exp(log_sd - centring[process.name].log_spread(log_sd, np))[:, None, :]
        z = np.asarray(found[process.name]) / scale
        moved[:, structure.blocks()[process.name]] = z.reshape(len(positions), -1)
    return moved, replace(data, centring=centring)


@dataclass(frozen=True)
class Linearised:
    r"""The model as if it were linear and Gaussian, around the median of some positions.

    The precision of the parameters that the data inform most is :math:`\sum_c J_c^TW_cJ_c + S^{-1}`
    (Gauss and Newton), with the slopes :math:`J_c` of mean, log scale and log skewness at the
    sites, the Fisher information :math:`W_c` of the sites about them, and prior variances *S*.

    Parameters
    ----------
    structure : Structure
    index : (I,) where these parameters stand in a position.
    precision : (I, I)
    spread : (P,) prior sds of all parameters, hyperparameters taken to be known better than so.
    log_sd : per process (size,) log prior sds of the coefficients.
    pull : (I, n) :math:`J^TW` of the mean, from a change of the data.
    """

    structure: Structure
    index: NDArray[np.int64]
    precision: FloatArray
    spread: FloatArray
    log_sd: dict[str, FloatArray]
    pull: FloatArray

    @staticmethod
    def around(
        structure: Structure, positions: FloatArray, data: ModelData, mixture: FloatArray
    ) -> Linearised:
        """Linearise at the median of positions (N, P), given a mixture (n,)."""
        index = dense_part(structure)
        centre = jnp.asarray(np.median(positions, axis=0))
        slopes, information = (
            np.asarray(found) for found in _slopes(structure, index, centre, data, mixture)
        )
        spread, log_sd = np.ones(structure.dimension), {}
        spread[: structure.n_hyper] = _HYPER_SD
        for process in structure.processes:
            log_sd[process.name] = np.asarray(log_prior_sd(structure, centre, data, process))
            unit = np.exp(data.centring[process.name].log_spread(log_sd[process.name], np))
            spread[structure.blocks()[process.name]] = np.tile(unit, process.copies)
        weighted = slopes * information[:, None, :]
        precision = sum(w @ slope.T for w, slope in zip(weighted, slopes, strict=True))
        precision[np.diag_indices(len(index))] += spread[index] ** -2
        h = structure.n_hyper
        precision[:h, :h] += np.asarray(_prior_information(structure, centre[:h], data))
        return Linearised(structure, index, precision, spread, log_sd, weighted[0])

    @cached_property
    def covariance(self) -> FloatArray:
        """Posterior covariance (I, I)."""
        return _inverse(self.precision)

    def variances(self) -> FloatArray:
        """Posterior variances (P,); prior ones where the metric is not dense."""
        found = self.spread**2
        found[self.index] = np.diag(self.covariance)
        return found

    def centring(self) -> dict[str, Centring]:
        r"""Where each coefficient turns: at the sd of what the data alone say about it.

        That given all other parameters: with many coefficients, each by itself may remain uncertain
        in a field that is known well, and were it not centred, the hyperparameters could hardly
        move. With the ratio *q* of its precisions from data and prior it is
        :math:`\mathrm{sd}/\sqrt q`. A coefficient of which the data say next to nothing never
        turns.
        """
        ratio = np.zeros(self.structure.dimension)
        ratio[self.index] = np.diag(self.precision) * self.spread[self.index] ** 2 - 1.0
        centring = {}
        for p in self.structure.processes:
            known = ratio[self.structure.blocks()[p.name]].reshape(p.copies, p.size).mean(axis=0)
            turn = self.log_sd[p.name] - 0.5 * np.log(np.maximum(known, _NEGLIGIBLE))
            centring[p.name] = Centring(np.where(known > _NEGLIGIBLE, turn, NEVER))
        return centring

    def gain(self) -> FloatArray:
        r"""Matrix (m, n) from a change of the data to the change of the residual's coefficients z.

        The posterior mean :math:`\Sigma J^TW` given all other parameters. Being a shift of z, it
        stays moderate for every chain: each coefficient moves in proportion to its own prior sd.
        """
        block = self.structure.blocks()["residual"]
        here = np.flatnonzero((self.index >= block.start) & (self.index < block.stop))
        found = np.zeros((block.stop - block.start, self.pull.shape[1]))
        found[self.index[here] - block.start] = (
            _inverse(self.precision[np.ix_(here, here)]) @ self.pull[here]
        )
        return found


def learn_metric(positions: FloatArray, local: Linearised) -> Metric:
    """Covariance of the draws (N, P), shrunk towards that of the linearised model.

    In the coordinates that would be independent under the latter, correlations of the draws are
    shrunk to zero (Ledoit and Wolf, 2004) and few draws hardly move the variances from one. Fewer
    than `_FEW` draws per coordinate, themselves correlated, would add more noise than they tell:
    the metric is then that of the linearised model alone. It is diagonal outside `dense_part`.
    """
    if len(positions) < _FEW * len(local.index):
        return first_metric(local)
    root = np.linalg.cholesky(local.covariance)
    centred = positions - positions.mean(axis=0)
    white = linalg.solve_triangular(root, centred[:, local.index].T, lower=True).T
    count, raw = len(positions), white.var(axis=0)
    own = np.sqrt(np.where(raw > 0.0, raw, 1.0))
    estimated = 2.0 * float(ledoit_wolf_shrinkage(white / own, assume_centered=True))
    shrinkage = min(max(estimated, _LEAST_SHRINKAGE), 1.0)
    correlation = (1.0 - shrinkage) * ((white / own).T @ (white / own)) / count
    correlation[np.diag_indices(len(own))] = 1.0
    scale = np.sqrt(_steadied(raw, np.minimum(raw.mean(), 1.0), count))
    factor = root @ (scale * np.linalg.cholesky(correlation).T).T
    diagonal = _steadied(positions.var(axis=0), local.variances(), count)
    return metric(np.asarray(factor), local.index, diagonal)


def first_metric(local: Linearised) -> Metric:
    """Metric before any draw: that of the linearised model."""
    factor = np.asarray(np.linalg.cholesky(local.covariance))
    return metric(factor, local.index, local.variances())


def dense_part(structure: Structure) -> NDArray[np.int64]:
    """Parameters on which the metric is dense: all, or as many as `DENSE_LIMIT`.

    Of the coefficients the first of every process, which are its slowest waves.
    """
    free = DENSE_LIMIT - structure.n_hyper - structure.n_trend
    total = sum(p.copies * p.size for p in structure.processes)
    share = min(1.0, free / max(total, 1))
    kept = [np.arange(structure.n_hyper + structure.n_trend)]
    for process in structure.processes:
        start = structure.blocks()[process.name].start
        first = start + np.arange(process.copies) * process.size
        kept += [np.arange(f, f + int(share * process.size)) for f in first]
    return np.concatenate(kept)


def _steadied(variance: FloatArray, expected: Any, count: int) -> FloatArray:
    """Variances of a number of draws, as if five more had the one expected."""
    return np.asarray((count * variance + 5.0 * expected) / (count + 5.0))


def _inverse(precision: FloatArray) -> FloatArray:
    factor = linalg.cho_factor(precision, lower=True, check_finite=False)
    return np.asarray(linalg.cho_solve(factor, np.eye(len(precision)), check_finite=False))


@partial(jax.jit, static_argnames=("structure",))
def _prior_information(structure: Structure, hyper: Any, data: ModelData) -> Any:
    r"""Information (H, H) of the centred coefficients about the hyperparameters.

    With z ~ N(0, rho^2) it is :math:`2\sum_j g_jg_j^T`, where
    :math:`g_j = \partial\log\rho_j/\partial\theta`.
    """

    def log_spreads(hyper: Any) -> Any:
        parts = []
        for process in structure.processes:
            log_sd = log_prior_sd(structure, hyper, data, process)
            spread = data.centring[process.name].log_spread(log_sd)
            parts.append(jnp.sqrt(2.0 * process.copies) * spread)
        return jnp.concatenate([jnp.zeros(1), *parts])

    slopes = jax.jacfwd(log_spreads)(hyper)
    return slopes.T @ slopes


@partial(jax.jit, static_argnames=("structure",))
def _slopes(
    structure: Structure, index: Any, position: Any, data: ModelData, mixture: Any
) -> tuple[Any, Any]:
    """Slopes (3, I, n) of mean, log scale and log skewness, and the information (3, n) on them."""

    def moments(position: Any) -> Any:
        return jnp.stack(site_laws(structure, position, data, mixture)[0])

    directions = jnp.zeros((len(index), len(position))).at[jnp.arange(len(index)), index].set(1.0)
    slopes = jax.vmap(lambda d: jax.jvp(moments, (position,), (d,))[1], out_axes=1)(directions)
    _, log_scale, log_skew = moments(position)
    return slopes, jnp.stack(information(log_scale, log_skew, "log_skew" in structure))
