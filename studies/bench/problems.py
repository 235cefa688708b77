"""The data sets and the one model that all contenders see.

The model is step 3 given the mixture, in standardised units:
y - mixture = delta + sigma s e + m. To keep step 1 out of it the mixture is the mean of the base
models. Everything that another choice of priors would change stands in `build`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bne import approximation
from bne.coordinates import CoordinateMap, Standardiser
from bne.kernels import Kernel
from bne.model import MU_LAMBDA, ModelData, Process, Structure
from bne.priors import Prior
from bne.problem import scale_priors
from bne.processes import Hilbert
from bne.simulation import simulate_1d, simulate_2d, simulate_region
from bne.site_processes import Dual

FloatArray = NDArray[np.float64]
Table = tuple[pd.DataFrame, list[str], str, list[str]]

PROCESSES = ("residual", "log_scale", "log_skew")
CASE_STUDY = "training51_kmeans6.csv"
SEED = 0


@dataclass(frozen=True)
class Problem:
    """Numbers that a contender is given.

    Attributes
    ----------
    name, source : str
    coords : (n, d) in kilometres or the units of the simulation.
    response, mixture : (n,) standardised.
    base : (n, K) standardised.
    priors : priors of ``sigma`` and of ``amplitude.*`` and ``lengthscale.*`` of every process.
    approximation : what bne chooses for these sites.
    functions : per process the number of basis functions that bne's error bound asks for.
    periods : (d,) sides of the box of the basis.
    log_skew_mean : prior mean of log lambda.
    """

    name: str
    source: str
    coords: FloatArray
    response: FloatArray
    mixture: FloatArray
    base: FloatArray
    priors: dict[str, Prior]
    approximation: approximation.Approximation
    functions: dict[str, int]
    periods: FloatArray
    log_skew_mean: float = MU_LAMBDA

    @property
    def dim(self) -> int:
        """Number of coordinates."""
        return int(self.coords.shape[1])

    @property
    def centred(self) -> FloatArray:
        """Coordinates from the middle of the box of the sites, as the HSGPs of others want them."""
        return self.coords - 0.5 * (self.coords.min(axis=0) + self.coords.max(axis=0))

    def functions_per_axis(self, process: str) -> list[int]:
        """Functions along each axis: a product grid of as many as bne has, in the same box."""
        side = (self.functions[process] / np.prod(self.periods)) ** (1.0 / self.dim)
        return [max(int(np.rint(side * period)), 2) for period in self.periods]

    def structure(self) -> Structure:
        """Return the structure of step 3."""
        sizes = self.approximation.sizes
        processes = tuple(Process(name, 1, sizes[name]) for name in PROCESSES)
        return Structure(processes, n_models=self.base.shape[1])

    def data(self) -> ModelData:
        """Return bne's data, non-centred."""
        data = ModelData(
            response=self.response,
            base=self.base,
            trend=np.zeros((len(self.response), 0)),
            features=self.approximation.features(self.coords),
            representation=self.approximation.representation,
            priors=self.priors,
            log_skew_mean=self.log_skew_mean,
        )
        return data.non_centred(self.structure())


class Run(NamedTuple):
    """What a contender hands back.

    Attributes
    ----------
    draws : per name (chain, draw, ...): delta, log_s, log_lambda at the sites, and the
        logarithms of sigma and of every amplitude and length-scale.
    seconds : wall time of warm-up and draws, without compilation.
    seconds_compile : wall time of compilation.
    divergences : per 1000 transitions after warm-up.
    cpu_seconds : processor time of warm-up and draws, all threads together. Where other work
        disturbs the machine it is the steadier measure.
    finished : whether all draws were made within the time allowed.
    """

    draws: dict[str, FloatArray]
    seconds: float
    seconds_compile: float
    divergences: float
    cpu_seconds: float = float("nan")
    finished: bool = True


