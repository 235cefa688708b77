"""Simulated data with a known truth: the paper's two experiments and an air-pollution region.

Every simulation returns a :class:`Simulation`, whose tables carry, beside the response and the
base-model predictions, the true mean and standard deviation of the response at each site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from bne._base_models import KERNELS, Array, Surface, Variant, train_base_models

__all__ = ["Simulation", "lognormal_moments", "simulate_1d", "simulate_2d", "simulate_region"]

RandomState = int | np.random.Generator


@dataclass(frozen=True, eq=False)
class Simulation:
    """Training and test tables of one simulated data set.

    Attributes
    ----------
    train, test : pandas.DataFrame
        One row per site: the coordinates, the response, one column per base model, and the truth
        ``mean`` = E[y | x] and ``sd`` = sqrt(Var[y | x]).
    base_models : list of str
        Columns that hold base-model predictions.
    coords : list of str
        Columns that hold coordinates.
    response : str
        Column that holds the response.
    description : str
        What was simulated, in one sentence.
    """

    train: pd.DataFrame
    test: pd.DataFrame
    base_models: list[str]
    coords: list[str]
    response: str
    description: str

    @property
    def in_domain(self) -> NDArray[np.bool_]:
        """Whether each test site lies in the bounding box of the training sites."""
        sites = self.test[self.coords].to_numpy()
        known = self.train[self.coords].to_numpy()
        inside = (known.min(axis=0) <= sites) & (sites <= known.max(axis=0))
        return np.asarray(inside.all(axis=1))

    @property
    def sites(self) -> pd.DataFrame:
        """The test table as a user would hold it: without the response and the truth."""
        return self.test.drop(columns=[self.response, "mean", "sd"])


def lognormal_moments(location: Array, scale: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of exp(N(location, scale**2)).

    ``mean = exp(location + scale**2 / 2)`` and ``sd = mean * sqrt(exp(scale**2) - 1)``.

    Parameters
    ----------
    location, scale : array
        Mean and standard deviation of the logarithm.

    Returns
    -------
    mean, sd : array
        Moments on the scale of the response.
    """
    mean = np.exp(location + scale**2 / 2)
    return mean, mean * np.sqrt(np.expm1(scale**2))


# ---- The paper's experiments -------------------------------------------------------------------


def simulate_1d(
    n: int,
    *,
    random_state: RandomState,
    n_base: int = 50,
    n_test: int = 1000,
    base: Variant = "as_run",
    include_base: bool = True,
) -> Simulation:
    r"""Simulate the paper's time-series experiment.

    .. math:: y \sim \mathrm{LogNormal}(\sin x, \exp(\cos x - 1)),

    with training sites uniform on :math:`(-3\pi, 3\pi)` and test sites on :math:`(-5\pi, 5\pi)`.
    Base models are trained on ``n_base`` points of their own, which by default belong to the
    training set of the ensemble too. For one ``random_state`` a larger ``n`` extends the training
    set of a smaller one and leaves base models and test set as they are.

    Parameters
    ----------
    n : int
        Training sites beyond those of the base models.
    random_state : int or numpy.random.Generator
        Seed.
    n_base, n_test : int
        Sites that the base models are trained on, and test sites.
    base : {"as_run", "as_printed"}
        Base models: Gaussian-process regressions with Matern-5/2 (length 0.5), cubic, arc-cosine
        and periodic-exponential kernels, as in the published runs; or kernel ridge regressions with
        cubic, arc-cosine, exponential and Matern-5/2 kernels, as in the text.
    include_base : bool
        Whether the training set starts with the base models' own points.

    Returns
    -------
    Simulation
        Columns ``x``, ``y``, one per base model, ``mean``, ``sd``.
    """
    design = _Design(
        law=_Law(lambda x: np.sin(x[:, 0]), lambda x: np.exp(np.cos(x[:, 0]) - 1), log=True),
        coords=["x"],
        train_half_width=3 * np.pi,
        test_half_width=5 * np.pi,
        base=base,
        description=f"the paper's 1-D experiment, base models {base}",
    )
    sizes = _Sizes(n, n_base, n_test, include_base)
    return _simulate(design, sizes, random_state)


