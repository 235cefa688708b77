r"""From a problem to the draws of its steps.

Three steps, each conditional on the last: the weights with no residual; the residual given the
weights; residual, scale and skewness given the weights. With ``strategy="cut"`` every kept draw of
the later steps has the mixture :math:`\sum_k f_k\omega_k` of its own draw of the weights, so that
their uncertainty reaches the end while the data never flow back from the residual to the weights.
``"plugin"`` gives all of them the posterior mean of the mixture; ``"joint"`` is a single step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from bne.checkpoint import Checkpoint
from bne.collapsed import sample_collapsed
from bne.inference import Draws, Settings, sample
from bne.model import ModelData, sample_prior, softmax_weights
from bne.problem import Problem
from bne.processes import Fourier
from bne.starts import overdispersed, warm_start

__all__ = ["StepProgress", "fit_steps", "mixtures_of", "site_values"]

FloatArray = NDArray[np.float64]
StepProgress = Callable[[str, int, int], None]
_BATCH = 250


def fit_steps(
    problem: Problem,
    settings: Settings,
    seed: int,
    *,
    progress: StepProgress | None = None,
    checkpoint: Checkpoint | None = None,
) -> dict[str, Draws]:
    """Fit every step of a problem, in order.

    Parameters
    ----------
    problem : Problem
    settings : Settings
    seed : int
        Fixes all draws.
    progress : callable, optional
        Called with the name of the step, the blocks done and the blocks in all.
    checkpoint : Checkpoint, optional
        Where to write progress, and to resume from.

    Returns
    -------
    dict of Draws
        Per step. Draw t of chain c of a later step goes with draw t of chain c of the weights.
    """
    done: dict[str, Draws] = {}
    for index, (step, structure) in enumerate(problem.structures().items()):
        stored = checkpoint.draws(step, structure) if checkpoint else None
        if stored is None:
            step_seed = int(np.random.SeedSequence([seed, index]).generate_state(1)[0])
            report = None if progress is None else partial(progress, step)
            stored = _fit_step(problem, step, done, settings, step_seed, report, checkpoint)
            if checkpoint is not None:
                checkpoint.keep(step, stored)
        done[step] = stored
    return done


def site_values(
    draws: Draws, data: ModelData, sites: NDArray[np.intp] | None = None
) -> dict[str, FloatArray]:
    """Processes (chain, draw, copies, n) at the training sites, or at some of them."""
    chosen = np.arange(len(data.response)) if sites is None else sites
    found = {}
    for process in draws.structure.processes:
        gamma = draws.gamma[process.name]
        flat = gamma.reshape(-1, *gamma.shape[2:])
        log_l = draws.value(f"log_lengthscale.{process.name}").ravel()
        parts = []
        with jax.enable_x64(True):
            for start in range(0, len(flat), _BATCH):
                part = slice(start, start + _BATCH)
                parts.append(np.asarray(_evaluate(data, log_l[part], flat[part]))[..., chosen])
        values = np.concatenate(parts)
        found[process.name] = values.reshape(*gamma.shape[:3], len(chosen))
    return found


def mixtures_of(draws: Draws, data: ModelData) -> FloatArray:
    """Mixtures (S, n) at the training sites, chain after chain, of draws that hold weights."""
    base = np.asarray(data.base)
    if "weights" not in draws.structure:
        return np.repeat(base.T, draws.n_chains * draws.n_draws, axis=0)
    contrasts = site_values(draws, data)["weights"].reshape(-1, base.shape[1] - 1, len(base))
    omega = softmax_weights(contrasts.transpose(1, 0, 2), base.shape[1], np)
    return np.asarray(np.einsum("nk,ksn->sn", base, omega))


@jax.jit
def _evaluate(data: ModelData, log_lengthscales: Any, gamma: Any) -> Any:
    """Fields (S, copies, n) of coefficients (S, copies, size)."""
    copies, size = gamma.shape[1:]
    missing = data.representation.n_coefficients - size
    padded = jnp.pad(gamma, ((0, 0), (0, 0), (0, missing)))

    def one(log_l: Any, coefficients: Any) -> Any:
        scales = jnp.full(copies, log_l)
        return data.representation.evaluate(data.features, scales, coefficients, (size,) * copies)

    return jax.vmap(one)(log_lengthscales, padded)


def _fit_step(
    problem: Problem,
    step: str,
    done: dict[str, Draws],
    settings: Settings,
    seed: int,
    progress: Callable[[int, int], None] | None,
    checkpoint: Checkpoint | None,
) -> Draws:
    structure, data = problem.structures()[step], problem.data
    mixtures = _given_mixtures(problem, done)
    if problem.options.inference == "fast":
        from bne.laplace import approximate

        count = settings.chains * settings.draws
        return approximate(structure, data, mixtures, count, seed, progress=progress)
    hooks: dict[str, Any] = {"progress": progress}
    if checkpoint is not None:
        hooks["state"] = checkpoint.state(step)
        hooks["after_block"] = partial(checkpoint.after_block, step)
    if step == "residual" and not isinstance(data.representation, Fourier):
        # Under random features the evidence is too rough in the length-scale.
        return sample_collapsed(structure, data, mixtures, settings, seed, **hooks)
    start = _start(problem, step, done, settings, seed)
    return sample(structure, data, mixtures, start, settings, seed, **hooks)


def _given_mixtures(problem: Problem, done: dict[str, Draws]) -> FloatArray:
    """Mixtures that a step is conditional on; equal weights where it is conditional on none."""
    if "weights" not in done:
        return np.asarray(problem.base.mean(axis=1)[None])
    mixtures = mixtures_of(done["weights"], problem.data)
    if problem.options.strategy == "plugin" or problem.n_models == 1:
        return np.asarray(mixtures.mean(axis=0, keepdims=True))
    return mixtures


def _start(
    problem: Problem, step: str, done: dict[str, Draws], settings: Settings, seed: int
) -> FloatArray:
    """Dispersed over the prior, but for what is known from an earlier step."""
    structure, data = problem.structures()[step], problem.data
    data = data.non_centred(structure)
    rng = np.random.default_rng([seed, 2])
    with jax.enable_x64(True):
        start = overdispersed(sample_prior(structure, data, rng, settings.chains), structure)
    if step == "full" and "residual" in done:
        return warm_start(structure, data, done["residual"], start)
    return start
