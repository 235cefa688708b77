"""``bne demo``: the main job on simulated data."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bne import scores
from bne.cli._output import say, say_json
from bne.cli._predict import prediction_table
from bne.cli._report import DemoResult, draw_maps, write_report
from bne.errors import InputError
from bne.simulation import Simulation, simulate_region
from bne.storage import write_table

__all__ = ["run"]

_MONITORS = 75
_HELD_OUT = 5  # every fifth monitor is kept for scoring
_SCORING_DRAWS = 1000


def run(arguments: argparse.Namespace) -> None:
    """Simulate, fit, predict, score, map, report."""
    folder = _make_folder(arguments.output)
    region = simulate_region(_MONITORS, random_state=0)
    observed = [*region.coords, *region.base_models, region.response]
    held_out = region.train[observed].iloc[::_HELD_OUT].reset_index(drop=True)
    train = region.train[observed].drop(region.train.index[::_HELD_OUT]).reset_index(drop=True)
    grid = region.sites
    write_table(train, folder / "train.csv")
    write_table(held_out, folder / "held_out.csv")
    write_table(grid, folder / "grid.csv")

    started = time.perf_counter()
    model = _fit(region, train, grid, arguments)
    model.save(folder / "fit.nc")
    seconds = time.perf_counter() - started
    predictions = prediction_table(model, grid, threshold=12.0)
    write_table(predictions, folder / "predictions.csv")
    result = DemoResult(
        region=region,
        train=train,
        predictions=predictions,
        scores=_scores(model, region, held_out, predictions),
        diagnosis=model.diagnose(),
        seconds=seconds,
    )
    picture = draw_maps(result, folder / "maps.png")
    write_report(result, folder / "report.html", picture)
    _say_result(arguments, result, folder)


def _make_folder(name: str) -> Path:
    folder = Path(name)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{name} is a file; name a directory")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fit(
    region: Simulation, train: pd.DataFrame, grid: pd.DataFrame, arguments: argparse.Namespace
) -> Any:
    import bne

    model = bne.BNE(
        base_models=region.base_models,
        coords=region.coords,
        chains=arguments.chains,
        draws=arguments.draws,
        domain=grid[region.coords],
        random_state=arguments.seed,
    )
    return model.fit(train, train[region.response], progress=sys.stderr.isatty())


def _scores(
    model: Any, region: Simulation, held_out: pd.DataFrame, predictions: pd.DataFrame
) -> pd.DataFrame:
    """Score at the held-out monitors, and against the simulated truth on the grid.

    A base model predicts one number, whose CRPS is its absolute error.
    """
    y, truth = held_out[region.response].to_numpy(), region.test["mean"].to_numpy()
    points = {name: (held_out[name], region.test[name]) for name in region.base_models}
    points["their average"] = (
        held_out[region.base_models].mean(axis=1),
        region.test[region.base_models].mean(axis=1),
    )
    table = {
        name: {
            "rmse": scores.rmse(y, here),
            "crps": scores.mae(y, here),
            "coverage_95": np.nan,
            "rmse_grid": scores.rmse(truth, everywhere),
        }
        for name, (here, everywhere) in points.items()
    }
    draws = np.asarray(model.sample(held_out, n=_SCORING_DRAWS, random_state=0))
    ends = np.asarray(model.predict_quantiles(held_out, alpha=[0.025, 0.975]))
    table["BNE"] = {
        "rmse": scores.rmse(y, np.asarray(model.predict(held_out))),
        "crps": scores.crps(y, draws),
        "coverage_95": scores.coverage(y, ends[:, 0], ends[:, 1]),
        "rmse_grid": scores.rmse(truth, predictions["mean"]),
    }
    return pd.DataFrame(table).T


def _say_result(arguments: argparse.Namespace, result: DemoResult, folder: Path) -> None:
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    if arguments.json:
        say_json(
            {
                "directory": str(folder),
                "files": files,
                "seconds": round(result.seconds, 3),
                "scores": result.scores.to_dict("index"),
                "diagnosis": result.diagnosis.to_dict(),
            }
        )
        return
    response, n = result.region.response, len(result.train)
    say(f"BNE of simulated {response}: {n} monitors, {result.seconds:.1f} s")
    say(result.diagnosis.verdict)
    say("")
    say(result.scores.to_string(float_format=lambda value: f"{value:.3f}", na_rep="-"))
    say("")
    say(f"rmse, crps, coverage_95: {_MONITORS - n} monitors left out of the fit")
    say(f"rmse_grid: true mean at {len(result.predictions)} grid cells")
    say(f"{folder / 'report.html'} tells the story; beside it: {', '.join(files)}")
    say("")
    say("The same by hand:")
    columns = f"--coords lon,lat --base-models {','.join(result.region.base_models)}"
    say(f"  bne fit {folder / 'train.csv'} --y {response} {columns} -o fit.nc")
    say(f"  bne predict fit.nc {folder / 'grid.csv'} --threshold 12 -o predictions.csv")
