"""Covariance functions: correlation, spectral density, and the law of its frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy import stats

__all__ = ["Kernel", "KernelName", "covariance"]

FloatArray = NDArray[np.float64]
KernelName = Literal["matern12", "matern32", "matern52", "squared_exponential"]


@dataclass(frozen=True)
class Kernel:
    r"""A stationary, isotropic covariance function of unit variance.

    ``matern12`` :math:`e^{-r}`; ``matern32`` :math:`(1 + \sqrt3 r) e^{-\sqrt3 r}`; ``matern52``
    :math:`(1 + \sqrt5 r + 5 r^2/3) e^{-\sqrt5 r}`; ``squared_exponential`` :math:`e^{-r^2/2}`;
    with :math:`r` the distance over the length-scale.
    """

    name: KernelName = "matern32"

    def __post_init__(self) -> None:
        if self.name not in get_args(KernelName):
            known = ", ".join(get_args(KernelName))
            raise ValueError(f"Unknown kernel {self.name!r}; choose one of {known}.")

    @property
    def smoothness(self) -> float:
        r"""Smoothness :math:`\nu` of the Matern family; infinite for the squared exponential."""
        return {"matern12": 0.5, "matern32": 1.5, "matern52": 2.5}.get(self.name, math.inf)

    def correlation(self, r: Any, xp: Any = np) -> Any:
        """Correlation at scaled distance `r` = distance / length-scale (`xp`: NumPy or JAX)."""
        if self.name == "squared_exponential":
            return xp.exp(-0.5 * r * r)
        t = math.sqrt(2.0 * self.smoothness) * r
        if self.name == "matern12":
            return xp.exp(-t)
        if self.name == "matern32":
            return (1.0 + t) * xp.exp(-t)
        return (1.0 + t + t * t / 3.0) * xp.exp(-t)

    def log_spectral_density(
        self, squared_frequency: Any, log_lengthscale: Any, dim: int, xp: Any = jnp
    ) -> Any:
        r"""Log spectral density at :math:`|\omega|^2` in `dim` dimensions, up to a constant.

        Matern: :math:`-(\nu + d/2)\log(1 + l^2|\omega|^2/2\nu)`; squared exponential:
        :math:`-l^2|\omega|^2/2`.
        """
        scaled = squared_frequency * xp.exp(2.0 * log_lengthscale)
        if self.name == "squared_exponential":
            return -0.5 * scaled
        nu = self.smoothness
        return -(nu + 0.5 * dim) * xp.log1p(scaled / (2.0 * nu))

    def spectral_tail(self, frequency: Any, lengthscale: Any, dim: int) -> FloatArray:
        r"""Share of the variance at frequencies above `frequency`.

        :math:`l^2|\omega|^2/d` has an F law with (d, :math:`2\nu`) degrees of freedom, or for the
        squared exponential :math:`\chi^2_d/d`.
        """
        scaled = np.square(np.multiply(frequency, lengthscale))
        if self.name == "squared_exponential":
            return np.asarray(stats.chi2.sf(scaled, dim), dtype=float)
        return np.asarray(stats.f.sf(scaled / dim, dim, 2.0 * self.smoothness), dtype=float)

    def sample_frequencies(self, count: int, dim: int, rng: np.random.Generator) -> FloatArray:
        r"""Frequencies of the spectral law at unit length-scale, (count, dim).

        Student-t with :math:`2\nu` degrees of freedom for the Matern family (3 for Matern-3/2),
        normal for the squared exponential.
        """
        normal = rng.standard_normal((count, dim))
        if self.name == "squared_exponential":
            return normal
        df = 2.0 * self.smoothness
        return np.asarray(normal / np.sqrt(rng.chisquare(df, (count, 1)) / df), dtype=float)


def covariance(kernel: Kernel, a: FloatArray, b: FloatArray, lengthscale: float) -> FloatArray:
    """Correlation matrix (len(a), len(b)) of a unit-variance process at sites `a` and `b`."""
    squared = np.sum(a * a, 1)[:, None] + np.sum(b * b, 1) - 2.0 * a @ b.T
    distance = np.sqrt(np.maximum(squared, 0.0))
    return np.asarray(kernel.correlation(distance / lengthscale), dtype=float)
