"""``bne predict``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from bne.checks import drop_missing, read_sites, require_columns
from bne.cli._output import say, say_json
from bne.errors import InputError
from bne.storage import check_target, read_fit, read_table, write_table

__all__ = ["prediction_table", "run"]


def run(arguments: argparse.Namespace) -> None:
    """Predict at a table of sites and write one row for each."""
    target = check_target(arguments.output, (".csv", ".parquet", ".nc"))
    table, dropped = read_table(arguments.sites), 0
    read_fit(arguments.fit)  # a foreign or damaged file is refused before anything slow is imported
    import bne

    model: Any = bne.load(arguments.fit)
    columns = [*model.coords, *model.base_models]
    require_columns(table.columns, columns, what=arguments.sites)
    if arguments.drop_missing:
        table, dropped = drop_missing(table, columns)
        if len(table) == 0:
            raise InputError(f"{arguments.sites} has no row without missing values")
    read_sites(table, model.coords, model.base_models, what=arguments.sites)
    out = prediction_table(
        model, table, quantiles=arguments.quantiles, threshold=arguments.threshold
    )
    draws = None
    if arguments.draws:
        draws = np.asarray(model.sample(table, n=arguments.draws, random_state=arguments.seed))
    attrs = {
        "fit": arguments.fit,
        "inference": model.inference_,
        "quantiles": ",".join(f"{q:g}" for q in arguments.quantiles),
    }
    if arguments.threshold is not None:
        attrs["threshold"] = arguments.threshold
    write_table(out, target, draws=draws, attrs=attrs)
    _summarise(arguments, out, dropped, model.inference_)


def prediction_table(
    model: Any,
    sites: pd.DataFrame,
    *,
    quantiles: Sequence[float] = (0.025, 0.5, 0.975),
    threshold: float | None = None,
) -> pd.DataFrame:
    """Collect what a fitted model says about sites, one row each.

    Parameters
    ----------
    model
        Fitted model whose coordinates and base models are columns.
    sites
        Table with these columns.
    quantiles
        Levels of the quantiles of the predictive distribution.
    threshold
        Value whose exceedance probability is wanted, if any.

    Returns
    -------
    DataFrame
        Coordinates, and the columns of ``model.summary``.
    """
    summary = model.summary(sites, alpha=list(quantiles), threshold=threshold)
    table: pd.DataFrame = pd.concat([sites[list(model.coords)], summary], axis=1)
    return table


def _summarise(
    arguments: argparse.Namespace, out: pd.DataFrame, dropped: int, inference: str
) -> None:
    outside = int(out["outside"].sum())
    if arguments.json:
        say_json(
            {
                "output": arguments.output,
                "sites": len(out),
                "dropped": dropped,
                "outside": outside,
                "inference": inference,
                "draws": arguments.draws or 0,
                "columns": list(out.columns),
            }
        )
        return
    left_out = f" ({dropped} left out)" if dropped else ""
    say(f"{arguments.output}: predictions at {len(out)} sites{left_out}, by {inference}")
    if outside:
        say(f"{outside} of them lie outside the range of the training sites (column 'outside')")
