"""Sampling: warm-up, kept draws, and the three steps of the cut posterior.

`sample` runs one step: several chains in step with each other, in two or more shards that share
everything learned in warm-up and run side by side on the cores of the machine. The draws depend on
the seed alone, not on how many cores there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from bne.adaptation import (
    Linearised,
    first_metric,
    gammas,
    learn_metric,
    recentre,
)
from bne.hmc import Control, Metric, Plan, Record, Shard, advance
from bne.model import Centring, ModelData, Structure
from bne.site_processes import Dual, Exact

__all__ = ["Draws", "Sampler", "Settings", "advance_to_the_end", "sample"]

FloatArray = NDArray[np.float64]
Progress = Callable[[int, int], None]

_MAX_LEAPS = 512
_PATH_DIMENSIONS = 6
_CAREFUL, _CAREFUL_SHARE = 0.125, 0.25  # transitions with smaller steps, and how much smaller
_CACHED = 250_000  # numbers that stay in the cache of a core
_ADAPT_METRIC = (0.06, 0.12, 0.2, 0.31, 0.45, 0.65, 0.88)
_ADAPT_CENTRING = (0.12, 0.31, 0.65)


@dataclass(frozen=True)
class Settings:
    """How long and how carefully to sample.

    Parameters
    ----------
    chains, draws : int
        Number of chains, and of kept draws of each.
    warmup : int
        Transitions of each chain before the first kept draw.
    thin : int
        Transitions per kept draw.
    target_accept : float
        Acceptance rate that the step size aims at.
    path_length : float
        Length of a trajectory, in units of the posterior sd.
    """

    chains: int = 4
    draws: int = 1000
    warmup: int = 800
    thin: int = 3
    target_accept: float = 0.8
    path_length: float = 2.0
    block: int = 20

    @property
    def warmup_blocks(self) -> int:
        """Number of compiled calls in warm-up."""
        return max(8, -(-self.warmup // self.block))

    @property
    def blocks(self) -> int:
        """Number of compiled calls in all."""
        return self.warmup_blocks + -(-self.draws * self.thin // self.block)

    def shard_size(self, data: ModelData) -> int:
        """Chains that move in one compiled call.

        Two share the reading of features from memory; where those fit the cache, one by itself is
        quicker.
        """
        in_cache = sum(np.size(part) for part in jax.tree.leaves(data.features)) <= _CACHED
        alone = in_cache and not isinstance(data.representation, Exact | Dual)
        return 2 if self.chains % 2 == 0 and not alone else 1


@dataclass(frozen=True)
class Draws:
    """Kept draws of one step, free of centring.

    Parameters
    ----------
    structure : Structure
    hyper : (chain, draw, H) hyperparameters, in the order of ``structure.hyperparameters``.
    trend : (chain, draw, p) standardised coefficients of the prior mean.
    gamma : per process (chain, draw, copies, size) coefficients.
    stats : per name (chain, draw) sampler statistics: acceptance, energy, diverging, and the
        number ``transitions`` of transitions in which divergences were counted.
    order : (chain, draw), optional
        Draws in the order in which they were made, where that differs from the order in which
        they stand.
    """

    structure: Structure
    hyper: FloatArray
    trend: FloatArray
    gamma: dict[str, FloatArray]
    stats: dict[str, NDArray[Any]] = field(default_factory=dict)
    order: NDArray[np.int32] | None = None

    @property
    def n_chains(self) -> int:
        """Number of chains."""
        return int(self.hyper.shape[0])

    @property
    def n_draws(self) -> int:
        """Number of kept draws of a chain."""
        return int(self.hyper.shape[1])

    def value(self, name: str) -> FloatArray:
        """Draws (chain, draw) of a hyperparameter."""
        return self.hyper[..., self.structure.hyperparameters.index(name)]


def sample(
    structure: Structure,
    data: ModelData,
    mixtures: FloatArray,
    start: FloatArray,
    settings: Settings,
    seed: int,
    *,
    progress: Progress | None = None,
    state: Mapping[str, NDArray[Any]] | None = None,
    after_block: Callable[[Sampler], None] | None = None,
) -> Draws:
    """Sample the posterior of one structure.

    Parameters
    ----------
    structure : Structure
    data : ModelData
        With any centring; warm-up learns its own.
    mixtures : (S, n)
        Mixtures at the sites. With S = 1 all draws share it. With S = chains * draws (chain after
        chain) every kept draw has its own: the cut posterior.
    start : (chains, P)
        Starting positions, non-centred.
    settings : Settings
    seed : int
    progress : callable, optional
        Called with the blocks done and the blocks in all.
    state : mapping of arrays, optional
        What `Sampler.state` returned in an interrupted run of the same arguments.
    after_block : callable, optional
        Called with the sampler after every block, e.g. to write a checkpoint.
    """
    run = Sampler.begin(structure, data, mixtures, start, settings, seed)
    if state is not None:
        run.restore(state)
    threads = min(len(run.shards), os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        advance_to_the_end(run, pool, progress, after_block)
    return run.draws()


def advance_to_the_end(
    run: Any,
    pool: ThreadPoolExecutor,
    progress: Progress | None,
    after_block: Callable[[Any], None] | None,
) -> None:
    """Step a run (of `Sampler`, or one like it) through its blocks, and report after each."""
    while run.block < run.blocks:
        run.step(pool)
        if progress is not None:
            progress(run.block, run.blocks)
        if after_block is not None:
            after_block(run)


class Sampler:
    """A run in progress: `step` advances it by one block of transitions."""

    def __init__(
        self,
        structure: Structure,
        data: ModelData,
        mixtures: FloatArray,
        settings: Settings,
        seed: int,
    ) -> None:
        self.structure = structure
        self.data = data
        self.mixtures = mixtures
        self.settings = settings
        self.seed = seed
        self.order = visiting_order(mixtures, settings.chains)
        self.block = 0
        self.shards: list[Shard] = []
        self.shard_size = 1
        self.metric: Metric
        self.gain = np.zeros((0, mixtures.shape[1]))
        self.window: list[FloatArray] = []
        self.kept: list[FloatArray] = []
        self.stats: list[FloatArray] = []

    @property
    def blocks(self) -> int:
        """Number of compiled calls of a chain."""
        return self.settings.blocks

    @staticmethod
    def begin(
        structure: Structure,
        data: ModelData,
        mixtures: FloatArray,
        start: FloatArray,
        settings: Settings,
        seed: int,
    ) -> Sampler:
        """Set up a run; the parameters are those of `sample`."""
        with jax.enable_x64(True):
            run = Sampler(structure, data.non_centred(structure), mixtures, settings, seed)
            local = run._linearised(start)
            start, run.data = recentre(structure, start, run.data, local.centring())
            local = run._linearised(start)
            run.metric, run.gain = first_metric(local), run._gain(local)
        run.shard_size = size = settings.shard_size(data)
        first_rows = run._rows(0)[0]
        log_step = np.log(0.1) - 0.25 * np.log(structure.dimension)
        for i in range(0, settings.chains, size):
            run.shards.append(_shard(start[i : i + size], first_rows[i : i + size], log_step))
        return run

    def step(self, pool: ThreadPoolExecutor) -> None:
        """Advance every chain by one block; in the first, one compiles for all."""
        tasks = iter(range(len(self.shards)))
        records = [self._advance(next(tasks))] if self.block == 0 else []
        records += pool.map(self._advance, tasks)
        self.shards = [shard for shard, _ in records]
        positions = np.concatenate([r.position for _, r in records], axis=1)
        if self.block < self.settings.warmup_blocks:
            self.window.append(self._at_mean_mixture(positions))
            self.block += 1
            with jax.enable_x64(True):
                self._learn()
        else:
            self._keep(positions, [r for _, r in records])
            self.block += 1

    def draws(self) -> Draws:
        """Return the kept draws."""
        s, structure = self.settings, self.structure
        positions = np.concatenate(self.kept)[: s.draws].transpose(1, 0, 2)
        paired = self.order.shape[1] == s.draws > 1
        if paired:  # a draw stands where the mixture stands that it is conditional on
            positions = np.take_along_axis(positions, np.argsort(self.order)[..., None], axis=1)
        flat = np.ascontiguousarray(positions.reshape(-1, structure.dimension))
        with jax.enable_x64(True):
            found, _ = gammas(structure, flat, self.data)
        shape = positions.shape[:2]
        stats = np.concatenate(self.stats, axis=1)[:, : s.draws * s.thin].transpose(0, 2, 1)
        return Draws(
            structure,
            positions[..., : structure.n_hyper].copy(),
            positions[..., structure.n_hyper : structure.n_hyper + structure.n_trend].copy(),
            {name: np.asarray(v).reshape(*shape, *v.shape[1:]) for name, v in found.items()},
            {"acceptance": stats[0], "energy": stats[1], "diverging": stats[2] > 0.5},
            self.order if paired else None,
        )

    def state(self) -> dict[str, NDArray[Any]]:
        """Return everything that `restore` needs to go on, as plain arrays."""
        found = {"block": np.asarray(self.block), "gain": self.gain}
        found |= {f"metric.{k}": np.asarray(v) for k, v in self.metric._asdict().items()}
        for name, centring in self.data.centring.items():
            found[f"centring.{name}"] = np.stack([np.asarray(x) for x in centring])
        for i, shard in enumerate(self.shards):
            found |= {f"shard.{i}.{k}": np.asarray(v) for k, v in shard._asdict().items()}
        for name in ("window", "kept", "stats"):
            found |= {f"{name}.{i}": block for i, block in enumerate(getattr(self, name))}
        return found

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `state` returned: the draws will be those of an unbroken run."""

        def listed(name: str) -> list[FloatArray]:
            count = sum(key.startswith(f"{name}.") for key in state)
            return [state[f"{name}.{i}"] for i in range(count)]

        self.block, self.gain = int(state["block"]), state["gain"]
        self.metric = Metric(*(state[f"metric.{k}"] for k in Metric._fields))
        centring = {
            p.name: Centring(*state[f"centring.{p.name}"]) for p in self.structure.processes
        }
        self.data = replace(self.data, centring=centring)
        self.shards = [
            Shard(*(state[f"shard.{i}.{k}"] for k in Shard._fields))
            for i in range(len(self.shards))
        ]
        self.window, self.kept, self.stats = listed("window"), listed("kept"), listed("stats")

    def _advance(self, index: int) -> tuple[Shard, Record]:
        warming = self.block < self.settings.warmup_blocks
        control = Control(float(warming), self.settings.target_accept)
        with jax.enable_x64(True):
            found = advance(
                self.structure,
                self.shards[index],
                self.data,
                self.mixtures,
                self.gain,
                self.metric,
                self._plan(index),
                control,
            )
            shard, record = jax.tree.map(np.asarray, jax.device_get(found))
        return shard, record

    def _plan(self, index: int) -> Plan:
        """Plan of a shard: the same leapfrog steps for all, but noise of its own.

        Some transitions go as far in far smaller steps: where the posterior has a narrow neck, in
        which every step of the usual size is rejected, they lead through it.
        """
        s = self.settings
        common = np.random.default_rng([self.seed, self.block, 1])
        own = np.random.default_rng([self.seed, self.block, 2, index])
        warming = self.block < s.warmup_blocks
        steps = [sh.log_step if warming else sh.log_step_mean for sh in self.shards]
        size = float(np.exp(np.mean(steps)))
        length = s.path_length * (0.2 if self.block == 0 else 1.0)
        share = np.where(common.random(s.block) < _CAREFUL, _CAREFUL_SHARE, 1.0)
        wanted = length * common.uniform(0.6, 1.4, s.block) / (size * share)
        limit = 16 if self.block < 2 else _MAX_LEAPS
        n_steps = np.clip(np.rint(wanted), 1, limit).astype(np.int32)
        rows = self._rows(self.block)[:, index * self.shard_size :][:, : self.shard_size]
        shape = rows.shape
        noise = own.standard_normal((*shape, self.structure.dimension))
        return Plan(n_steps, share, rows, noise, own.random(shape))

    def _rows(self, block: int) -> NDArray[np.int32]:
        """Mixture rows (T, C): each chain goes through its own, one per kept draw."""
        s = self.settings
        count = self.order.shape[1]
        offset = (block - s.warmup_blocks) * s.block
        kept = (offset + np.arange(s.block)) // s.thin
        own = self.order[:, (kept * count // s.draws) % count].T
        first = np.arange(s.chains) * (count if len(self.mixtures) > 1 else 0)
        return np.asarray(own + first, dtype=np.int32)

    def _keep(self, positions: FloatArray, records: list[Record]) -> None:
        s = self.settings
        first = (self.block - s.warmup_blocks) * s.block
        ends = np.arange(first + 1, first + s.block + 1) % s.thin == 0
        self.kept.append(positions[ends])
        self.stats.append(
            np.stack(
                [
                    np.concatenate([np.asarray(getattr(r, name), float) for r in records], axis=1)
                    for name in ("acceptance", "energy", "divergent")
                ]
            )
        )

    def _learn(self) -> None:
        """Learn from the window where the schedule says so, and pool the step sizes."""
        total = self.settings.warmup_blocks
        due = {max(1, round(share * total)) for share in _ADAPT_METRIC}
        if self.block not in due:
            return self._pool(restart=False)
        recent = np.concatenate(self.window[len(self.window) // 4 :])
        positions = recent.reshape(-1, self.structure.dimension)
        if self.block in {max(1, round(share * total)) for share in _ADAPT_CENTRING}:
            positions = self._recentre(positions)
        local = self._linearised(positions)
        self.metric, self.gain = learn_metric(positions, local), self._gain(local)
        self.window = []
        return self._pool(restart=True)

    def _at_mean_mixture(self, positions: FloatArray) -> FloatArray:
        """Positions (T, C, P) of a block, shifted as if all had the mean of the mixtures.

        What the residual follows of its mixture from draw to draw is no part of how far it can
        move at one of them.
        """
        if not self.gain.size:
            return positions
        change = self.mixtures[self._rows(self.block)] - self.mixtures.mean(axis=0)
        shifted = positions.copy()
        shifted[..., self.structure.blocks()["residual"]] += change @ self.gain.T
        return shifted

    def _linearised(self, positions: FloatArray) -> Linearised:
        mixture = self.mixtures.mean(axis=0)
        return Linearised.around(self.structure, positions, self.data, mixture)

    def _gain(self, local: Linearised) -> FloatArray:
        """Shift of the residual when the mixture moves; none where it does not."""
        given = "residual" in self.structure and "weights" not in self.structure
        return local.gain() if given else self.gain

    def _recentre(self, positions: FloatArray) -> FloatArray:
        centring = self._linearised(positions).centring()
        last = np.concatenate([shard.position for shard in self.shards])
        last, _ = recentre(self.structure, last, self.data, centring)
        positions, self.data = recentre(self.structure, positions, self.data, centring)
        ends = np.cumsum([len(shard.position) for shard in self.shards])[:-1]
        self.shards = [
            shard._replace(position=part)
            for shard, part in zip(self.shards, np.split(last, ends), strict=True)
        ]
        return positions

    def _pool(self, *, restart: bool) -> None:
        if restart:
            log_step = float(np.mean([shard.log_step for shard in self.shards]))
            self.shards = [_shard(shard.position, shard.row, log_step) for shard in self.shards]
        elif self.block == self.settings.warmup_blocks:
            mean = np.mean([shard.log_step_mean for shard in self.shards])
            self.shards = [shard._replace(log_step_mean=mean) for shard in self.shards]


def visiting_order(mixtures: FloatArray, chains: int) -> NDArray[np.int32]:
    """Order (chain, rows of a chain) in which each chain goes through its own mixtures (S, n).

    From one to its nearest that is left, so that little changes from a kept draw to the next: the
    few transitions between them then leave no memory of the mixture before.
    """
    count = len(mixtures) // chains
    if len(mixtures) == 1:
        return np.zeros((chains, 1), dtype=np.int32)
    if count * chains != len(mixtures):
        raise ValueError(f"{len(mixtures)} mixtures cannot be shared out among {chains} chains.")
    centred = mixtures - mixtures.mean(axis=0)
    n = centred.shape[1]
    widest = max(0, n - _PATH_DIMENSIONS), n - 1
    _, axes = linalg.eigh(centred.T @ centred, subset_by_index=widest)
    scores = (centred @ axes).reshape(chains, count, -1)
    return np.stack([_nearest_path(points) for points in scores])


def _nearest_path(points: FloatArray) -> NDArray[np.int32]:
    left = np.ones(len(points), dtype=bool)
    path = np.zeros(len(points), dtype=np.int32)
    path[0] = int(np.argmin(points[:, -1]))
    for i in range(1, len(points)):
        left[path[i - 1]] = False
        distance = np.sum((points - points[path[i - 1]]) ** 2, axis=1)
        path[i] = int(np.argmin(np.where(left, distance, np.inf)))
    return path


def _shard(position: FloatArray, row: NDArray[np.int32], log_step: float) -> Shard:
    zero = np.zeros(())
    size, anchor = np.asarray(log_step), np.asarray(log_step + np.log(2.0))
    return Shard(position, row, size, size, zero, anchor, zero)