def simulate_2d(
    n: int,
    *,
    random_state: RandomState,
    variant: Variant = "as_run",
    n_base: int = 250,
    n_test: int = 1000,
    base: Variant | None = None,
    include_base: bool = True,
) -> Simulation:
    r"""Simulate the paper's spatial experiment.

    Training sites are uniform on :math:`(-\pi, \pi)^2`, test sites on
    :math:`(-1.25\pi, 1.25\pi)^2`. With Mishra's bird function

    .. math:: g(u, v) = \cos u\, e^{(1 - \sin v)^2} + \sin v\, e^{(1 - \cos u)^2},

    the published runs used
    :math:`y \sim \mathrm{LogNormal}(b(1.5 x_1, 1.5 x_2) / 5, 0.001)`,
    :math:`b(u, v) = (g(u, v) + (u - v)^2) / 100 - 1`. The text has
    :math:`f = g(4 x_1, 4 x_2) + (x_1 - x_2)^2` and no law for y; since a log-normal on that scale
    would span a hundred orders of magnitude, ``variant="as_printed"`` takes
    :math:`y \sim N(f, 0.4^2)`, which has the noise-to-signal ratio of the published runs.

    Parameters
    ----------
    n : int
        Training sites beyond those of the base models.
    random_state : int or numpy.random.Generator
        Seed.
    variant : {"as_run", "as_printed"}
        Law of the response.
    n_base, n_test : int
        Sites that the base models are trained on, and test sites.
    base : {"as_run", "as_printed"}, optional
        Base models, as in :func:`simulate_1d`; those of the ``variant`` unless given.
    include_base : bool
        Whether the training set starts with the base models' own points.

    Returns
    -------
    Simulation
        Columns ``x1``, ``x2``, ``y``, one per base model, ``mean``, ``sd``.
    """
    laws = {
        "as_run": _Law(_bird_as_run, lambda x: np.full(len(x), 0.001), log=True),
        "as_printed": _Law(_bird_as_printed, lambda x: np.full(len(x), 0.4), log=False),
    }
    base = variant if base is None else base
    design = _Design(
        law=laws[_choice("variant", variant, laws)],
        coords=["x1", "x2"],
        train_half_width=np.pi,
        test_half_width=1.25 * np.pi,
        base=base,
        description=f"the paper's 2-D experiment {variant}, base models {base}",
    )
    sizes = _Sizes(n, n_base, n_test, include_base)
    return _simulate(design, sizes, random_state)


@dataclass(frozen=True)
class _Law:
    """Normal or log-normal law of the response given the inputs."""

    location: Surface
    scale: Surface
    log: bool

    def moments(self, x: Array) -> tuple[Array, Array]:
        location, scale = self.location(x), self.scale(x)
        return lognormal_moments(location, scale) if self.log else (location, scale)

    def draw(self, x: Array, rng: np.random.Generator) -> Array:
        draw = rng.lognormal if self.log else rng.normal
        return draw(self.location(x), self.scale(x))


@dataclass(frozen=True)
class _Design:
    law: _Law
    coords: list[str]
    train_half_width: float
    test_half_width: float
    base: Variant
    description: str

    def __post_init__(self) -> None:
        _choice("base", self.base, KERNELS)


