r"""What a fit knows: the draws of its steps, and what they say at any site.

A draw of the last step and the draw of the weights that it is conditional on stay together
throughout; nothing is averaged before the predictive law is formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bne.fitting import site_values
from bne.inference import Draws
from bne.model import MU_LAMBDA, Process, softmax_weights
from bne.prediction import FieldDraws
from bne.problem import Problem
from bne.processes import Dual, Representation

__all__ = ["Posterior"]

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class _Field:
    """Draws of one process, ready for prediction: coefficients (copies, S, size)."""

    representation: Representation
    log_lengthscale: FloatArray
    amplitude: FloatArray
    unit: FloatArray
    seed: int

    def at(self, coords: FloatArray) -> FloatArray:
        """Values (copies, n, S) at sites."""
        return np.stack(
            [
                self.amplitude
                * self.representation.draws(coords, self.log_lengthscale, unit, self.seed + copy)
                for copy, unit in enumerate(self.unit)
            ]
        )


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
        standardiser, fields = self.problem.standardiser, self._fields
        omega = self._weights(coords)
        mixture = np.einsum("nk,kns->ns", base, omega)
        if self.problem.options.strategy == "plugin":
            mixture = np.broadcast_to(mixture.mean(axis=1, keepdims=True), mixture.shape).copy()
        residual = self._residual(coords, standardiser.forward(base))
        scale = np.broadcast_to(self.last.value("log_sigma").ravel(), mixture.shape)
        if "log_scale" in fields:
            scale = scale + fields["log_scale"].at(coords)[0]
        skew = None
        if "log_skew" in fields:
            skew = standardiser.scale * np.exp(MU_LAMBDA + fields["log_skew"].at(coords)[0])
        return FieldDraws(
            weights=omega,
            mixture=mixture,
            residual=standardiser.scale * residual,
            scale=standardiser.scale * np.exp(scale),
            skew=skew,
        )

    def outside(self, coords: FloatArray) -> NDArray[np.bool_]:
        """Sites (n,) at which the representation does not hold."""
        return self.problem.approximation.predictive.outside(coords)

    def at_training_sites(self, limit: int) -> dict[str, dict[str, FloatArray]]:
        """Per step, hyperparameters (chain, draw) and functions (chain, draw, [copies,] n).

        Functions are given at `limit` of the training sites, evenly picked, if there are more;
        weights as omega (chain, draw, K, n).
        """
        sites = self.picked(limit)
        found = {}
        for step, draws in self.steps.items():
            values: dict[str, FloatArray] = dict(
                zip(
                    (name.removeprefix("log_") for name in draws.structure.hyperparameters),
                    np.exp(np.moveaxis(draws.hyper, 2, 0)),
                    strict=True,
                )
            )
            if draws.trend.shape[2]:
                values["trend"] = draws.trend
            for name, field in site_values(draws, self.problem.data, sites).items():
                if name == "weights":
                    omega = softmax_weights(np.moveaxis(field, 2, 0), self.problem.n_models, np)
                    values["weights"] = np.moveaxis(omega, 0, 2)
                else:
                    values[name] = field[:, :, 0]
            found[step] = values
        return found

    def picked(self, limit: int) -> NDArray[np.intp]:
        """Positions of at most `limit` training sites, evenly picked."""
        n = len(self.problem.response)
        return np.unique(np.linspace(0, n - 1, min(limit, n)).round().astype(np.intp))

    def _weights(self, coords: FloatArray) -> FloatArray:
        """Weights (K, n, S)."""
        if "weights" not in self._fields:
            return np.ones((1, len(coords), self.n_draws))
        return np.asarray(
            softmax_weights(self._fields["weights"].at(coords), self.problem.n_models, np)
        )

    def _residual(self, coords: FloatArray, base: FloatArray) -> FloatArray:
        """Residual process plus prior mean (n, S), in standard units."""
        total = np.zeros((len(coords), self.n_draws))
        if "residual" in self._fields:
            total = self._fields["residual"].at(coords)[0]
        if self.last.structure.n_trend:
            beta = self.last.trend.reshape(self.n_draws, -1)
            total = total + self.problem.trend.columns(coords, base) @ beta.T
        return total

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
        approximation = self.problem.approximation
        log_l = draws.value(f"log_lengthscale.{process.name}").ravel()
        amplitude = np.ones(len(log_l))
        if process.learned_amplitude:
            amplitude = np.exp(draws.value(f"log_amplitude.{process.name}").ravel())
        seed = _child_seed(self.seed, process.name)
        gamma = draws.gamma[process.name].reshape(len(log_l), process.copies, process.size)
        representation = approximation.representation
        if isinstance(representation, Dual):
            values = site_values(draws, self.problem.data)[process.name]
            values = values.reshape(len(log_l), process.copies, -1)
            size = approximation.basis_sizes[process.name]
            lifted = [
                representation.lift(log_l, amplitude, values[:, copy], seed + copy, size)
                for copy in range(process.copies)
            ]
            gamma = np.stack(lifted, axis=1)
        unit = np.ascontiguousarray(np.moveaxis(gamma / amplitude[:, None, None], 1, 0))
        return _Field(approximation.predictive, log_l, amplitude, unit, seed)


def _child_seed(seed: int, name: str) -> int:
    words = [seed, *name.encode()]
    return int(np.random.SeedSequence(words).generate_state(1)[0]) // 2
