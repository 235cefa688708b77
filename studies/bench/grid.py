"""Benchmark c: from a table to maps of a 100,000-cell grid, through the public interface.

A fresh process imports bne, fits the monitors and summarises the predictive law at every cell. The
monitors are the paper's 51 where BNE_DATA_DIR names their folder, with base models at the cells
interpolated from those at the monitors; else 60 simulated ones.
Seconds are wall time of the whole process, imports and compilation included; memory is the peak
resident set. A product of two square matrices, timed in the same run, says how fast the machine is.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from studies.bench import CORES

CELLS = (400, 250)
CELLS_QUICK = (125, 80)
MONITORS = 60
LEVELS = [0.025, 0.25, 0.5, 0.75, 0.975]


def benchmark(*, quick: bool) -> dict[str, Any]:
    """Simulate the region, then fit and predict it in a fresh process."""
    cells = CELLS_QUICK if quick else CELLS
    data = os.environ.get("BNE_DATA_DIR")
    train, sites, names = _case_study(Path(data), cells) if data else _region(cells)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        train.to_pickle(folder / "train.pkl")
        sites.to_pickle(folder / "sites.pkl")
        (folder / "names.json").write_text(json.dumps(names))
        command = [sys.executable, "-m", "studies.bench.grid", scratch]
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - begin
    if done.returncode != 0:
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"\nGrid: failed, {message}")
        return {"error": message, "trace": done.stderr[-4000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found |= {"cells": len(sites), "monitors": len(train), "seconds": seconds, "cores": CORES}
    found["matmul_gflops"] = _machine_speed()
    print(
        f"\nFit of {len(train)} monitors and five quantiles at {found['cells']} cells: "
        f"{seconds:.1f} s (import {found['seconds_import']:.1f}, fit {found['seconds_fit']:.1f}, "
        f"predict {found['seconds_predict']:.1f}), peak {found['peak_mb']:.0f} MB; "
        f"matrix products here: {found['matmul_gflops']:.0f} GFLOP/s"
    )
    return found


def _region(cells: tuple[int, int]) -> tuple[Any, Any, dict[str, Any]]:
    from bne.simulation import simulate_region

    region = simulate_region(MONITORS, n_grid=cells, random_state=0)
    names = {"base": region.base_models, "coords": region.coords, "y": region.response}
    return region.train, region.sites, names


def _case_study(folder: Path, cells: tuple[int, int]) -> tuple[Any, Any, dict[str, Any]]:
    """The paper's monitors, and a grid over their bounding box."""
    import numpy as np
    import pandas as pd
    from scipy.interpolate import RBFInterpolator

    from studies.bench.problems import CASE_STUDY

    train = pd.read_csv(folder / CASE_STUDY)
    coords, base = ["lon", "lat"], ["pred_av", "pred_gs", "pred_caces"]
    at = train[coords].to_numpy()
    axes = [
        np.linspace(*ends, count)
        for ends, count in zip(np.stack([at.min(0), at.max(0)], 1), cells, strict=True)
    ]
    grid = np.stack([g.ravel() for g in np.meshgrid(*axes)], axis=1)
    smooth = RBFInterpolator(at, train[base].to_numpy(), smoothing=0.1)
    sites = pd.DataFrame(grid, columns=coords)
    sites[base] = smooth(grid)
    return train, sites, {"base": base, "coords": coords, "y": "aqs"}


def fit_and_predict(folder: Path) -> dict[str, float]:
    """Do the user's job on the tables in `folder`, in this process."""
    begin = time.perf_counter()
    import pandas as pd

    import bne

    imported = time.perf_counter()
    train = pd.read_pickle(folder / "train.pkl")
    sites = pd.read_pickle(folder / "sites.pkl")
    names = json.loads((folder / "names.json").read_text())
    model = bne.BNE(base_models=names["base"], coords=names["coords"], random_state=0)
    model.fit(train, train[names["y"]])
    fitted = time.perf_counter()
    summary = model.summary(sites, alpha=LEVELS)
    predicted = time.perf_counter()
    assert len(summary) == len(sites)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        kilobytes //= 1024  # bytes there
    return {
        "seconds_import": imported - begin,
        "seconds_fit": fitted - imported,
        "seconds_predict": predicted - fitted,
        "peak_mb": kilobytes / 1024.0,
    }


def _machine_speed(size: int = 1500) -> float:
    """GFLOP/s of NumPy's float64 matrix product, all threads, best of five."""
    import numpy as np

    a = np.random.default_rng(0).standard_normal((size, size))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - begin)
    return 2e-9 * size**3 / best


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:CORES]))
    print(json.dumps(fit_and_predict(parser.parse_args().folder)))
