r"""Where chains start: dispersed over the prior, or near what is known already.

The residual given the mixture and normal noise (step 2) is a linear-Gaussian model, so that its
hyperparameters :math:`\theta` have the evidence

.. math:: \log p(y \mid \theta) = -n\log\sigma - \tfrac12\log|A| - \tfrac12 r^TA^{-1}r
          + \mathrm{const}, \qquad A = I + CC^T,

with the effects *C* of the coefficients, in prior sds, and the residuals *r*, both over
:math:`\sigma`; some hundred sites suffice for a start. Its chains start around the highest
posterior density of :math:`\theta`, with coefficients drawn from their law given :math:`\theta`:
from the prior, a noise far below its prior median would take them long to find.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy import linalg, optimize

from bne.inference import Draws
from bne.model import ModelData, Structure, log_hyperprior, log_prior_sd

__all__ = ["around_the_peak", "overdispersed", "warm_start"]

FloatArray = NDArray[np.float64]
_DISPERSION = 1.5  # of the starting points, in rough posterior sds
_FINE = {"sigma": 0.02, "lengthscale": 0.1, "amplitude": 0.8}  # quantiles of a second start
_BOUNDS = np.array([1e-4, 1.0 - 1e-4])
_MOST_SITES = 400
_LEAST_SD, _LARGEST_SD, _STEP = 0.02, 0.7, 0.02


def overdispersed(positions: FloatArray, structure: Structure) -> FloatArray:
    """Starting points from prior draws, their hyperparameters drawn towards the middle."""
    start = positions.copy()
    hyper = start[:, : structure.n_hyper]
    middle = np.median(hyper, axis=0)
    start[:, : structure.n_hyper] = middle + 0.5 * (hyper - middle)
    return start


def warm_start(
    structure: Structure, data: ModelData, draws: Draws, start: FloatArray
) -> FloatArray:
    """Put the last draws of an earlier step into `start` (chains, P), where both know a term.

    Chain c continues chain c of `draws` (cyclically); both are non-centred.
    """
    moved, earlier = start.copy(), draws.structure
    chains = np.arange(len(start)) % draws.n_chains
    for i, name in enumerate(structure.hyperparameters):
        if name in earlier.hyperparameters:
            moved[:, i] = draws.value(name)[chains, -1]
    if structure.n_trend == earlier.n_trend:
        moved[:, structure.n_hyper : structure.n_hyper + structure.n_trend] = draws.trend[
            chains, -1
        ]
    for process in structure.processes:
        if process in earlier.processes:
            gamma = draws.gamma[process.name][chains, -1]
            with jax.enable_x64(True):
                sd = np.exp([log_prior_sd(structure, row, data, process) for row in moved])
            block = structure.blocks()[process.name]
            moved[:, block] = (gamma / sd[:, None, :]).reshape(len(moved), -1)
    return moved


def around_the_peak(
    structure: Structure,
    data: ModelData,
    mixture: FloatArray,
    chains: int,
    rng: np.random.Generator,
) -> FloatArray:
    """Positions (chains, P), non-centred, around the peak of the evidence of step 2.

    Parameters
    ----------
    structure : Structure
        With the residual alone.
    data : ModelData
    mixture : (n,)
    chains : int
    rng : Generator
    """
    data = data.non_centred(structure)
    response = np.asarray(data.response) - mixture
    peak, sd = _peak(structure, data, response)
    hyper = peak + _DISPERSION * sd * rng.standard_normal((chains, len(peak)))
    with jax.enable_x64(True):
        effects = [np.asarray(_effects(structure, theta, data)) for theta in hyper]
    return np.stack(
        [
            np.concatenate([theta, _draw(columns, response / np.exp(theta[0]), rng)])
            for theta, columns in zip(hyper, effects, strict=True)
        ]
    )


def _peak(
    structure: Structure, data: ModelData, response: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Highest posterior density of the hyperparameters, and their rough sds."""
    priors = [data.priors[name.removeprefix("log_")] for name in structure.hyperparameters]
    ends = np.log([prior.quantile(_BOUNDS) for prior in priors])

    def descent(theta: FloatArray) -> tuple[float, FloatArray]:
        with jax.enable_x64(True):
            value, slope = _log_posterior(structure, theta, data, response)
        if not np.isfinite(value):
            return 1e10, np.zeros(len(theta))
        return -float(value), -np.asarray(slope)

    kinds = [name.removeprefix("log_").partition(".")[0] for name in structure.hyperparameters]
    levels = [dict.fromkeys(_FINE, 0.5), _FINE]
    found = [
        optimize.minimize(
            descent,
            np.array([np.log(p.quantile(q[kind])) for p, kind in zip(priors, kinds, strict=True)]),
            jac=True,
            method="L-BFGS-B",
            bounds=optimize.Bounds(ends[:, 0], ends[:, 1]),
            options={"ftol": 1e-6, "maxiter": 40},
        )
        for q in levels
    ]
    peak = np.asarray(min(found, key=lambda result: result.fun).x)
    steps = _STEP * np.eye(len(peak))
    curvature = [(descent(peak + h)[1] - descent(peak - h)[1]) @ h / _STEP**2 for h in steps]
    return peak, np.clip(1.0 / np.sqrt(0.5 * np.maximum(curvature, 1e-3)), _LEAST_SD, _LARGEST_SD)


def _effects(structure: Structure, theta: Any, data: ModelData) -> Any:
    """Effects (n, p + m) of trend and residual, in prior sds, over sigma."""
    (process,) = structure.processes
    log_l = structure.log_lengthscale(theta, "residual")
    columns = data.representation.columns(data.features, log_l, process.size)
    columns = columns * jnp.exp(log_prior_sd(structure, theta, data, process))
    whole = jnp.concatenate([jnp.asarray(data.trend), columns], axis=1)
    return whole * jnp.exp(-structure.log_sigma(theta))


@partial(jax.jit, static_argnames=("structure",))
def _log_posterior(
    structure: Structure, theta: Any, data: ModelData, response: Any
) -> tuple[Any, Any]:
    """Log posterior density of the hyperparameters given some of the sites, and its slope."""
    apart = -(-len(response) // _MOST_SITES)

    def density(theta: Any) -> Any:
        effects = _effects(structure, theta, data)[::apart]
        r = response[::apart] * jnp.exp(-structure.log_sigma(theta))
        factor = jnp.linalg.cholesky(jnp.eye(len(r)) + effects @ effects.T)
        whitened = jax.scipy.linalg.solve_triangular(factor, r, lower=True)
        log_evidence = -len(r) * structure.log_sigma(theta) - jnp.sum(jnp.log(jnp.diag(factor)))
        return log_evidence - 0.5 * whitened @ whitened + log_hyperprior(structure, theta, data)

    value: tuple[Any, Any] = jax.value_and_grad(density)(theta)
    return value


def _draw(effects: FloatArray, response: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Coefficients (p + m,), in prior sds, from their law given the hyperparameters."""
    factor = np.linalg.cholesky(np.eye(effects.shape[1]) + effects.T @ effects)
    explained = linalg.solve_triangular(factor, effects.T @ response, lower=True)
    noise = rng.standard_normal(len(factor))
    return np.asarray(linalg.solve_triangular(factor, explained + noise, lower=True, trans=1))
