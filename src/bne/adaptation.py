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
    Centring,
    ModelData,
    Structure,
    coefficients,
    evaluate_fields,
    information,
    log_prior_sd,
)

__all__ = [
    "DENSE_LIMIT",
    "Linearised",
    "first_metric",
    "gammas",
    "learn_centring",
    "learn_metric",
    "recentre",
]

FloatArray = NDArray[np.float64]
DENSE_LIMIT = 1200
_HYPER_VARIANCE = 0.1
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


def learn_centring(
    structure: Structure, positions: FloatArray, data: ModelData
) -> dict[str, Centring]:
    """Centre each coefficient by the share of its prior variance that the data explain."""
    found, spread = gammas(structure, positions, data)
    centring = {}
    for process in structure.processes:
        log_sd = np.asarray(spread[process.name])
        explained = np.asarray(found[process.name]).var(axis=0).mean(axis=0)
        share = np.clip(1.0 - explained / np.exp(2.0 * log_sd).mean(axis=0), 0.0, 1.0)
        share[share < _NEGLIGIBLE] = 0.0
        centring[process.name] = Centring(share, log_sd.mean(axis=0))
    return centring


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
    """The model as if it were linear and Gaussian, around the median of some positions.

    Parameters
    ----------
    structure : Structure
    effects : per process (n, size) columns, the field that one prior sd of a coefficient adds.
    units : per process (size,) prior sds of z.
    information : per process (copies, n) Fisher information of the sites about the field.
    """

    structure: Structure
    effects: dict[str, FloatArray]
    units: dict[str, FloatArray]
    information: dict[str, FloatArray]

    @staticmethod
    def around(structure: Structure, positions: FloatArray, data: ModelData) -> Linearised:
        """Linearise at the median of positions (N, P)."""
        found = _linearised(structure, jnp.asarray(np.median(positions, axis=0)), data)
        return Linearised(structure, *jax.tree.map(np.asarray, found))

    @cached_property
    def covariances(self) -> dict[str, list[FloatArray]]:
        r"""Posterior covariance (size, size) of z, per process and copy.

        :math:`U (H^T W H + I)^{-1} U` with the effects *H*, information *W* and units *U*.
        """
        return {
            p.name: [
                self.units[p.name][:, None]
                * _inverse(self.effects[p.name], row)
                * self.units[p.name]
                for row in self.information[p.name]
            ]
            for p in self.structure.processes
        }

    def variances(self) -> FloatArray:
        """Posterior variances (P,), with hyperparameters taken to be known better than not."""
        n_hyper, n_trend = self.structure.n_hyper, self.structure.n_trend
        parts = [np.full(n_hyper, _HYPER_VARIANCE), np.ones(n_trend)]
        parts += [np.diag(block) for blocks in self.covariances.values() for block in blocks]
        return np.concatenate(parts)

    def covariance(self, index: NDArray[np.int64]) -> FloatArray:
        """Posterior covariance of some coordinates, uncorrelated where it is not known."""
        matrix = np.diag(self.variances()[index])
        start = self.structure.n_hyper + self.structure.n_trend
        for block in (block for blocks in self.covariances.values() for block in blocks):
            here = np.flatnonzero((index >= start) & (index < start + len(block)))
            chosen = index[here] - start
            matrix[np.ix_(here, here)] = block[np.ix_(chosen, chosen)]
            start += len(block)
        return matrix

    def gain(self) -> FloatArray:
        r"""Matrix (m, n) from a change of the data to the change of the residual's coefficients z.

        The posterior mean :math:`U (H^T W H + I)^{-1} H^T W` of the linear-Gaussian model, in the
        units of z. Being a shift of z, it stays moderate for every chain: each coefficient moves
        in proportion to its own prior sd.
        """
        effects, (information,) = self.effects["residual"], self.information["residual"]
        posterior = self.covariances["residual"][0] / self.units["residual"]
        return np.asarray(posterior @ (effects.T * information))


def learn_metric(positions: FloatArray, local: Linearised) -> Metric:
    """Covariance of the draws (N, P), shrunk towards that of the linearised model.

    In the coordinates that would be independent under the latter, correlations of the draws are
    shrunk to zero (Ledoit and Wolf, 2004) and few draws hardly move the variances from one. The
    metric is dense on the coordinates that the data inform most, diagonal elsewhere.
    """
    index = dense_part(local)
    root = np.linalg.cholesky(local.covariance(index))
    centred = positions - positions.mean(axis=0)
    white = linalg.solve_triangular(root, centred[:, index].T, lower=True).T
    count, raw = len(positions), white.var(axis=0)
    own = np.sqrt(np.where(raw > 0.0, raw, 1.0))
    estimated = 2.0 * float(ledoit_wolf_shrinkage(white / own, assume_centered=True))
    shrinkage = min(max(estimated, _LEAST_SHRINKAGE), 1.0)
    correlation = (1.0 - shrinkage) * ((white / own).T @ (white / own)) / count
    correlation[np.diag_indices(len(index))] = 1.0
    scale = np.sqrt(_steadied(raw, np.minimum(raw.mean(), 1.0), count))
    factor = root @ (scale * np.linalg.cholesky(correlation).T).T
    diagonal = _steadied(positions.var(axis=0), local.variances(), count)
    return metric(np.asarray(factor), index, diagonal)


def first_metric(local: Linearised) -> Metric:
    """Metric before any draw: that of the linearised model."""
    index = dense_part(local)
    factor = np.asarray(np.linalg.cholesky(local.covariance(index)))
    return metric(factor, index, local.variances())


def dense_part(local: Linearised) -> NDArray[np.int64]:
    """Coordinates on which the metric is dense, in order: at most `DENSE_LIMIT`."""
    structure = local.structure
    rank = local.variances()
    rank[: structure.n_hyper + structure.n_trend] = -1.0
    return np.sort(np.argsort(rank, kind="stable")[:DENSE_LIMIT])


def _steadied(variance: FloatArray, expected: Any, count: int) -> FloatArray:
    """Variances of a number of draws, as if five more had the one expected."""
    return np.asarray((count * variance + 5.0 * expected) / (count + 5.0))


def _inverse(effects: FloatArray, information: FloatArray) -> FloatArray:
    precision = (effects.T * information) @ effects + np.eye(effects.shape[1])
    factor = linalg.cho_factor(precision, lower=True, check_finite=False)
    return np.asarray(linalg.cho_solve(factor, np.eye(len(precision)), check_finite=False))


@partial(jax.jit, static_argnames=("structure",))
def _linearised(
    structure: Structure, position: Any, data: ModelData
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Effects, units and information of every process, at one position."""
    fields, _ = evaluate_fields(structure, position, data)
    effects, units = {}, {}
    for process in structure.processes:
        log_l = structure.log_lengthscale(position, process.name)
        log_sd = log_prior_sd(structure, position, data, process)
        columns = data.representation.columns(data.features, log_l, process.size)
        effects[process.name] = columns * jnp.exp(log_sd)
        units[process.name] = jnp.exp(data.centring[process.name].log_spread(log_sd))
    return effects, units, information(structure, position, fields, data)
