"""Where chains start: dispersed over the prior, or near what an earlier step knows already."""

from __future__ import annotations

import jax
import numpy as np
from numpy.typing import NDArray

from bne.inference import Draws
from bne.model import ModelData, Structure, log_prior_sd

__all__ = ["overdispersed", "warm_start"]

FloatArray = NDArray[np.float64]


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
