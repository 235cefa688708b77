r"""What a fit knows: the draws of its steps, and what they say at any site.

A draw of the last step and the draw of the weights that it is conditional on stay together
throughout; nothing is averaged before the predictive law is formed.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from bne._compile import LANES, compiled
from bne.fitting import site_values
from bne.inference import Draws
from bne.model import MU_LAMBDA, Process, helmert, softmax_weights
from bne.prediction import FieldDraws
from bne.problem import Problem
from bne.processes import Representation

__all__ = ["Posterior"]

FloatArray = NDArray[np.float64]
_COMPONENTS = 8


@dataclass(frozen=True)
class _Field:
    """Draws of one process, prepared for prediction at unit amplitude (copies, S, size)."""

    representation: Representation
    log_lengthscale: FloatArray
    amplitude: FloatArray
    prepared: list[Any]
    seed: int

    def at(self, coords: FloatArray) -> list[NDArray[Any]]:
        """Values (S, n) of every copy at sites, at unit amplitude."""
        return [
            self.representation.draws(coords, self.log_lengthscale, part, self.seed + copy).T
            for copy, part in enumerate(self.prepared)
        ]


@dataclass(frozen=True)
class Posterior:
    """The draws of every step of a problem.

    Parameters
    ----------
    problem : Problem
    steps : dict of Draws
        As `bne.fitting.fit_steps` returns them.
    seed : int
        Seed of what a prediction has to draw beyond them.
    """

    problem: Problem
    steps: dict[str, Draws]
    seed: int

    @property
    def last(self) -> Draws:
        """Draws of the last step, to which the predictive law belongs."""
        return list(self.steps.values())[-1]

    @property
    def n_draws(self) -> int:
        """Number of draws of all chains."""
        return self.last.n_chains * self.last.n_draws

    def fields(self, coords: FloatArray, base: FloatArray) -> FieldDraws:
        """What the draws say at sites.

        Parameters
        ----------
        coords : (n, d) in the coordinates of the problem.
        base : (n, K) predictions of the base models, in the units of y.
        """
        starts = range(0, len(coords), LANES)
        tiles = [self._tile(coords[i : i + LANES], base[i : i + LANES]) for i in starts]
        joined = {
            name: values if len(tiles) == 1 else np.concatenate([t[name] for t in tiles], axis=-1)
            for name, values in tiles[0].items()
        }
        return FieldDraws(**{name: x.swapaxes(-1, -2) for name, x in joined.items()})

    def _tile(self, coords: FloatArray, base: FloatArray) -> dict[str, FloatArray]:
        """What `fields` says at no more than `LANES` sites, draws first."""
        standardiser = self.problem.standardiser
        at_sites = (
            {
                name: [_padded(values) for values in field.at(coords)]
                for name, field in self._fields.items()
            },
            self._trend(_padded(coords.T).T, standardiser.forward(_padded(base.T).T)),
            _padded(base.T),
        )
        with jax.enable_x64(True):
            found = _in_units(
                *at_sites,
                {name: field.amplitude for name, field in self._fields.items()},
                self.last.value("log_sigma").ravel(),
                standardiser.scale,
                plugin=self.problem.options.strategy == "plugin",
            )
        return {name: np.asarray(values)[..., : len(coords)] for name, values in found.items()}

    def outside(self, coords: FloatArray) -> NDArray[np.bool_]:
        """Sites (n,) at which the representation does not hold."""
        return self.problem.approximation.representation.outside(coords)

    def at_training_sites(self, limit: int) -> dict[str, dict[str, FloatArray]]:
        """Per step, hyperparameters (chain, draw) and functions (chain, draw, [K,] n).

        Functions are given at `limit` of the training sites, evenly picked, if there are more;
        weights as omega (chain, draw, K, n).
        """
        return {step: self._values(draws, self.picked(limit)) for step, draws in self.steps.items()}

    def innovations(self, limit: int) -> dict[str, dict[str, FloatArray]]:
        """Like `at_training_sites`, in the order in which draws were made, for diagnostics.

        Draws of a step that is conditional on the weights follow the mixtures, which change from
        draw to draw; how well the step was sampled shows in what is left once their linear
        effect is taken out.
        """
        found = self.at_training_sites(limit)
        for step, draws in self.steps.items():
            if draws.order is not None:
                scores = self._mixture_scores(found["weights"]["weights"], limit)
                found[step] = {
                    name: _conditional(values, scores, draws.order)
                    for name, values in found[step].items()
                }
        return found

    def _mixture_scores(self, omega: FloatArray, limit: int) -> FloatArray:
        """Leading principal components (chain, draw, q) of the mixtures of omega."""
        base = self.problem.base[self.picked(limit)]
        mixtures = np.einsum("nk,cdkn->cdn", base, omega)
        centred = mixtures - mixtures.mean(axis=(0, 1))
        flat = centred.reshape(-1, base.shape[0])
        _, vectors = np.linalg.eigh(flat.T @ flat)
        return np.asarray(centred @ vectors[:, -_COMPONENTS:])

    def _values(self, draws: Draws, sites: NDArray[np.intp]) -> dict[str, FloatArray]:
        names = (name.removeprefix("log_") for name in draws.structure.hyperparameters)
        values = dict(zip(names, np.exp(np.moveaxis(draws.hyper, 2, 0)), strict=True))
        if draws.trend.shape[2]:
            values["trend"] = draws.trend
        for name, field in site_values(draws, self.problem.data, sites).items():
            values[name] = field[:, :, 0]
            if name == "weights":
                omega = softmax_weights(np.moveaxis(field, 2, 0), self.problem.n_models, np)
                values[name] = np.moveaxis(omega, 0, 2)
        return values

    def picked(self, limit: int) -> NDArray[np.intp]:
        """Positions of at most `limit` training sites, evenly picked."""
        n = len(self.problem.response)
        return np.unique(np.linspace(0, n - 1, min(limit, n)).round().astype(np.intp))

    def _trend(self, coords: FloatArray, base: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Coefficients (S, p) and columns (n, p) of the prior mean, in standard units."""
        beta = self.last.trend.reshape(self.n_draws, -1)
        if not self.last.structure.n_trend:
            return beta, np.zeros((len(coords), 0))
        return beta, self.problem.trend.columns(coords, base)

    @cached_property
    def _fields(self) -> dict[str, _Field]:
        """The processes of the last step, and the weights of theirs."""
        found = {}
        for draws in (self.steps.get("weights"), self.last):
            if draws is None:
                continue
            for process in draws.structure.processes:
                found[process.name] = self._field(draws, process)
        return found

    def _field(self, draws: Draws, process: Process) -> _Field:
        log_l = draws.value(f"log_lengthscale.{process.name}").ravel()
        amplitude = np.ones(len(log_l))
        if process.learned_amplitude:
            amplitude = np.exp(draws.value(f"log_amplitude.{process.name}").ravel())
        seed = _child_seed(self.seed, process.name)
        gamma = draws.gamma[process.name].reshape(len(log_l), process.copies, process.size)
        whitened = gamma / amplitude[:, None, None]
        representation = self.problem.approximation.representation
        prepared = [
            representation.prepare(log_l, np.ascontiguousarray(whitened[:, copy]), seed + copy)
            for copy in range(process.copies)
        ]
        return _Field(representation, log_l, amplitude, prepared, seed)


