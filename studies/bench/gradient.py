"""Benchmark a: one value-and-gradient of step 3 over the bare matrix products it needs.

One position, float64, one thread, one core. The gradient is timed as a sampler meets it, in a
compiled loop, and as called from Python (which adds the dispatch of one call).

The products are, for each process with m_j functions, Phi[:, :m_j] @ c_j forward and
Phi[:, :m_j].T @ g_j backward, by NumPy's BLAS. All processes share Phi, so they may also be stacked
into one product each way, padded to the widest or in blocks of columns; Phi may lie in memory by
rows, by columns, or be copied per process. The floor is the fastest of all these forms.
Gradient and products are timed in turn, and the least time of each counts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from bne.model import log_density, sample_prior
from studies.bench import ONE_THREAD
from studies.bench.problems import PROCESSES, Problem, build

FloatArray = NDArray[np.float64]
Timed = Callable[[], Any]

PROBLEMS = ("1d-1050", "2d-1250")
LOOP = 50  # as many as a trajectory has, or fewer


def benchmark(*, quick: bool) -> dict[str, Any]:
    """Time gradient and products of every problem."""
    jax.config.update("jax_enable_x64", True)
    return {name: measure(build(name), rounds=20 if quick else 200) for name in PROBLEMS}


def measure(problem: Problem, rounds: int) -> dict[str, Any]:
    """Least microseconds of gradient and floor on one problem."""
    forms = product_forms(problem)
    looped, called = gradients(problem)
    seconds = interleaved({"looped": looped, "called": called, **forms}, rounds)
    microseconds = {name: 1e6 * value for name, value in seconds.items()}
    gradient = microseconds.pop("looped") / LOOP
    single = microseconds.pop("called")
    form = min(microseconds, key=lambda name: microseconds[name])
    return {
        "n": len(problem.response),
        "functions": problem.functions,
        "gradient_us": gradient,
        "called_us": single,
        "floor_us": microseconds[form],
        "floor_form": form,
        "ratio": gradient / microseconds[form],
        "products_us": microseconds,
    }


def gradients(problem: Problem) -> tuple[Timed, Timed]:
    """`LOOP` gradients in a compiled loop, and a single one called from Python."""
    structure, data = problem.structure(), problem.data()
    position = sample_prior(structure, data, np.random.default_rng(0), 1)[0]
    data, position, mixture = jax.device_put((data, position, problem.mixture))
    density = jax.value_and_grad(partial(log_density, structure))

    def loop(position: Any, data: Any, mixture: Any) -> Any:
        def step(_: Any, carry: Any) -> Any:
            position, total = carry
            value, slope = density(position, data, mixture)
            return position + 1e-12 * slope, total + value

        return jax.lax.fori_loop(0, LOOP, step, (position, 0.0))

    looped = jax.jit(loop).lower(position, data, mixture).compile()
    called = jax.jit(density).lower(position, data, mixture).compile()
    return (
        lambda: jax.block_until_ready(looped(position, data, mixture)),
        lambda: jax.block_until_ready(called(position, data, mixture)),
    )


def product_forms(problem: Problem) -> dict[str, Timed]:
    """Every way to do the products that we could think of."""
    phi = np.concatenate(problem.data().features).T
    sizes = [problem.approximation.sizes[name] for name in PROCESSES]
    rng = np.random.default_rng(1)
    c = [rng.standard_normal(size) for size in sizes]
    g = rng.standard_normal((len(sizes), len(phi)))
    forms: dict[str, Timed] = {}
    for order, name in (("C", "by rows"), ("F", "by columns")):
        laid = np.asarray(phi, order=order)
        copies = [np.array(phi[:, :size], order=order) for size in sizes]
        views = [laid[:, :size] for size in sizes]
        forms[f"separate, Phi {name}"] = partial(_separate, views, c, g)
        forms[f"separate, copies {name}"] = partial(_separate, copies, c, g)
        forms[f"stacked and padded, Phi {name}"] = partial(_stacked, laid, _padded(c, phi), g)
        blocks = _blocks(phi, sizes, c, order)
        forms[f"stacked in blocks, copies {name}"] = partial(_in_blocks, blocks, g)
    return forms


def _separate(matrices: list[FloatArray], c: list[FloatArray], g: FloatArray) -> Any:
    forward = [matrix @ column for matrix, column in zip(matrices, c, strict=True)]
    backward = [matrix.T @ row for matrix, row in zip(matrices, g, strict=True)]
    return forward, backward


def _stacked(phi: FloatArray, c: FloatArray, g: FloatArray) -> Any:
    return c @ phi.T, g @ phi


def _in_blocks(blocks: list[tuple[FloatArray, FloatArray, list[int]]], g: FloatArray) -> Any:
    forward = [c @ part.T for part, c, _ in blocks]
    backward = [g[rows] @ part for part, _, rows in blocks]
    return forward, backward


def _padded(c: list[FloatArray], phi: FloatArray) -> FloatArray:
    return np.stack([np.pad(row, (0, phi.shape[1] - len(row))) for row in c])


def _blocks(
    phi: FloatArray, sizes: list[int], c: list[FloatArray], order: Any
) -> list[tuple[FloatArray, FloatArray, list[int]]]:
    """Blocks of columns, each with the coefficients and the processes that use it."""
    blocks, start = [], 0
    for end in sorted(set(sizes)):
        rows = [j for j, size in enumerate(sizes) if size >= end]
        part = np.array(phi[:, start:end], order=order)
        blocks.append((part, np.stack([c[j][start:end] for j in rows]), rows))
        start = end
    return blocks


def interleaved(timed: dict[str, Timed], rounds: int) -> dict[str, float]:
    """Least seconds of each, one after the other in every round, each five times."""
    best = dict.fromkeys(timed, np.inf)
    for _ in range(rounds):
        for name, call in timed.items():
            for _ in range(5):
                begin = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - begin)
    return {name: float(value) for name, value in best.items()}


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ONE_THREAD.items()):
        sys.exit(
            "The threads of this process are not settled; run python -m studies.bench --only a"
        )
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(json.dumps(benchmark(quick=parser.parse_args().quick)))