@dataclass(frozen=True)
class _Sizes:
    n: int
    n_base: int
    n_test: int
    include_base: bool

    def __post_init__(self) -> None:
        for name, least in (("n", 0), ("n_base", 2), ("n_test", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}.")
        if self.n == 0 and not self.include_base:
            raise ValueError("n=0 with include_base=False leaves no training site.")


def _simulate(design: _Design, sizes: _Sizes, random_state: RandomState) -> Simulation:
    base_rng, extra_rng, test_rng = np.random.default_rng(random_state).spawn(3)
    own = _draw_table(design, sizes.n_base, design.train_half_width, base_rng)
    extra = _draw_table(design, sizes.n, design.train_half_width, extra_rng)
    test = _draw_table(design, sizes.n_test, design.test_half_width, test_rng)
    train = pd.concat([own, extra], ignore_index=True) if sizes.include_base else extra
    models = train_base_models(design.base, own[design.coords].to_numpy(), own["y"].to_numpy())
    train, test = (_with_predictions(table, design.coords, models) for table in (train, test))
    return Simulation(train, test, list(models), design.coords, "y", design.description)


def _with_predictions(
    table: pd.DataFrame, coords: list[str], models: Mapping[str, Surface]
) -> pd.DataFrame:
    x = table[coords].to_numpy()
    predicted = table.assign(**{name: predict(x) for name, predict in models.items()})
    return predicted[[*coords, "y", *models, "mean", "sd"]]


def _draw_table(
    design: _Design, n: int, half_width: float, rng: np.random.Generator
) -> pd.DataFrame:
    # Sites and responses come from streams of their own, so that a longer table extends a shorter.
    x_rng, y_rng = rng.spawn(2)
    x = x_rng.uniform(-half_width, half_width, size=(n, len(design.coords)))
    mean, sd = design.law.moments(x)
    table = pd.DataFrame(x, columns=design.coords)
    return table.assign(y=design.law.draw(x, y_rng), mean=mean, sd=sd)


def _bird(u: Array, v: Array) -> Array:
    """Mishra's bird function without its quadratic term."""
    first: Array = np.cos(u) * np.exp((1 - np.sin(v)) ** 2)
    second: Array = np.sin(v) * np.exp((1 - np.cos(u)) ** 2)
    return first + second


def _bird_as_run(x: Array) -> Array:
    u, v = 1.5 * x[:, 0], 1.5 * x[:, 1]
    return ((_bird(u, v) + (u - v) ** 2) / 100 - 1) / 5


def _bird_as_printed(x: Array) -> Array:
    return _bird(4 * x[:, 0], 4 * x[:, 1]) + (x[:, 0] - x[:, 1]) ** 2


def _choice(name: str, value: str, allowed: Mapping[str, object]) -> str:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}.")
    return value


# ---- An air-pollution region -------------------------------------------------------------------

_KM_PER_DEGREE = 111.2
_CENTRE = np.array([-72.0, 42.0])
_HALF_WIDTH = np.array([1.4, 1.0])
_KM = _KM_PER_DEGREE * np.array([np.cos(np.radians(_CENTRE[1])), 1.0])


def simulate_region(
    n_monitors: int = 60,
    *,
    n_grid: tuple[int, int] = (40, 40),
    random_state: RandomState,
) -> Simulation:
    """Simulate annual mean PM2.5 in a synthetic region of 2.8 by 2 degrees around (-72, 42).

    The concentration is a westward gradient, random fields with lengths of 70, 35, 25 and 8 km and
    a plume over each of six cities. No base model sees the 35 km field; beyond that

    - ``model_a`` is coarse: gradient and longest field only, with the plumes smeared out;
    - ``model_b`` is finer, but exaggerates contrasts by a third, is 0.5 too low and has an error
      of its own with a length of 30 km;
    - ``model_c`` is good in the west and loses its grip, then drifts, towards the east.

    The noise is normal plus exponential, both growing with population density: y = mu + sigma e + m
    with E[m] = lambda, hence ``mean`` = mu + lambda and ``sd`` = sqrt(sigma^2 + lambda^2).

    Parameters
    ----------
    n_monitors : int
        Monitors; about two in three stand near a city.
    n_grid : (int, int)
        Cells in longitude and latitude of the prediction grid.
    random_state : int or numpy.random.Generator
        Seed.

    Returns
    -------
    Simulation
        ``train`` holds the monitors, ``test`` the grid, row by row from the south-west; columns
        ``lon``, ``lat`` (degrees), ``pm25``, ``model_a``, ``model_b``, ``model_c`` (micrograms per
        cubic metre), ``population`` (persons per square kilometre), ``mean``, ``sd``.
    """
    if n_monitors < 1 or min(n_grid) < 1:
        raise ValueError("n_monitors and both sides of n_grid must be at least 1.")
    region_rng, site_rng, y_rng = np.random.default_rng(random_state).spawn(3)
    region = _Region.draw(region_rng)
    monitors = _draw_monitors(region, n_monitors, site_rng)
    train, test = (region.table(sites, y_rng) for sites in (monitors, _grid_centres(n_grid)))
    models = ["model_a", "model_b", "model_c"]
    note = "synthetic PM2.5 region; no number in it was observed"
    return Simulation(train, test, models, ["lon", "lat"], "pm25", note)


_FIELD_LENGTHS = {"regional": 70, "local": 25, "street": 8, "unseen": 35, "b": 30, "c": 50}
_PM25_PER_PERSON = 1.6e-3


