"""The paper's two simulated experiments at one size, as run, under the paper's own metrics.

    python -m studies.experiments 1d --n 1000 --seeds 20 -o experiments-1d.json
    python -m studies.experiments 2d --n 1000 --seeds 5 -o experiments-2d.json

Beside the full model stands its own second step, the Gaussian ensemble with a residual, from the
same fit; and a plain Gaussian process regression without base models. `in` means test sites within
the bounding box of the training sites. The paper's metrics are defined in `bne.scores`; CRPS is of
the test responses.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import pandas as pd

WANTED = {
    "1d": "wanted of bne: nll in <= -0.55, ece in <= 0.0008 (means over 20 seeds); mse no worse "
    "than step2's",
    "2d": "wanted of bne: mse in <= 0.003 (mean over 5 seeds)",
}


def run(seed: int, which: str, n: int, options: dict[str, Any]) -> dict[str, Any]:
    """Fit one replicate and score its laws."""
    import bne
    from bne.posterior import Posterior
    from bne.simulation import simulate_1d, simulate_2d

    simulated = {"1d": simulate_1d, "2d": simulate_2d}[which](n, random_state=seed)
    train, test = simulated.train, simulated.test
    model = bne.BNE(
        simulated.base_models, simulated.coords, domain=test, random_state=seed, **options
    )
    begin = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(train, train[simulated.response])
    seconds = time.perf_counter() - begin
    scored = {"bne": model.predict_proba(test)}

    whole = model._posterior
    gaussian = replace(whole.problem.options, variance=False, skewness=False)
    steps = {name: whole.steps[name] for name in ("weights", "residual")}
    model._posterior = Posterior(replace(whole.problem, options=gaussian), steps, whole.seed)
    scored["step2"] = model.predict_proba(test)

    inside = _inside(train[simulated.coords].to_numpy(), test[simulated.coords].to_numpy())
    rows = {name: _scores(law, test, simulated.response, inside) for name, law in scored.items()}
    rows["gp"] = _plain_gp(simulated, inside)
    said = [str(w.message) for w in caught]
    return {"seed": seed, "seconds": seconds, "warnings": said, "gp": model.gp_, "scores": rows}


def _scores(law: Any, test: pd.DataFrame, response: str, inside: np.ndarray) -> dict[str, float]:
    mean, sd = np.asarray(law.mean()), np.asarray(law.std())
    y = test[response].to_numpy()
    return _metrics(mean, sd, np.asarray(law.cdf(y)), np.asarray(law.crps(y)), test, inside)


def _metrics(
    mean: np.ndarray,
    sd: np.ndarray,
    pit: np.ndarray,
    crps: np.ndarray,
    test: pd.DataFrame,
    inside: np.ndarray,
) -> dict[str, float]:
    from bne import scores

    truth = test["mean"].to_numpy()
    found = {}
    for place, at in (("in", inside), ("all", np.ones(len(test), dtype=bool))):
        found |= {
            f"mse {place}": scores.paper_mse(mean[at], truth[at]),
            f"nll {place}": scores.paper_nll(mean[at], sd[at], truth[at]),
            f"ece {place}": scores.paper_ece(pit[at]),
            f"coverage {place}": scores.paper_coverage(pit[at]),
            f"crps {place}": float(np.mean(crps[at])),
        }
    return found


def _plain_gp(simulated: Any, inside: np.ndarray) -> dict[str, float]:
    """Matern-3/2 regression on the coordinates, hyperparameters by maximum likelihood."""
    import scoringrules
    from scipy import stats
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    train, test = simulated.train, simulated.test
    kernel = ConstantKernel(1.0, (1e-4, 1e4)) * Matern(1.0, (1e-3, 1e3), nu=1.5)
    regression = GaussianProcessRegressor(
        kernel + WhiteKernel(0.1, (1e-9, 1e2)), normalize_y=True, random_state=0
    )
    regression.fit(train[simulated.coords], train[simulated.response])
    mean, sd = regression.predict(test[simulated.coords], return_std=True)
    y = test[simulated.response].to_numpy()
    crps = scoringrules.crps_normal(y, mean, sd)
    return _metrics(mean, sd, stats.norm.cdf(y, mean, sd), crps, test, inside)


def _inside(train: np.ndarray, test: np.ndarray) -> np.ndarray:
    return np.all((test >= train.min(axis=0)) & (test <= train.max(axis=0)), axis=1)


def summarise(results: list[dict[str, Any]]) -> pd.DataFrame:
    """Means over replicates, their standard errors, and those of bne minus step2."""
    rows = {
        name: pd.DataFrame([result["scores"][name] for result in results])
        for name in ("bne", "step2", "gp")
    }
    rows["bne - step2"] = rows["bne"] - rows["step2"]
    root = np.sqrt(len(results))
    table = {name: frame.mean() for name, frame in rows.items()}
    if len(results) > 1:
        table |= {f"se of {name}": frame.std(ddof=1) / root for name, frame in rows.items()}
    return pd.DataFrame(table).T


def main() -> None:
    """Run replicates side by side and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", choices=("1d", "2d"))
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("-o", "--output", default=None)
    arguments = parser.parse_args()
    options = {"draws": arguments.draws}
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        futures = [
            pool.submit(run, seed, arguments.which, arguments.n, options)
            for seed in range(arguments.first, arguments.first + arguments.seeds)
        ]
        results = []
        for future in futures:
            results.append(future.result())
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    table = summarise(results)
    print(table.to_string(float_format=lambda value: f"{value:.5f}"))
    print(WANTED[arguments.which])
    if arguments.output:
        with open(arguments.output, "w") as file:
            json.dump({"options": vars(arguments), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