def _padded(values: NDArray[Any]) -> NDArray[Any]:
    """Rows of values (..., n) at all lanes, those of the last site repeated."""
    missing = LANES - values.shape[1]
    return np.pad(values, ((0, 0), (0, missing)), mode="edge") if missing else values


@partial(compiled, static_argnames="plugin")
def _in_units(
    fields: dict[str, list[Any]],
    trend: tuple[Any, Any],
    base: Any,
    amplitudes: dict[str, Any],
    log_sigma: Any,
    unit: Any,
    *,
    plugin: bool,
) -> dict[str, Any]:
    """Quantities of `FieldDraws`, draws first, from fields (S, n) at unit amplitude by process.

    Exponentials of fields are taken in their precision; all else, such as products with base
    (K, n), which may lie far from zero, is in double precision.
    """
    shape = len(log_sigma), base.shape[1]
    scaled = {
        name: [amplitudes[name][:, None].astype(x.dtype) * x for x in copies]
        for name, copies in fields.items()
    }
    omega = _shares(scaled["weights"]) if "weights" in scaled else [jnp.ones(shape)]
    mixture = sum(model * share for model, share in zip(base, omega, strict=True))
    if plugin:
        mixture = jnp.broadcast_to(jnp.mean(mixture, axis=0), shape)
    beta, columns = trend
    residual = beta @ columns.T
    if "residual" in scaled:
        residual = residual + scaled["residual"][0]
    sigma, skew = unit * jnp.exp(log_sigma)[:, None], unit * math.exp(MU_LAMBDA)
    found = {"weights": jnp.stack(omega), "mixture": mixture, "residual": unit * residual}
    found["scale"] = jnp.broadcast_to(sigma, shape)
    if "log_scale" in scaled:
        found["scale"] = sigma * jnp.exp(scaled["log_scale"][0])
    if "log_skew" in scaled:
        found["skew"] = skew * jnp.exp(scaled["log_skew"][0])
    return found


def _shares(contrasts: list[Any]) -> list[Any]:
    """`bne.model.softmax_weights`, model by model; they sum to one in double precision."""
    basis = helmert(len(contrasts) + 1).astype(contrasts[0].dtype)
    scores = [sum(x * v for x, v in zip(row, contrasts, strict=True)) for row in basis]
    most = functools.reduce(jnp.maximum, scores)
    exponentials = [jnp.exp(score - most).astype(np.float64) for score in scores]
    total = sum(exponentials)
    return [x / total for x in exponentials]


def _conditional(values: FloatArray, scores: FloatArray, order: NDArray[np.int32]) -> FloatArray:
    """Values (chain, draw, ...) in the order of their making, less what follows the scores."""
    flat = values.reshape(*values.shape[:2], -1)
    design = scores.reshape(-1, scores.shape[2])
    slopes, *_ = np.linalg.lstsq(design, flat.reshape(len(design), -1))
    left = flat - scores @ slopes
    return np.take_along_axis(left, order[..., None], axis=1).reshape(values.shape)


def _child_seed(seed: int, name: str) -> int:
    words = [seed, *name.encode()]
    return int(np.random.SeedSequence(words).generate_state(1)[0]) // 2
