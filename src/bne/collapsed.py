r"""Step 2 sampled with the residual integrated out.

Only the two or three hyperparameters :math:`\theta` need a Markov chain; every draw of the
coefficients given them is an independent one (see `bne.evidence`). The chain proposes from a
*surrogate* :math:`\tilde\pi` of the posterior :math:`\pi` given its mixture (`bne.surrogate`): a
few independent Metropolis steps under the surrogate end in a proposal, which is accepted with
probability

.. math:: \min\Bigl(1, \frac{\pi(\theta')\,\tilde\pi(\theta)}
          {\pi(\theta)\,\tilde\pi(\theta')}\Bigr)

(Christen and Fox, 2005), so that the surrogate only decides how fast the chain moves, never the law
it samples: one factorisation for every kept draw mostly makes it a new one. Some proposals come
straight from the heavy-tailed law of candidates: where the surrogate is wrong, they lead away.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from bne import surrogate
from bne._compile import compiled_by_structure
from bne.evidence import Regression, explain, factorise, log_evidence, prior_sd
from bne.inference import Draws, Settings, advance_to_the_end
from bne.model import ModelData, Structure
from bne.surrogate import Points, Surrogate

__all__ = ["Collapsed", "sample_collapsed"]

FloatArray = NDArray[np.float64]
Progress = Callable[[int, int], None]

_BLOCK = 25  # kept draws of one compiled call
_CHEAP = 200  # coefficients up to which a kept draw takes several transitions
_TRANSITIONS = 4
_WARMUP_BLOCKS = 2
_INNER = 16  # steps under the surrogate for one proposal
_PLAIN = 0.15, 0.05  # share of the proposals that do without it, where cheap or not


class Chain(NamedTuple):
    """State of a chain: its place and the factor of A there."""

    point: Points
    factor: Any


class Plan(NamedTuple):
    """Kept draws of one call.

    Rows of the mixtures (T,), and for each of the transitions between them whether to do without
    the surrogate (T, N), candidates (T, N, I), and keys (T, N + 1).
    """

    rows: Any
    plain: Any
    candidates: Any
    keys: Any


def sample_collapsed(
    structure: Structure,
    data: ModelData,
    mixtures: FloatArray,
    settings: Settings,
    seed: int,
    *,
    progress: Progress | None = None,
    state: Mapping[str, NDArray[Any]] | None = None,
    after_block: Callable[[Collapsed], None] | None = None,
) -> Draws:
    """Sample the posterior of step 2: the residual alone, under normal noise of one scale.

    Parameters
    ----------
    structure : Structure
    data : ModelData
        With any centring.
    mixtures : (S, n)
        Mixtures at the sites: one for all draws (S = 1), or one for each (S = chains * draws, chain
        after chain): the cut posterior.
    settings : Settings
        Of which only the numbers of chains and draws matter.
    seed : int
    progress, state, after_block
        As for `bne.inference.sample`.

    Returns
    -------
    Draws
        Without divergences or energies: there are no trajectories.
    """
    run = Collapsed(structure, data, mixtures, settings, seed)
    if state is not None:
        run.restore(state)
    with (
        threadpool_limits(1, user_api="blas"),
        ThreadPoolExecutor(min(settings.chains, os.cpu_count() or 1)) as pool,
    ):
        run.prepare(pool)
        advance_to_the_end(run, pool, progress, after_block)
    return run.draws()


class Collapsed:
    """A run in progress: `prepare` it, then `step` advances it by one block of draws."""

    def __init__(
        self,
        structure: Structure,
        data: ModelData,
        mixtures: FloatArray,
        settings: Settings,
        seed: int,
    ) -> None:
        self.structure = structure
        self.settings = settings
        self.seed = seed
        self.regression = Regression.of(structure, data.non_centred(structure), mixtures)
        self.block = 0
        self.points: Points | None = None
        self.kept: list[dict[str, FloatArray]] = []

    @property
    def blocks(self) -> int:
        """Number of compiled calls of a chain."""
        return _WARMUP_BLOCKS + -(-self.settings.draws // _BLOCK)

    @property
    def paired(self) -> bool:
        """Whether every kept draw has its own mixture."""
        return len(self.regression.residuals) > 1

    def prepare(self, pool: ThreadPoolExecutor) -> None:
        """Build the surrogate, and choose where chains start if they have not."""
        rng = np.random.default_rng([self.seed, 29])
        self.candidates, self.surrogate, draws = surrogate.build(
            self.structure, self.regression, rng, pool
        )
        if self.points is None:
            self.points = self.candidates.points(draws[: self.settings.chains])

    def step(self, pool: ThreadPoolExecutor) -> None:
        """Advance every chain by one block."""
        assert self.points is not None, "prepare comes first"
        points = self.points

        def advance(chain: int) -> tuple[Points, dict[str, FloatArray]]:
            point = Points(*(x[chain] for x in points))
            plan = self._plan(chain)
            with jax.enable_x64(True):
                start = Chain(point, _factor(self.structure, point.theta, self.regression))
                found = _advance(self.structure, start, self.regression, self.surrogate, plan)
                moved, record = jax.tree.map(np.asarray, (found[0].point, found[1]))
            return moved, record

        found = list(pool.map(advance, range(self.settings.chains)))
        self.points = Points(*(np.stack(x) for x in zip(*(p for p, _ in found), strict=True)))
        if self.block >= _WARMUP_BLOCKS:
            records = [record for _, record in found]
            self.kept.append({name: np.stack([r[name] for r in records]) for name in records[0]})
        self.block += 1

    def draws(self) -> Draws:
        """Return the kept draws."""
        structure, count = self.structure, self.settings.draws
        kept = {
            name: np.concatenate([block[name] for block in self.kept], axis=1)[:, :count]
            for name in self.kept[0]
        }
        (process,) = structure.processes
        order = np.tile(np.arange(count, dtype=np.int32), (self.settings.chains, 1))
        return Draws(
            structure,
            kept["hyper"],
            kept["coefficients"][..., : structure.n_trend].copy(),
            {process.name: kept["coefficients"][..., None, structure.n_trend :].copy()},
            {"acceptance": kept["acceptance"]},
            order if self.paired else None,
        )

    def state(self) -> dict[str, NDArray[Any]]:
        """Return everything that `restore` needs to go on, as plain arrays."""
        found: dict[str, NDArray[Any]] = {"block": np.asarray(self.block)}
        if self.points is not None:
            found |= {f"point.{name}": x for name, x in self.points._asdict().items()}
        for i, block in enumerate(self.kept):
            found |= {f"kept.{i}.{name}": values for name, values in block.items()}
        return found

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `state` returned: the draws will be those of an unbroken run."""
        self.block = int(state["block"])
        self.points = Points(*(state[f"point.{name}"] for name in Points._fields))
        names = {key.split(".", 2)[2] for key in state if key.startswith("kept.")}
        self.kept = [
            {name: state[f"kept.{i}.{name}"] for name in names}
            for i in range(max(0, self.block - _WARMUP_BLOCKS))
        ]

    def _plan(self, chain: int) -> Plan:
        rng = np.random.default_rng([self.seed, 37, self.block, chain])
        rows = np.zeros(_BLOCK, dtype=np.int32)
        if self.paired:
            first = (self.block - _WARMUP_BLOCKS) * _BLOCK
            own = np.clip(first + np.arange(_BLOCK), 0, self.settings.draws - 1)
            rows = (chain * self.settings.draws + own).astype(np.int32)
        cheap = self.structure.dimension - self.structure.n_hyper <= _CHEAP
        count, share = (_TRANSITIONS, _PLAIN[0]) if cheap else (1, _PLAIN[1])
        shape = _BLOCK, count
        candidates = self.candidates.sample(rng, (*shape, _INNER))
        plain = rng.random(shape) < share
        key = jax.random.key(np.uint32(rng.integers(2**32)))
        return Plan(rows, plain, candidates, jax.random.split(key, (_BLOCK, count + 1)))


