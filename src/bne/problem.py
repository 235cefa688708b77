"""What a fit is conditional on: options, data in standard units, priors and representation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import jax
import numpy as np
from numpy.typing import NDArray

from bne.approximation import Approximation, Geometry, GPName, choose, default_lengthscales
from bne.coordinates import Standardiser
from bne.errors import InputError
from bne.kernels import Kernel, KernelName
from bne.model import ModelData, Process, Structure
from bne.priors import Prior, half_normal, inverse_gamma_between
from bne.trend import PriorMean, Trend

__all__ = ["FAST", "Inference", "Options", "Priors", "Problem", "Strategy", "scale_priors"]

FloatArray = NDArray[np.float64]
Strategy = Literal["cut", "plugin", "joint"]
Inference = Literal["mcmc", "fast"]
Priors = Literal["default", "paper"]
FAST = "nested Laplace"
_PAPER_LENGTHSCALES = (2.0, 10.0)


@dataclass(frozen=True)
class Options:
    """Choices of the user that shape the model and how it is fitted (see `bne.BNE`)."""

    residual: bool = True
    variance: bool = True
    skewness: bool = True
    prior_mean: PriorMean = "zero"
    priors: Priors = "default"
    kernel: KernelName = "matern32"
    gp: GPName = "auto"
    n_features: int | None = None
    strategy: Strategy = "cut"
    inference: Inference = "mcmc"

    def __post_init__(self) -> None:
        choices: dict[str, Any] = {
            "prior_mean": PriorMean,
            "priors": Priors,
            "kernel": KernelName,
            "gp": GPName,
            "strategy": Strategy,
            "inference": Inference,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in get_args(allowed):
                known = ", ".join(repr(value) for value in get_args(allowed))
                raise InputError(f"{name}={getattr(self, name)!r} is not one of {known}")
        if self.prior_mean != "zero" and not self.residual:
            raise InputError(
                f"prior_mean={self.prior_mean!r} is the mean of the residual process, which "
                "residual=False leaves out"
            )
        if self.n_features is not None and self.n_features < 3:
            raise InputError(f"n_features={self.n_features} is too few; give at least 3, or None")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for storage."""
        return asdict(self)

    @property
    def inference_in_words(self) -> str:
        """What makes the draws, as outputs say it."""
        return f"a fast approximation ({FAST})" if self.inference == "fast" else "Markov chains"

    @property
    def processes(self) -> tuple[str, ...]:
        """Names of the processes besides the weights."""
        present = {
            "residual": self.residual,
            "log_scale": self.variance,
            "log_skew": self.skewness,
        }
        return tuple(name for name, there in present.items() if there)


@dataclass(frozen=True)
class Problem:
    """Training data in standard units, and everything that was chosen for them.

    Parameters
    ----------
    options : Options
    coords : (n, d) sites, in kilometres or the user's units.
    base : (n, K) predictions of the base models, in standard units.
    response : (n,) in standard units.
    standardiser : Standardiser
        From the units of y to standard units; the identity with ``priors="paper"``.
    trend : Trend
    priors : per hyperparameter of the structures.
    approximation : Approximation
    """

    options: Options
    coords: FloatArray
    base: FloatArray
    response: FloatArray
    standardiser: Standardiser
    trend: Trend
    priors: dict[str, Prior]
    approximation: Approximation

    @staticmethod
    def build(
        options: Options,
        coords: FloatArray,
        base: FloatArray,
        y: FloatArray,
        domain: FloatArray | None,
        seed: int,
    ) -> Problem:
        """Standardise the data, choose priors and a representation.

        Parameters
        ----------
        options : Options
        coords : (n, d) sites, in kilometres or the user's units.
        base : (n, K) in the units of y.
        y : (n,)
        domain : (m, d) sites within whose bounding box predictions will be asked for, or None.
        seed : int
            Seed of random features.
        """
        standardiser = Standardiser.fit(y)
        if options.priors == "paper":
            standardiser = Standardiser(0.0, 1.0)
        base, response = standardiser.forward(base), standardiser.forward(y)
        kernel, geometry = Kernel(options.kernel), Geometry.of(coords, domain)
        names = (*(("weights",) if base.shape[1] > 1 else ()), *options.processes)
        lengthscales = _lengthscales(options, geometry, kernel, names)
        approximation = choose(
            options.gp,
            kernel,
            geometry,
            lengthscales or _lengthscales(options, geometry, kernel, ("residual",)),
            n_features=options.n_features,
            seed=seed,
        )
        priors = {f"lengthscale.{name}": prior for name, prior in lengthscales.items()}
        return Problem(
            options=options,
            coords=coords,
            base=base,
            response=response,
            standardiser=standardiser,
            trend=Trend.fit(options.prior_mean, coords, base),
            priors=priors | scale_priors(options.priors),
            approximation=approximation,
        )

    @property
    def n_models(self) -> int:
        """Number of base models K."""
        return int(self.base.shape[1])

    @cached_property
    def data(self) -> ModelData:
        """What the log densities are conditional on, laid out once."""
        with jax.enable_x64(True):
            return ModelData(
                response=self.response,
                base=self.base,
                trend=self.trend.columns(self.coords, self.base),
                features=self.approximation.features(self.coords),
                representation=self.approximation.representation,
                priors=self.priors,
            )

    def structures(self) -> dict[str, Structure]:
        """Return the steps of the inference, in order, as structures of the one log density."""
        present = self.options.processes
        if self.options.strategy == "joint":
            return {"joint": self._structure("weights", *present)}
        steps = {"weights": self._structure("weights")}
        if self.options.residual:
            steps["residual"] = self._structure("residual")
        if self.options.variance or self.options.skewness:
            steps["full"] = self._structure(*present)
        return steps

    def _structure(self, *names: str) -> Structure:
        fixed = ("weights", "residual") if self.options.priors == "paper" else ()
        processes = tuple(
            Process(
                name,
                self.n_models - 1 if name == "weights" else 1,
                self.approximation.sizes[name],
                name not in fixed,
            )
            for name in names
            if name != "weights" or self.n_models > 1
        )
        n_trend = self.data.trend.shape[1] if "residual" in names else 0
        return Structure(processes, self.n_models, n_trend)


def _lengthscales(
    options: Options, geometry: Geometry, kernel: Kernel, names: tuple[str, ...]
) -> dict[str, Prior]:
    if options.priors == "paper":
        return dict.fromkeys(names, inverse_gamma_between(*_PAPER_LENGTHSCALES))
    chosen = default_lengthscales(geometry, kernel, options.gp)
    return {name: chosen[name] for name in names}


def scale_priors(priors: Priors = "default") -> dict[str, Prior]:
    """Priors of the noise scale and of the amplitudes.

    As printed, sigma is half-normal with scale 5, the amplitudes of log s and log lambda with scale
    1, the others are fixed at one. By default, in standard units, all of them are learned, and that
    of log s is half-normal with scale 1/2: 95 % of the noise scales of a region then lie within a
    factor of four of their middle with prior probability 0.84, where scale 1 lets single sites go
    free of noise, and their readings be interpolated, in one draw of a hundred.
    """
    paper = priors == "paper"
    return {
        "sigma": half_normal(5.0 if paper else 1.0),
        "amplitude.weights": half_normal(2.0),
        "amplitude.residual": half_normal(1.0),
        "amplitude.log_scale": half_normal(1.0 if paper else 0.5),
        "amplitude.log_skew": half_normal(1.0),
    }
