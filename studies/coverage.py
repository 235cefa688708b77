"""Coverage of predictive intervals on fields simulated from the model itself.

    python -m studies.coverage --fields 50 --dim 2 --strategy cut joint -o coverage.json

Hyperparameters come from the default priors, functions from exact Gaussian processes (dense
Cholesky factors, nothing of `bne.processes`), base models are Gaussian processes too. Coverage of a
site is the probability, under the true law there, of the interval that was predicted; so only the
chance of the functions remains. `inside`: within the box of the training sites; `outside`: half its
width beyond it.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import pandas as pd
from scipy import linalg
from scipy.spatial.distance import cdist

LEVELS = (0.5, 0.8, 0.9, 0.95)
WIDTH = 100.0
N_MODELS = 3


@dataclass(frozen=True)
class Field:
    """One simulated field: training table, test table, and the true noise law at the test sites."""

    train: pd.DataFrame
    test: pd.DataFrame
    location: np.ndarray
    scale: np.ndarray
    skew: np.ndarray
    outside: np.ndarray


def simulate(seed: int, *, n: int = 60, dim: int = 2, n_inside: int = 60) -> Field:
    """Draw a field from the model under its default priors."""
    from bne.approximation import Geometry, default_lengthscales
    from bne.model import MU_LAMBDA
    from bne.problem import scale_priors
    from bne.processes import Kernel

    rng = np.random.default_rng([seed, 91])
    sites = np.concatenate([_sites(n, dim, rng), _sites(n_inside, dim, rng), _beyond(dim, rng)])
    priors = default_lengthscales(Geometry.of(sites[:n]), Kernel("matern32"))
    laws = scale_priors() | {f"lengthscale.{name}": prior for name, prior in priors.items()}

    def hyper(name: str) -> float:
        return float(np.exp(laws[name].sample_log(rng, 1)[0]))

    def process(name: str) -> np.ndarray:
        return hyper(f"amplitude.{name}") * _draw(sites, hyper(f"lengthscale.{name}"), rng)

    base = np.stack([_draw(sites, 0.4 * WIDTH, rng) for _ in range(N_MODELS)], axis=1)
    lengthscale, spread = hyper("lengthscale.weights"), hyper("amplitude.weights")
    scores = spread * np.stack([_draw(sites, lengthscale, rng) for _ in range(N_MODELS)], axis=1)
    omega = np.exp(scores - scores.max(axis=1, keepdims=True))
    omega /= omega.sum(axis=1, keepdims=True)
    location = np.sum(base * omega, axis=1) + process("residual")
    scale = hyper("sigma") * np.exp(process("log_scale"))
    skew = np.exp(MU_LAMBDA + process("log_skew"))
    y = location + scale * rng.standard_normal(len(sites)) + rng.exponential(skew)
    columns = {f"x{j}": sites[:, j] for j in range(dim)}
    table = pd.DataFrame(columns | {f"f{k}": base[:, k] for k in range(N_MODELS)} | {"y": y})
    outside = np.arange(len(sites) - n) >= n_inside
    return Field(table[:n], table[n:], location[n:], scale[n:], skew[n:], outside)


def cover(seed: int, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    """Fit one field; coverage per level and place, and the squared z of the truth."""
    import bne

    field = simulate(seed, **options)
    dim = options.get("dim", 2)
    model = bne.BNE(
        base_models=[f"f{k}" for k in range(N_MODELS)],
        coords=[f"x{j}" for j in range(dim)],
        strategy=strategy,
        draws=500,
        domain=field.test,
        random_state=seed,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(field.train, field.train["y"])
    intervals = model.predict_interval(field.test, coverage=list(LEVELS)).to_numpy()
    truth = bne.EMG(field.location[:, None], field.scale[:, None], field.skew[:, None])
    mass = truth.cdf(intervals)
    covered = mass[:, 1::2] - mass[:, ::2]
    result: dict[str, Any] = {"seed": seed, "strategy": strategy, "ok": not caught}
    for place, chosen in (("inside", ~field.outside), ("outside", field.outside)):
        result[place] = covered[chosen].mean(axis=0).tolist()
    return result


def study(
    seeds: list[int], strategy: str, options: dict[str, Any], jobs: int
) -> dict[str, dict[str, list[float]]]:
    """Mean coverage over fields, its standard error, per place and level."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(cover, seed, strategy, options) for seed in seeds]
        results = []
        for future in futures:
            results.append(future.result())
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    summary = {}
    for place in ("inside", "outside"):
        values = np.array([result[place] for result in results])
        summary[place] = {
            "coverage": values.mean(axis=0).round(4).tolist(),
            "standard_error": (values.std(axis=0, ddof=1) / np.sqrt(len(values))).round(4).tolist(),
        }
    return summary | {"fits not ok": sum(not result["ok"] for result in results)}


def main() -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fields", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--dim", type=int, default=2)
    parser.add_argument("--n", type=int, default=60)
    parser.add_argument("--strategy", nargs="+", default=["cut", "joint"])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("-o", "--output", default="coverage.json")
    arguments = parser.parse_args()
    seeds = list(range(arguments.first, arguments.first + arguments.fields))
    options = {"dim": arguments.dim, "n": arguments.n}
    found = {s: study(seeds, s, options, arguments.jobs) for s in arguments.strategy}
    with open(arguments.output, "w") as file:
        json.dump({"levels": LEVELS, "options": vars(arguments), "results": found}, file, indent=1)
    print(json.dumps(found, indent=1))


def _sites(n: int, dim: int, rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(0.0, WIDTH, (n, dim))


def _beyond(dim: int, rng: np.random.Generator) -> np.ndarray:
    """Sites half a width beyond each side of the box, spread along it."""
    beyond = []
    for axis in range(dim):
        for end in (-0.5 * WIDTH, 1.5 * WIDTH):
            sites = rng.uniform(0.1 * WIDTH, 0.9 * WIDTH, (4 if dim > 1 else 1, dim))
            sites[:, axis] = end * 0.999 + 0.0005 * WIDTH
            beyond.append(sites)
    return np.concatenate(beyond)


def _draw(sites: np.ndarray, lengthscale: float, rng: np.random.Generator) -> np.ndarray:
    r = np.sqrt(3.0) * cdist(sites, sites) / lengthscale
    factor = linalg.cholesky((1.0 + r) * np.exp(-r) + 1e-10 * np.eye(len(sites)), lower=True)
    return np.asarray(factor @ rng.standard_normal(len(sites)))


if __name__ == "__main__":
    main()