_factor = compiled_by_structure(factorise)


@compiled_by_structure
def _advance(
    structure: Structure, chain: Chain, regression: Regression, surrogate: Surrogate, plan: Plan
) -> tuple[Chain, dict[str, Any]]:
    """Make one kept draw per entry of `plan`."""
    data = regression.data

    def exact(chain: Chain, row: Any) -> tuple[Any, Any]:
        theta, factor = chain.point.theta, chain.factor
        explained = explain(structure, theta, factor, regression, row)
        value = log_evidence(structure, theta, factor, explained, regression, row)
        return value + chain.point.prior, explained

    def transition(carry: tuple[Chain, Any, Any], step: Plan) -> tuple[Any, Any]:
        chain, old, _ = carry
        key_proposal, key_accept = jax.random.split(step.keys)
        point, correction = _propose(chain.point, step, surrogate, key_proposal)
        moved = Chain(point, factorise(structure, point.theta, regression))
        new, explained = exact(moved, step.rows)
        acceptance = jnp.exp(jnp.minimum(new - old + correction, 0.0))
        accept = jax.random.uniform(key_accept, dtype=acceptance.dtype) < acceptance
        proposed = moved, new, explained
        return jax.tree.map(partial(jnp.where, accept), proposed, carry), acceptance

    def draw(chain: Chain, step: Plan) -> tuple[Chain, dict[str, Any]]:
        rows = jnp.full(step.plain.shape, step.rows)
        steps = Plan(rows, step.plain, step.candidates, step.keys[1:])
        carry = (chain, *exact(chain, step.rows))
        (chain, _, explained), acceptance = jax.lax.scan(transition, carry, steps)
        noise = jax.random.normal(step.keys[0], explained.shape, explained.dtype)
        z = jax.scipy.linalg.solve_triangular(chain.factor, explained + noise, lower=True, trans=1)
        theta = chain.point.theta
        kept = {"hyper": theta, "coefficients": z * prior_sd(structure, theta, data)}
        return chain, kept | {"acceptance": jnp.mean(acceptance)}

    return jax.lax.scan(draw, chain, plan)


def _propose(start: Points, step: Plan, surrogate: Surrogate, key: Any) -> tuple[Points, Any]:
    """Proposal, and the log ratio by which it is corrected: old over new.

    The end of a chain under the surrogate, or where the step is plain, the first candidate.
    """
    points = Points(
        *(jnp.concatenate([a[None], b]) for a, b in zip(start, step.candidates, strict=True))
    )
    basis, quadratic = surrogate.basis(points.steps)
    value = basis @ surrogate.coefficients[step.rows] + quadratic
    weight = value - points.law
    uniform = jax.random.uniform(key, weight[1:].shape, weight.dtype)

    def move(at: Any, proposal: Any) -> tuple[Any, None]:
        index, u = proposal
        return jnp.where(jnp.log(u) < weight[index] - weight[at], index, at), None

    end, _ = jax.lax.scan(move, jnp.zeros((), int), (jnp.arange(1, len(weight)), uniform))
    end = jnp.where(step.plain, 1, end)
    reference = jnp.where(step.plain, points.law, value)
    return Points(*(x[end] for x in points)), reference[0] - reference[end]
