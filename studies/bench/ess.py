"""Benchmark b: effective draws per second of samplers of one model.

Every contender runs in a process of its own, with two cores and one thread per matrix product. Its
seconds are wall time of warm-up and draws; compilation is reported apart. The figure is the least
bulk effective sample size over delta, log s and log lambda at every site and all hyperparameters,
per second; the ratio is bne's figure over the competitor's. The same per second of processor time
is the steadier measure where other work shares the machine. A figure counts only where R-hat is
near one: a chain that is stuck shows in it, in the divergences and in the agreement of the means.

``numpyro`` and ``nutpie`` are the model as their users would write it, with as many functions in
the same box as bne's error bound asks for. ``numpyro-stable`` takes bne's log density of the noise,
so that only the sampler differs. With few sites ``-exact`` takes Cholesky factors instead.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bne._convergence import ess_bulk, rhat
from studies.bench import CORES, ONE_THREAD
from studies.bench.problems import PROCESSES, Problem, Run, build, describe

FloatArray = NDArray[np.float64]

PROBLEMS = ("2d-51", "1d-300", "1d-1050")
CONTENDERS = ("bne", "numpyro", "numpyro-stable", "nutpie", "numpyro-exact", "nutpie-exact")
EXACT_LIMIT = 120


def run_bne(problem: Problem, seed: int) -> Run:
    """Sample with bne twice; the seconds are those of the second run, when all code is compiled.

    By how much the first run took longer, with another seed, is taken for the time of compilation.
    """
    import jax

    from bne import inference, model, starts

    jax.config.update("jax_enable_x64", True)
    structure, data = problem.structure(), problem.data()
    settings = inference.Settings()

    def once(seed: int) -> tuple[inference.Draws, float, float]:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        rng = np.random.default_rng(seed)
        prior = model.sample_prior(structure, data, rng, settings.chains)
        start = starts.overdispersed(prior, structure)
        found = inference.sample(structure, data, problem.mixture[None], start, settings, seed)
        return found, time.perf_counter() - begin, time.process_time() - begin_cpu

    _, first, _ = once(seed + 1000)
    found, seconds, cpu_seconds = once(seed)
    compilation = max(first - seconds, 0.0)
    divergences = 1000.0 * float(np.mean(found.stats["diverging"]))
    return Run(_fields(problem, data, found), seconds, compilation, divergences, cpu_seconds)


def _fields(problem: Problem, data: Any, found: Any) -> dict[str, FloatArray]:
    """Draws of the fields at the sites and of the hyperparameters."""
    representation = data.representation
    values = {name: found.value(name) for name in found.structure.hyperparameters}
    for process, name in zip(PROCESSES, ("delta", "log_s", "log_lambda"), strict=True):
        gamma = found.gamma[process][:, :, 0]
        shape = gamma.shape[:2]
        gamma = gamma.reshape(-1, gamma.shape[2])
        gamma = np.pad(gamma, ((0, 0), (0, representation.n_coefficients - gamma.shape[1])))
        log_l = found.value(f"log_lengthscale.{process}").reshape(-1)
        field = np.asarray(representation.evaluate(data.features, log_l, gamma))
        values[name] = field.reshape(*shape, -1)
    values["log_lambda"] = values["log_lambda"] + problem.log_skew_mean
    return values


def run_contender(name: str, problem: Problem, seed: int, cap: float, *, quick: bool) -> Run:
    """Sample with one of `CONTENDERS`, in this process."""
    exact = name.endswith("-exact")
    lengths: dict[str, int] = {"warmup": 300, "draws": 200} if quick else {}
    if name == "bne":
        return run_bne(problem, seed)
    if name.startswith("numpyro"):
        from studies.bench import competitors_numpyro

        stable = name.endswith("-stable")
        return competitors_numpyro.run(problem, seed, cap, exact=exact, stable=stable, **lengths)
    from studies.bench import competitors_pymc

    return competitors_pymc.run(problem, seed, cap, exact=exact, **lengths)


def summarise(run: Run) -> dict[str, Any]:
    """Effective sample size, R-hat and speed of a run."""
    result: dict[str, Any] = {
        "seconds": run.seconds,
        "seconds_compile": run.seconds_compile,
        "cpu_seconds": run.cpu_seconds,
        "finished": run.finished,
    }
    if not run.draws:
        return result | {"ess_min": 0.0, "ess_per_second": 0.0}
    sizes = {name: ess_bulk(values) for name, values in run.draws.items()}
    worst = min(sizes, key=lambda name: float(np.min(sizes[name])))
    least = float(np.min(sizes[worst]))
    return result | {
        "chains_draws": list(run.draws["delta"].shape[:2]),
        "ess_min": least,
        "ess_min_of": worst,
        "ess_min_by_name": {name: float(np.min(values)) for name, values in sizes.items()},
        "ess_per_second": least / run.seconds,
        "ess_per_cpu_second": least / run.cpu_seconds,
        "rhat_max": max(float(np.max(rhat(values))) for values in run.draws.values()),
        "divergences_per_1000": run.divergences,
    }


def benchmark(
    folder: Path,
    *,
    cap: float,
    quick: bool,
    problems: tuple[str, ...] = PROBLEMS,
    contenders: tuple[str, ...] = CONTENDERS,
    repeats: int = 1,
) -> dict[str, Any]:
    """Run all contenders on all problems, one after the other."""
    results: dict[str, Any] = {}
    for name in problems:
        problem = build(name)
        entry: dict[str, Any] = {"problem": describe(problem), "contenders": {}}
        few = len(problem.response) <= EXACT_LIMIT
        for seed in range(repeats):
            for contender in contenders:
                if few or not contender.endswith("-exact"):
                    found = _in_subprocess(folder, contender, name, seed, cap, quick)
                    entry["contenders"].setdefault(contender, []).append(found)
                    print(row(name, contender, found), flush=True)
        entry["ratios"] = _ratios(entry["contenders"], "ess_per_second")
        entry["ratios_cpu"] = _ratios(entry["contenders"], "ess_per_cpu_second")
        entry["agreement"] = _agreement(folder, name, list(entry["contenders"]))
        results[name] = entry
    return results


HEADER = (
    f"{'problem':9} {'contender':14} {'seconds':>8} {'compile':>8} {'min ESS':>8} {'ESS/s':>8} "
    f"{'/cpu s':>8} {'R-hat':>6} {'div/1000':>8}  lowest"
)


def row(problem: str, contender: str, found: dict[str, Any]) -> str:
    """One line of the table."""
    if "error" in found:
        return f"{problem:9} {contender:14} {found['error']}"
    seconds = f"{found['seconds']:8.1f}" if found["finished"] else f">{found['seconds']:7.0f}"
    return (
        f"{problem:9} {contender:14} {seconds} {found['seconds_compile']:8.1f} "
        f"{found['ess_min']:8.0f} {found['ess_per_second']:8.2f} "
        f"{found.get('ess_per_cpu_second', 0.0):8.2f} "
        f"{found.get('rhat_max', np.nan):6.3f} {found.get('divergences_per_1000', np.nan):8.1f}  "
        f"{found.get('ess_min_of', '-')}"
    )


def _ratios(found: dict[str, list[dict[str, Any]]], measure: str) -> dict[str, float]:
    """Median speed of bne over the median speed of each competitor."""
    speed = {
        name: float(np.median([run.get(measure, 0.0) for run in runs]))
        for name, runs in found.items()
    }
    own = speed.pop("bne", None)
    return {name: own / value for name, value in speed.items() if own and value > 0.0}


def _agreement(folder: Path, problem: str, names: list[str]) -> dict[str, Any]:
    """How far the posterior means of contenders are apart, in posterior sds: median and largest."""
    stored = {name: _moments_file(folder, name, problem, 0) for name in names}
    moments = {name: dict(np.load(path)) for name, path in stored.items() if path.exists()}
    pairs: dict[str, Any] = {}
    known = list(moments)
    for i, a in enumerate(known):
        for b in known[i + 1 :]:
            gap = np.abs(moments[a]["mean"] - moments[b]["mean"]) / moments[b]["sd"]
            ratio = moments[a]["sd"] / moments[b]["sd"]
            pairs[f"{a} against {b}"] = {
                "mean_gap_median": float(np.median(gap)),
                "mean_gap_max": float(np.max(gap)),
                "sd_ratio_median": float(np.median(ratio)),
            }
    return pairs


def _moments_file(folder: Path, contender: str, problem: str, seed: int) -> Path:
    return folder / f"moments-{problem}-{contender}-{seed}.npz"


def _in_subprocess(
    folder: Path, contender: str, problem: str, seed: int, cap: float, quick: bool
) -> dict[str, Any]:
    """Run a contender on its cores; compilation may take as long again as the sampling may."""
    environment = os.environ | ONE_THREAD
    moments = _moments_file(folder, contender, problem, seed)
    moments.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        command = [sys.executable, "-m", "studies.bench.ess", contender, problem]
        command += [str(answer), str(moments), "--seed", str(seed), "--cap", str(cap)]
        command += ["--quick"] if quick else []
        limit = 2.5 * cap + 120.0
        try:
            done = subprocess.run(
                command, env=environment, timeout=limit, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no answer within {limit:.0f} s", "ess_per_second": 0.0}
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            return {"error": last[0], "trace": done.stderr[-4000:], "ess_per_second": 0.0}
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def _main() -> None:
    parser = argparse.ArgumentParser(description="One contender on one problem.")
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("problem")
    parser.add_argument("answer", type=Path)
    parser.add_argument("moments", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cap", type=float, default=900.0)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:CORES]))
    load = os.getloadavg()[0]
    problem = build(options.problem)
    found = run_contender(
        options.contender, problem, options.seed, options.cap, quick=options.quick
    )
    summary = summarise(found) | {"load_before": load, "load_after": os.getloadavg()[0]}
    options.answer.write_text(json.dumps(summary))
    if found.draws:
        flat = [found.draws[name].reshape(-1, *found.draws[name].shape[2:]) for name in _NAMES]
        mean = np.concatenate([np.atleast_1d(values.mean(axis=0)) for values in flat])
        sd = np.concatenate([np.atleast_1d(values.std(axis=0)) for values in flat])
        np.savez(options.moments, mean=mean, sd=sd)


_NAMES = ("delta", "log_s", "log_lambda", "log_sigma")


if __name__ == "__main__":
    _main()
