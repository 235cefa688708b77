r"""Hamiltonian Monte Carlo for chains that move in step.

All chains share one step size, one metric and one jittered number of leapfrog steps, learned from
the draws of all of them; so the matrix products of several chains are one product, and warm-up is
short. `advance` is the compiled part: a fixed number of transitions of a shard of chains. Its
arguments are arrays, so that one compilation serves warm-up, sampling and every later fit of the
same shapes. What changes between its calls is decided in NumPy, by `bne.inference`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from bne.model import ModelData, Structure, log_density

__all__ = ["DIVERGENT_ENERGY", "Control", "Metric", "Plan", "Record", "Shard", "advance", "metric"]

FloatArray = NDArray[np.float64]
DIVERGENT_ENERGY = 1000.0
_GAMMA, _OFFSET, _DECAY = 0.05, 10.0, 0.75


class Shard(NamedTuple):
    """State of the chains that move together: positions (C, P) and the search for a step size."""

    position: Any
    row: Any
    log_step: Any
    log_step_mean: Any
    error: Any
    anchor: Any
    count: Any


class Metric(NamedTuple):
    """Inverse mass matrix: a diagonal (P,), and a dense block on the coordinates `index`."""

    diagonal: Any
    index: Any
    block: Any
    momentum: Any


class Plan(NamedTuple):
    """What the transitions of one call do.

    Leapfrog steps (T,), their size as a share of the learned one (T,), mixture rows (T, C), and the
    chance of every transition: normal numbers (T, C, P) and uniform ones (T, C). Where a share is
    not one, the step size does not adapt.
    """

    n_steps: Any
    share: Any
    rows: Any
    noise: Any
    uniform: Any


class Control(NamedTuple):
    """Whether the step size adapts (1 or 0), and to which acceptance rate."""

    adapting: Any
    target: Any


class Record(NamedTuple):
    """What a call leaves: positions (T, C, P), acceptance, energy and divergence (T, C)."""

    position: Any
    acceptance: Any
    energy: Any
    divergent: Any


def metric(factor: FloatArray, index: NDArray[np.int64], diagonal: FloatArray) -> Metric:
    r"""Metric whose inverse mass is :math:`LL^T` on `index` and `diagonal` (P,) elsewhere.

    With the lower triangular `factor` *L* momenta :math:`L^{-T}\xi` have covariance
    :math:`(LL^T)^{-1}`.
    """
    inverse = linalg.solve_triangular(factor, np.eye(len(factor)), lower=True)
    return Metric(diagonal, index, factor @ factor.T, inverse)


@partial(
    jax.jit,
    static_argnames=("structure",),
    compiler_options={"xla_cpu_multi_thread_eigen": False},
)
def advance(
    structure: Structure,
    shard: Shard,
    data: ModelData,
    mixtures: Any,
    gain: Any,
    metric: Metric,
    plan: Plan,
    control: Control,
) -> tuple[Shard, Record]:
    """Make one transition per entry of `plan`.

    A transition first moves each chain to its row of `mixtures` (S, n), shifting the coefficients
    of the residual by `gain` (m, n) times the change of the mixture, then follows a Hamiltonian
    trajectory.
    """
    density = partial(log_density, structure)
    gradient = jax.vmap(jax.value_and_grad(density), in_axes=(0, None, 0))

    def transition(shard: Shard, step: Plan) -> tuple[Shard, Record]:
        mixture = mixtures[step.rows]
        start = shard.position
        if gain.size:
            shift = (mixtures[shard.row] - mixture) @ gain.T
            start = start.at[:, structure.blocks()["residual"]].add(shift)
        momentum = _momentum(step.noise, metric)
        size = jnp.exp(jnp.where(control.adapting > 0, shard.log_step, shard.log_step_mean))
        size = step.share * size
        end, energy, change_of_energy = _trajectory(
            lambda q: gradient(q, data, mixture), start, momentum, metric, size, step.n_steps
        )
        acceptance = jnp.exp(-jnp.maximum(change_of_energy, 0.0))
        position = jnp.where((step.uniform < acceptance)[:, None], end, start)
        moved = shard._replace(position=position, row=step.rows)
        moved = _adapt(moved, acceptance, control, (control.adapting > 0) & (step.share == 1.0))
        divergent = change_of_energy > DIVERGENT_ENERGY
        return moved, Record(position, acceptance, energy, divergent)

    return jax.lax.scan(transition, shard, plan)


def _momentum(noise: Any, metric: Metric) -> Any:
    if _dense(noise, metric):
        return noise @ metric.momentum
    momentum = noise / jnp.sqrt(metric.diagonal)
    return momentum.at[:, metric.index].set(noise[:, metric.index] @ metric.momentum)


def _dense(position: Any, metric: Metric) -> bool:
    """Whether the block is the whole metric, in the order of the position."""
    return bool(metric.block.shape[0] == position.shape[1])


def _velocity(momentum: Any, metric: Metric) -> Any:
    if _dense(momentum, metric):
        return momentum @ metric.block
    velocity = momentum * metric.diagonal
    return velocity.at[:, metric.index].set(momentum[:, metric.index] @ metric.block)


def _trajectory(
    gradient: Any, start: Any, momentum: Any, metric: Metric, size: Any, n_steps: Any
) -> tuple[Any, Any, Any]:
    """Leapfrog path: its end, the energy at its start, and the change of energy.

    The gradient at the start belongs to the same loop as the others, so that the log density is
    traced and compiled once.
    """

    def leap(i: Any, carry: Any) -> Any:
        position, momentum, log_start, _ = carry
        moving = jnp.where(i > 0, size, 0.0)
        position = position + moving * _velocity(momentum, metric)
        log_p, slope = gradient(position)
        kick = jnp.where((i == 0) | (i == n_steps), 0.5, 1.0) * size
        log_start = jnp.where(i == 0, log_p, log_start)
        return position, momentum + kick * slope, log_start, log_p

    zero = jnp.zeros(len(start), start.dtype)
    end, momentum_end, log_start, log_end = jax.lax.fori_loop(
        0, n_steps + 1, leap, (start, momentum, zero, zero)
    )
    energy = _kinetic(momentum, metric) - log_start
    change = _kinetic(momentum_end, metric) - log_end - energy
    return end, energy, jnp.where(jnp.isnan(change), jnp.inf, change)


def _kinetic(momentum: Any, metric: Metric) -> Any:
    return 0.5 * jnp.sum(momentum * _velocity(momentum, metric), axis=1)


def _adapt(shard: Shard, acceptance: Any, control: Control, counts: Any) -> Shard:
    """One step of dual averaging (Hoffman and Gelman, 2014) on the harmonic mean acceptance."""
    achieved = 1.0 / jnp.mean(1.0 / jnp.maximum(acceptance, 1e-2))
    count = shard.count + 1.0
    rate = 1.0 / (count + _OFFSET)
    error = (1.0 - rate) * shard.error + rate * (control.target - achieved)
    log_step = shard.anchor - jnp.sqrt(count) / _GAMMA * error
    weight = count**-_DECAY
    mean = weight * log_step + (1.0 - weight) * shard.log_step_mean
    adapted = shard._replace(log_step=log_step, log_step_mean=mean, error=error, count=count)
    chosen: Shard = jax.tree.map(lambda new, old: jnp.where(counts, new, old), adapted, shard)
    return chosen