@dataclass(frozen=True)
class _RandomField:
    """Stationary Gaussian field of unit variance, squared-exponential, in 200 random waves."""

    frequencies: Array
    phases: Array

    @classmethod
    def draw(cls, length: float, rng: np.random.Generator) -> _RandomField:
        return cls(rng.normal(size=(2, 200)) / length, rng.uniform(0, 2 * np.pi, 200))

    def __call__(self, km: Array) -> Array:
        waves = np.cos(km @ self.frequencies + self.phases)
        return np.asarray(waves.sum(axis=1) * np.sqrt(2 / waves.shape[1]))


@dataclass(frozen=True)
class _Region:
    """The surfaces of one synthetic region, as functions of kilometres from its centre."""

    city_km: Array
    city_radius: Array
    city_density: Array
    fields: dict[str, _RandomField]

    @classmethod
    def draw(cls, rng: np.random.Generator) -> _Region:
        corner = 0.8 * _HALF_WIDTH * _KM
        return cls(
            city_km=rng.uniform(-corner, corner, size=(6, 2)),
            city_radius=rng.uniform(6, 16, size=6),
            city_density=rng.uniform(600, 2500, size=6),
            fields={name: _RandomField.draw(km, rng) for name, km in _FIELD_LENGTHS.items()},
        )

    def population(self, km: Array, blur: float = 0.0) -> Array:
        """Persons per square kilometre in the cities, smeared by a Gaussian of ``blur`` km."""
        radius2 = self.city_radius**2 + blur**2
        height = self.city_density * self.city_radius**2 / radius2
        return np.asarray(np.exp(-cdist(km, self.city_km, "sqeuclidean") / (2 * radius2)) @ height)

    def table(self, sites: Array, rng: np.random.Generator) -> pd.DataFrame:
        """Everything that is known at sites given in degrees, and one draw of the response."""
        km = (sites - _CENTRE) * _KM
        population = self.population(km)
        location, models = self._concentrations(km)
        sigma, skew = 0.25 + 1.4e-4 * population, 0.15 + 2.8e-4 * population
        columns = {
            "lon": sites[:, 0],
            "lat": sites[:, 1],
            "pm25": location + rng.normal(0, sigma) + rng.exponential(skew),
            **models,
            "population": np.round(20 + population, 1),
            "mean": location + skew,
            "sd": np.hypot(sigma, skew),
        }
        return pd.DataFrame(columns)

    def _concentrations(self, km: Array) -> tuple[Array, dict[str, Array]]:
        """Location of the response and what the three base models make of it."""
        field = {name: f(km) for name, f in self.fields.items()}
        east = km[:, 0] / (_HALF_WIDTH * _KM)[0]
        background = 8 - 0.8 * east + 0.7 * field["regional"]
        plumes = _PM25_PER_PERSON * self.population(km)
        fine = background + 0.45 * field["local"] + plumes
        location = fine + 0.25 * field["street"] + 0.4 * field["unseen"]
        grip = 1 / (1 + np.exp(4 * east))
        eastern = background + 0.6 * plumes + 0.7 * field["c"] - 0.5
        models = {
            "model_a": background + _PM25_PER_PERSON * self.population(km, blur=30) + 0.3,
            "model_b": 8 + 4 / 3 * (fine - 8) - 0.5 + 0.5 * field["b"],
            "model_c": grip * (fine + 0.25 * field["street"]) + (1 - grip) * eastern,
        }
        return location, models


def _draw_monitors(region: _Region, n: int, rng: np.random.Generator) -> Array:
    """Draw sites in degrees, about two in three of them around the cities."""
    box = _HALF_WIDTH * _KM
    city = rng.integers(len(region.city_km), size=n)
    near = region.city_km[city] + rng.normal(size=(n, 2)) * region.city_radius[city, None]
    anywhere = rng.uniform(-box, box, size=(n, 2))
    km = np.where(rng.random(n)[:, None] < 2 / 3, near, anywhere)
    inside = (np.abs(km) < box).all(axis=1, keepdims=True)
    return np.asarray(_CENTRE + np.where(inside, km, anywhere) / _KM)


def _grid_centres(n_grid: tuple[int, int]) -> Array:
    lon, lat = (
        _CENTRE[i] + _HALF_WIDTH[i] * ((2 * np.arange(m) + 1) / m - 1) for i, m in enumerate(n_grid)
    )
    grid = np.meshgrid(lon, lat)
    return np.column_stack([axis.ravel() for axis in grid])
