"""``bne fit``."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import pandas as pd

from bne.checks import drop_missing, read_training, require_columns
from bne.cli._output import say, say_json
from bne.cli._parser import MODELS
from bne.coordinates import CoordinateMap
from bne.errors import InputError
from bne.storage import check_target, read_table

__all__ = ["build_model", "run"]


def run(arguments: argparse.Namespace) -> None:
    """Fit, save, and say in a few lines what came of it."""
    target = check_target(arguments.output, (".nc",))
    if arguments.checkpoint is not None:
        check_target(arguments.checkpoint)
    table, dropped = _training_table(arguments)
    model = build_model(arguments, domain=_domain(arguments))
    started = time.perf_counter()
    model.fit(
        table, table[arguments.y], progress=sys.stderr.isatty(), checkpoint=arguments.checkpoint
    )
    model.save(target)
    seconds = time.perf_counter() - started
    diagnosis = model.diagnose()
    if arguments.json:
        say_json(
            {
                "fit": str(target),
                "model": arguments.model,
                "y": arguments.y,
                "base_models": arguments.base_models,
                "sites": len(table),
                "dropped": dropped,
                "inference": model.inference_,
                "seed": arguments.seed,
                "seconds": round(seconds, 3),
                "diagnosis": diagnosis.to_dict(),
            }
        )
        return
    names = ", ".join(arguments.base_models)
    left_out = f" ({dropped} left out)" if dropped else ""
    say(f"{arguments.output}: {arguments.model} of {arguments.y} at {len(table)} sites{left_out}")
    say(f"base models: {names}")
    say(f"{seconds:.1f} s by {model.inference_}, seed {arguments.seed}")
    say(diagnosis.verdict)


def build_model(arguments: argparse.Namespace, **more: Any) -> Any:
    """Build the unfitted estimator that the options of ``bne fit`` describe."""
    import bne

    name, switches = MODELS[arguments.model]
    return getattr(bne, name)(
        base_models=arguments.base_models,
        coords=arguments.coords,
        prior_mean=arguments.prior_mean,
        priors=arguments.priors,
        kernel=arguments.kernel,
        gp=arguments.gp,
        strategy=arguments.strategy,
        inference=arguments.inference,
        chains=arguments.chains,
        draws=arguments.draws,
        target_accept=arguments.target_accept,
        crs=arguments.crs,
        random_state=arguments.seed,
        **switches,
        **more,
    )


def _training_table(arguments: argparse.Namespace) -> tuple[pd.DataFrame, int]:
    """Read TRAIN and find everything that is wrong with it before the fit starts."""
    y, coords, base_models = arguments.y, arguments.coords, arguments.base_models
    if y in base_models:
        raise InputError(f"{y!r} is the response; it cannot be a base model too")
    if len(coords) > 3:
        raise InputError(f"--coords names {len(coords)} columns; at most three are possible")
    table, dropped = read_table(arguments.train), 0
    columns = [y, *coords, *base_models]
    require_columns(table.columns, columns, what=arguments.train)
    if arguments.drop_missing:
        table, dropped = drop_missing(table, columns)
        if len(table) == 0:
            raise InputError(f"{arguments.train} has no row without missing values")
    sites, _ = read_training(table, table[y], coords, base_models, what=arguments.train)
    CoordinateMap.fit(sites.coords, coords, arguments.crs).transform(sites.coords)
    return table, dropped


def _domain(arguments: argparse.Namespace) -> pd.DataFrame | None:
    if arguments.domain is None:
        return None
    table = read_table(arguments.domain)
    require_columns(table.columns, arguments.coords, what=arguments.domain)
    table, _ = drop_missing(table[arguments.coords], arguments.coords)
    return table
