"""Maps and a plain, self-contained page about the demo."""

from __future__ import annotations

import base64
import html
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bne.simulation import Simulation
from bne.storage import atomic_path

__all__ = ["DemoResult", "draw_maps", "write_report"]


@dataclass(frozen=True)
class DemoResult:
    """What the demo found.

    Attributes
    ----------
    region
        The simulation, with its truth.
    train
        Monitors that were fitted.
    predictions
        One row per grid cell, as `bne predict` writes them.
    scores
        One row per competitor.
    diagnosis
        What ``diagnose`` said of the fit.
    seconds
        Time of the fit.
    """

    region: Simulation
    train: pd.DataFrame
    predictions: pd.DataFrame
    scores: pd.DataFrame
    diagnosis: Any
    seconds: float


def draw_maps(result: DemoResult, path: Path) -> Path | None:
    """Draw the truth, the mean, the sd, the weights, and the share of the variance that is noise.

    Parameters
    ----------
    result
        What the demo found.
    path
        File to write, .png.

    Returns
    -------
    Path or None
        The file; None, and no file, where matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        path.unlink(missing_ok=True)  # of an earlier demo
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(result)
    columns = -(-len(panels) // 2)
    figure = Figure(figsize=(4.2 * columns, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    for place, panel in enumerate(panels, start=1):
        _draw_panel(figure, figure.add_subplot(2, columns, place), panel, result)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110)
    return path


def write_report(result: DemoResult, path: Path, picture: Path | None) -> None:
    """Write one page of HTML that needs no other file.

    Parameters
    ----------
    result
        What the demo found.
    path
        File to write, .html.
    picture
        Maps to put into the page, if there are any.
    """
    with atomic_path(path) as temporary:
        temporary.write_text(_page(result, picture), encoding="utf-8")


@dataclass(frozen=True)
class _Panel:
    title: str
    values: NDArray[np.float64]
    limits: tuple[float, float] | None
    colours: str
    monitors: bool = False


def _panels(result: DemoResult) -> list[_Panel]:
    table, region = result.predictions, result.region
    truth, mean = region.test["mean"].to_numpy(), table["mean"].to_numpy()
    both = (float(min(truth.min(), mean.min())), float(max(truth.max(), mean.max())))
    panels = [
        _Panel(f"true mean of {region.response}", truth, both, "viridis"),
        _Panel("predictive mean, and monitors", mean, both, "viridis", monitors=True),
        _Panel("predictive sd", table["sd"].to_numpy(), None, "magma"),
    ]
    panels += [
        _Panel(f"weight of {name}", table[f"weight_{name}"].to_numpy(), (0.0, 1.0), "cividis")
        for name in region.base_models
    ]
    panels += [
        _Panel(f"{title}, share of the variance", share, (0.0, 1.0), "Purples")
        for title, share in _variance_shares(table).items()
    ]
    return panels


def _variance_shares(table: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """Noise and model uncertainty as shares of the whole; empty if not labelled so."""
    total = table["sd"].to_numpy() ** 2
    parts = {"noise": "var_aleatoric", "model uncertainty": "var_epistemic"}
    return {
        title: table[name].to_numpy() / total
        for title, name in parts.items()
        if name in table.columns
    }


def _draw_panel(figure: Any, axes: Any, panel: _Panel, result: DemoResult) -> None:
    lon, lat = (result.predictions[name].to_numpy() for name in result.region.coords)
    low, high = panel.limits or (None, None)
    x, column = np.unique(lon, return_inverse=True)
    y, row = np.unique(lat, return_inverse=True)
    field = np.full((len(y), len(x)), np.nan)
    field[row, column] = panel.values
    mesh = axes.pcolormesh(x, y, field, vmin=low, vmax=high, cmap=panel.colours, shading="nearest")
    if panel.monitors:
        places = (result.train[name] for name in result.region.coords)
        readings = result.train[result.region.response]
        axes.scatter(
            *places, c=readings, s=22, vmin=low, vmax=high, cmap=panel.colours, edgecolors="white"
        )
    axes.set_aspect(1 / np.cos(np.radians(lat.mean())))
    axes.set_title(panel.title, fontsize=10)
    figure.colorbar(mesh, ax=axes, shrink=0.8)


_STYLE = """body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; } th, td { padding: .2em .8em; text-align: right; }
th { border-bottom: 1px solid; } img { max-width: 100%; } code { background: #eee; }"""


def _page(result: DemoResult, picture: Path | None) -> str:
    region, n = result.region, len(result.train)
    names = ", ".join(region.base_models)
    about = region.description[:1].upper() + region.description[1:]
    maps = "<p>There are no maps: matplotlib is not installed.</p>"
    if picture is not None:
        data = base64.b64encode(picture.read_bytes()).decode()
        maps = f'<img alt="Maps" src="data:image/png;base64,{data}">'
    scores = result.scores.to_html(float_format=lambda value: f"{value:.3f}", na_rep="-", border=0)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>bne demo</title><style>{_STYLE}</style></head>
<body>
<h1>A Bayesian nonparametric ensemble of simulated {html.escape(region.response)}</h1>
<p>{html.escape(about)}. The full model was fitted to {n} monitors and combines the predictions of
{len(region.base_models)} base models ({html.escape(names)}); the fit took
{result.seconds:.1f} s.</p>
<h2>Can the draws be trusted?</h2>
<p>{html.escape(result.diagnosis.verdict)}</p>
<h2>How good are the predictions?</h2>
{scores}
<p><code>rmse</code>, <code>crps</code> and <code>coverage_95</code> (share of readings inside the
95 % interval) are taken at monitors that the fit never saw; few as they are, they are themselves
uncertain. <code>rmse_grid</code> compares with the true mean at {len(result.predictions)} grid
cells, which only a simulation knows. The CRPS of a single number is its absolute error.</p>
<h2>Maps</h2>
{maps}
</body></html>
"""
