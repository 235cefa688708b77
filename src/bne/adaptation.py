"""What warm-up learns from the draws: centring, metric, and the shift of the residual.

All of it only changes how fast the chains move, never the law they sample; and all of it is plain
NumPy on arrays of draws.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from sklearn.covariance import ledoit_wolf_shrinkage

from bne.hmc import Metric, metric
from bne.model import Centring, ModelData, Structure, coefficients, evaluate_fields, log_prior_sd

__all__ = [
    "DENSE_LIMIT",
    "first_metric",
    "gammas",
    "learn_centring",
    "learn_gain",
    "learn_metric",
    "recentre",
]

FloatArray = NDArray[np.float64]
DENSE_LIMIT = 400
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


def first_metric(structure: Structure) -> Metric:
    """Metric before any draw: prior sds, with hyperparameters taken to be known better."""
    variance = np.ones(structure.dimension)
    variance[: structure.n_hyper] = 0.1
    size = min(structure.dimension, DENSE_LIMIT)
    return metric(np.diag(variance[:size]), np.arange(size), variance)


def learn_metric(structure: Structure, positions: FloatArray) -> Metric:
    """Covariance of the draws, shrunk; dense on the coordinates that the data inform most."""
    raw = positions.var(axis=0)
    count = len(positions)
    variance = (count * raw + 5.0 * np.minimum(raw.mean(), 1.0)) / (count + 5.0)
    size = min(structure.dimension, DENSE_LIMIT)
    rank = variance.copy()
    rank[: structure.n_hyper + structure.n_trend] = -1.0
    index = np.sort(np.argsort(rank, kind="stable")[:size])
    scale = np.sqrt(variance[index])
    own = np.sqrt(np.where(raw[index] > 0.0, raw[index], 1.0))
    standard = (positions[:, index] - positions[:, index].mean(axis=0)) / own
    estimated = 2.0 * float(ledoit_wolf_shrinkage(standard, assume_centered=True))
    shrinkage = min(max(estimated, _LEAST_SHRINKAGE), 1.0)
    correlation = (1.0 - shrinkage) * (standard.T @ standard) / count
    correlation[np.diag_indices(size)] = 1.0
    return metric(scale[:, None] * correlation * scale, index, variance)


def learn_gain(structure: Structure, positions: FloatArray, data: ModelData) -> FloatArray:
    r"""Matrix (m, n) from a change of the data to the change of the residual's coefficients z.

    At the median of the draws, with noise variances :math:`v = \sigma^2 s^2 + \lambda^2` and prior
    variances *S* of the coefficients: :math:`(H^T V^{-1} H + S^{-1})^{-1} H^T V^{-1}`, the
    posterior mean of the linear-Gaussian model, in the units of z there. Being a shift of z, it
    stays moderate for every chain: each coefficient moves in proportion to its own prior sd.
    """
    if "residual" not in structure or "weights" in structure:
        return np.zeros((0, len(data.response)))
    process = next(p for p in structure.processes if p.name == "residual")
    centre = jnp.asarray(np.median(positions, axis=0))
    noise, log_sd, H = (np.asarray(x) for x in _linearised(structure, centre, data))
    unit = np.exp(np.asarray(data.centring["residual"].log_spread(log_sd)))  # prior sd of z
    columns = H * np.exp(log_sd)  # effect of each coefficient, in prior sds
    precision = columns.T / noise
    left = precision @ columns + np.eye(process.size)
    return np.asarray(unit[:, None] * np.linalg.solve(left, precision))


@partial(jax.jit, static_argnames=("structure",))
def _linearised(structure: Structure, position: Any, data: ModelData) -> tuple[Any, Any, Any]:
    process = next(p for p in structure.processes if p.name == "residual")
    fields, _ = evaluate_fields(structure, position, data)
    log_variance = 2.0 * structure.log_sigma(position) + jnp.zeros(len(data.response))
    if "log_scale" in structure:
        log_variance = log_variance + 2.0 * fields["log_scale"][0]
    noise = jnp.exp(log_variance)
    if "log_skew" in structure:
        noise = noise + jnp.exp(2.0 * (data.log_skew_mean + fields["log_skew"][0]))
    log_l = structure.log_lengthscale(position, "residual")
    columns = data.representation.columns(data.features, log_l, process.size)
    return noise, log_prior_sd(structure, position, data, process), columns