def build(name: str) -> Problem:
    """Build one of `PROBLEMS`."""
    source = PROBLEMS[name]
    table, coords, y, models = source()
    raw = table[coords].to_numpy(dtype=float)
    sites = CoordinateMap.fit(raw, coords).transform(raw)
    standard = Standardiser.fit(table[y].to_numpy(dtype=float))
    base = standard.forward(table[models].to_numpy(dtype=float))

    kernel = Kernel("matern32")
    geometry = approximation.Geometry.of(sites)
    found = approximation.default_lengthscales(geometry, kernel)
    lengthscales = {process: found[process] for process in PROCESSES}
    wanted = {"sigma", *(f"amplitude.{process}" for process in PROCESSES)}
    priors = {key: prior for key, prior in scale_priors().items() if key in wanted}
    priors |= {f"lengthscale.{process}": lengthscales[process] for process in PROCESSES}

    chosen = approximation.choose("hilbert", kernel, geometry, lengthscales)
    known = chosen.representation
    basis = known.basis if isinstance(known, Dual) else known
    assert isinstance(basis, Hilbert)
    return Problem(
        name=name,
        source=source.__doc__ or name,
        coords=sites,
        response=standard.forward(table[y].to_numpy(dtype=float)),
        mixture=base.mean(axis=1),
        base=base,
        priors=priors,
        approximation=chosen,
        functions=_functions(basis, kernel, lengthscales, geometry.dim),
        periods=_periods(basis),
    )


def _functions(
    basis: Hilbert, kernel: Kernel, lengthscales: dict[str, Prior], dim: int
) -> dict[str, int]:
    """Functions of each process, also where bne samples the values at the sites instead."""
    squared = np.asarray(basis.squared_frequencies)
    found = {}
    for name, prior in lengthscales.items():
        highest = approximation._frequency(kernel, prior, dim)
        found[name] = max(int(np.sum(squared <= highest**2)), 3)
    return found


def _periods(basis: Hilbert) -> FloatArray:
    frequencies = np.abs(np.asarray(basis.frequencies))
    lowest = np.min(np.where(frequencies > 0.0, frequencies, np.inf), axis=0)
    return np.asarray(2.0 * np.pi / lowest)


def _monitors() -> Table:
    """51 monitors: the paper's, or simulated ones where BNE_DATA_DIR is not set."""
    folder = os.environ.get("BNE_DATA_DIR")
    if folder:
        table = pd.read_csv(Path(folder) / CASE_STUDY)
        return table, ["lon", "lat"], "aqs", ["pred_av", "pred_gs", "pred_caces"]
    found = simulate_region(51, n_grid=(2, 2), random_state=SEED)
    return found.train, found.coords, found.response, found.base_models


def _paper_1d_300() -> Table:
    """The paper's 1-D experiment with 300 training sites."""
    found = simulate_1d(250, random_state=SEED)
    return found.train, found.coords, found.response, found.base_models


def _paper_1d_1050() -> Table:
    """The paper's 1-D experiment with 1050 training sites."""
    found = simulate_1d(1000, random_state=SEED)
    return found.train, found.coords, found.response, found.base_models


def _paper_2d_1250() -> Table:
    """The paper's 2-D experiment with 1250 training sites."""
    found = simulate_2d(1000, random_state=SEED)
    return found.train, found.coords, found.response, found.base_models


PROBLEMS: dict[str, Callable[[], Table]] = {
    "2d-51": _monitors,
    "1d-300": _paper_1d_300,
    "1d-1050": _paper_1d_1050,
    "2d-1250": _paper_2d_1250,
}


def describe(problem: Problem) -> dict[str, Any]:
    """Return what the results file says of a problem."""
    return {
        "source": problem.source,
        "n": len(problem.response),
        "dim": problem.dim,
        "bne": problem.approximation.note,
        "bne_coefficients": problem.structure().dimension,
        "functions": problem.functions,
        "functions_per_axis_hsgp": {p: problem.functions_per_axis(p) for p in PROCESSES},
        "lengthscale_98_percent": {
            p: [round(float(q), 4) for q in problem.priors[f"lengthscale.{p}"].quantile(_ENDS)]
            for p in PROCESSES
        },
    }


_ENDS = np.array([0.01, 0.99])
