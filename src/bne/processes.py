r"""Gaussian processes and their finite-dimensional representations.

A zero-mean process with amplitude *a* and length-scale *l* is written

.. math:: f(x) = \sum_j H_j(x; l)\, \gamma_j, \qquad \gamma_j = a\, \mathrm{sd}_j(l)\, \beta_j,
          \quad \beta_j \sim N(0, 1).

Every representation answers one small contract (`Representation`): features of sites computed once,
the log standard deviations of its coefficients given *l*, and the field given features and
coefficients. The samplers know nothing else of a process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from bne._compile import LANES, compiled
from bne.kernels import Kernel

__all__ = ["Fourier", "Hilbert", "Representation"]

FloatArray = NDArray[np.float64]
_STATIC: dict[str, Any] = {"static": True}


class Representation(Protocol):
    """What a finite-dimensional Gaussian process has to answer."""

    @property
    def n_coefficients(self) -> int:
        """Number of coefficients of one process."""
        ...

    @property
    def moving(self) -> bool:
        """Whether the `columns` change with the length-scale."""
        ...

    def features(self, coords: FloatArray) -> FloatArray:
        """Quantities at training sites that no hyperparameter changes (NumPy, computed once)."""
        ...

    def log_sd(self, log_lengthscale: Any, size: int) -> Any:
        """Log sd (size,) of the first `size` coefficients at unit amplitude (JAX).

        A process that uses only those has unit variance.
        """
        ...

    def evaluate(
        self,
        features: Any,
        log_lengthscales: Any,
        coefficients: Any,
        sizes: tuple[int, ...] | None = None,
    ) -> Any:
        """Fields (J, n) of J processes with coefficients (J, m) (JAX).

        `sizes` (J,) says how many leading coefficients of each are not zero (default: all).
        """
        ...

    def columns(self, features: Any, log_lengthscale: Any, size: int) -> Any:
        """Fields (n, size) of unit coefficients, one at a time (JAX)."""
        ...

    def prepare(self, log_lengthscales: FloatArray, coefficients: FloatArray, seed: int) -> Any:
        """What `draws` needs of S draws of coefficients (S, size) at unit amplitude.

        Whatever has to be drawn beyond them is drawn here, from `seed`.
        """
        ...

    def draws(
        self, coords: FloatArray, log_lengthscales: FloatArray, prepared: Any, seed: int
    ) -> NDArray[Any]:
        """Fields (n, S) of S draws at any sites, from what `prepare` made of them.

        The field at a site does not depend on the sites beside it, rounding apart.
        """
        ...

    def outside(self, coords: FloatArray) -> NDArray[np.bool_]:
        """Sites (n,) at which the representation no longer holds."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hilbert:
    r"""Laplacian eigenfunctions on a periodic box: the Hilbert-space representation.

    Features are 1, :math:`\cos\omega_j^T(x - o)` and :math:`\sin\omega_j^T(x - o)` at the
    frequencies :math:`\omega = 2\pi j/P` of a box with periods *P*, all those with
    :math:`|\omega| \le \omega_{max}`, sorted by :math:`|\omega|`. Their variances follow the
    spectral density and are scaled to sum to one, so that the variance of the process is
    :math:`a^2` at every site, the edges included. What remains is the variance beyond
    :math:`\omega_{max}`, which is given to lower frequencies, and the correlation of sites through
    the periodic boundary; `bne.approximation.choose` takes the box and :math:`\omega_{max}` so that
    both are bounded over the prior of the length-scale, the second between training sites and any
    others: two sites to be predicted near opposite ends of the domain may be correlated.

    Solin and Sarkka (2020) describe the method with a boundary that pins the field to zero; the
    periodic boundary needs no wider box and leaves the variance exact.
    """

    squared_frequencies: Any
    frequencies: Any
    origin: Any
    domain: Any
    kernel: Kernel = field(metadata=_STATIC)

    @staticmethod
    def build(
        kernel: Kernel,
        domain: FloatArray,
        periods: FloatArray,
        max_frequency: float,
    ) -> Hilbert:
        """Basis on a box that encloses `domain` (2, d), with the given `periods` (d,)."""
        counts = np.floor(max_frequency * periods / (2.0 * math.pi)).astype(int)
        axes = [np.arange(-count, count + 1) for count in counts]
        grid = np.stack([g.ravel() for g in np.meshgrid(*axes, indexing="ij")], axis=1)
        first = grid[np.arange(len(grid)), np.argmax(grid != 0, axis=1)]
        omega = 2.0 * math.pi * grid[first > 0] / periods
        squared = np.sum(omega**2, axis=1)
        keep = squared <= max_frequency**2
        order = np.argsort(squared[keep], kind="stable")
        omega, squared = omega[keep][order], squared[keep][order]
        return Hilbert(
            np.concatenate([[0.0], np.repeat(squared, 2)]), omega, domain[0], domain, kernel
        )

    @property
    def n_coefficients(self) -> int:
        """Number of eigenfunctions."""
        return len(self.squared_frequencies)

    @property
    def moving(self) -> bool:
        """The eigenfunctions stay; only their variances change."""
        return False

    def features(
        self, coords: FloatArray, size: int | None = None, dtype: Any = np.float64
    ) -> NDArray[Any]:
        """Eigenfunctions at `coords` (n, d), all or the `size` lowest: array (n, m)."""
        size = size or self.n_coefficients
        phase = (coords - self.origin) @ np.asarray(self.frequencies)[: size // 2].T
        if dtype != np.float64:  # keep all digits of what is left after whole turns
            phase -= 2.0 * math.pi * np.rint(phase / (2.0 * math.pi))
        phase = phase.astype(dtype, copy=False)
        values = np.ones((len(coords), 2 * (size // 2) + 1), dtype)
        values[:, 1::2] = np.cos(phase)
        values[:, 2::2] = np.sin(phase)
        return values[:, :size]

    def log_sd(self, log_lengthscale: Any, size: int) -> Any:
        """Log sd (size,) of the coefficients of the `size` lowest eigenfunctions."""
        squared = jnp.asarray(self.squared_frequencies)[1:size:2]  # of cosine and sine alike
        log_density = self.kernel.log_spectral_density(squared, log_lengthscale, len(self.origin))
        constant = self.kernel.log_spectral_density(0.0, log_lengthscale, len(self.origin))
        # A frequency has a negative, and cos^2 + sin^2 = 1 halves each pair again.
        total = 2.0 * jnp.sum(jnp.exp(log_density)) + jnp.exp(constant)
        pairs = jnp.repeat(log_density + math.log(2.0), 2)[: size - 1]
        return 0.5 * (jnp.concatenate([jnp.reshape(constant, 1), pairs]) - jnp.log(total))

    def sd(self, log_lengthscales: FloatArray, size: int) -> FloatArray:
        """Sd (S, size) of the lowest coefficients at unit amplitude, in NumPy."""
        squared = np.asarray(self.squared_frequencies)[:size]
        log_l = np.asarray(log_lengthscales)[:, None]
        density = np.exp(self.kernel.log_spectral_density(squared, log_l, len(self.origin), np))
        share = np.where(squared > 0.0, 2.0, 1.0)
        return np.asarray(np.sqrt(density * share / density.sum(axis=1, keepdims=True)))

    def evaluate(
        self,
        features: Any,
        log_lengthscales: Any,
        coefficients: Any,
        sizes: tuple[int, ...] | None = None,
    ) -> Any:
        """Fields (J, n): one matrix product for each distinct size.

        `features` are the matrix itself, or its `blocks`, with which products are fast.
        """
        del log_lengthscales
        sizes = sizes or (self.n_coefficients,) * len(coefficients)
        blocks = features if isinstance(features, tuple) else self.blocks(features, sizes)
        values: list[Any] = [0.0] * len(sizes)
        start = 0
        for block in blocks:
            end = start + len(block)
            longer = [j for j, size in enumerate(sizes) if size >= end]
            if not longer:
                break
            product = jnp.stack([coefficients[j, start:end] for j in longer]) @ block
            for j, row in zip(longer, product, strict=True):
                values[j] = values[j] + row
            start = end
        return jnp.stack(values)

    def columns(self, features: Any, log_lengthscale: Any, size: int) -> Any:
        """The `size` lowest eigenfunctions themselves (n, size)."""
        del log_lengthscale
        whole = jnp.concatenate(features).T if isinstance(features, tuple) else features
        return whole[:, :size]

    @staticmethod
    def blocks(features: Any, sizes: Iterable[int]) -> tuple[Any, ...]:
        """Cut features (n, m) at the distinct sizes, each block (size, n) by itself in memory.

        A product with part of a matrix would copy that part, for every gradient anew.
        """
        ends = sorted(set(sizes))
        xp = np if isinstance(features, np.ndarray) else jnp
        return tuple(
            xp.ascontiguousarray(features[:, start:end].T) if xp is np else features[:, start:end].T
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        )

    def prepare(self, log_lengthscales: FloatArray, coefficients: FloatArray, seed: int) -> Any:
        """Coefficients in single precision, whose products are off by 1e-6 of the field's sd."""
        del log_lengthscales, seed
        return jnp.asarray(coefficients, jnp.float32)

    def draws(
        self, coords: FloatArray, log_lengthscales: FloatArray, prepared: Any, seed: int
    ) -> NDArray[Any]:
        """Fields (n, S) of the lowest coefficients (S, m), in their precision.

        Sites are taken `LANES` at a time, so that a product, and how it rounds, is the same for
        each of them whatever the number of sites. The draws lie first in memory.
        """
        del log_lengthscales, seed
        size, count = prepared.shape[1], len(coords)
        fields = []
        for start in range(0, count, LANES):
            chosen = np.minimum(np.arange(start, start + LANES), count - 1)
            features = self.features(coords[chosen], size, prepared.dtype)
            with jax.enable_x64(True):
                fields.append(np.asarray(_products(prepared, features)))
        whole = fields[0] if len(fields) == 1 else np.concatenate(fields, axis=1)
        return whole[:, :count].T

    def outside(self, coords: FloatArray) -> NDArray[np.bool_]:
        """Sites beyond the domain that the basis was built for."""
        slack = 1e-9 * (self.domain[1] - self.domain[0])
        below, above = coords < self.domain[0] - slack, coords > self.domain[1] + slack
        return np.asarray(np.any(below | above, axis=1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fourier:
    r"""Random Fourier features: :math:`\sqrt{2/D}\cos(W x/l + b)`, with *W* and *b* fixed draws.

    The representation of the paper, with D = 128. It is stationary everywhere but coarse: far from
    data, 128 features give between half and nine tenths of the true posterior standard deviation
    (see the documentation); and the cosines are computed anew whenever *l* moves, which makes a
    gradient many times dearer than with `Hilbert`.
    """

    frequencies: Any
    phases: Any
    kernel: Kernel = field(metadata=_STATIC)

    @staticmethod
    def build(kernel: Kernel, dim: int, n_features: int, rng: np.random.Generator) -> Fourier:
        """Draw `n_features` frequencies and phases in `dim` dimensions."""
        frequencies = kernel.sample_frequencies(n_features, dim, rng)
        return Fourier(frequencies, rng.uniform(0.0, 2.0 * math.pi, n_features), kernel)

    @property
    def n_coefficients(self) -> int:
        """Number of random features."""
        return len(self.phases)

    @property
    def moving(self) -> bool:
        """The cosines change with the length-scale."""
        return True

    def features(self, coords: FloatArray) -> FloatArray:
        """Projections (n, D) of the sites on the frequencies."""
        return np.asarray(coords @ np.asarray(self.frequencies).T)

    def log_sd(self, log_lengthscale: Any, size: int) -> Any:
        """Log sd of the coefficients: the same for all."""
        return jnp.full(size, 0.5 * math.log(2.0 / size)) + 0.0 * log_lengthscale

    def evaluate(
        self,
        features: Any,
        log_lengthscales: Any,
        coefficients: Any,
        sizes: tuple[int, ...] | None = None,
    ) -> Any:
        """Fields (J, n): cosines at each process's own length-scale."""
        del sizes
        scaled = features * jnp.exp(-log_lengthscales)[:, None, None] + self.phases
        return jnp.einsum("jnm,jm->jn", jnp.cos(scaled), coefficients)

    def columns(self, features: Any, log_lengthscale: Any, size: int) -> Any:
        """Cosines (n, size) at one length-scale."""
        return jnp.cos(features * jnp.exp(-log_lengthscale) + self.phases)[:, :size]

    def prepare(
        self, log_lengthscales: FloatArray, coefficients: FloatArray, seed: int
    ) -> FloatArray:
        """Return the coefficients as they are."""
        del log_lengthscales, seed
        return coefficients

    def draws(
        self, coords: FloatArray, log_lengthscales: FloatArray, prepared: FloatArray, seed: int
    ) -> FloatArray:
        """Fields (n, S) of coefficients (S, D), one draw after the other."""
        del seed
        projections = self.features(coords)
        values = np.empty((len(coords), len(prepared)))
        for s, (log_l, coefficient) in enumerate(zip(log_lengthscales, prepared, strict=True)):
            values[:, s] = np.cos(projections * np.exp(-log_l) + self.phases) @ coefficient
        return values

    def outside(self, coords: FloatArray) -> NDArray[np.bool_]:
        """Nowhere: the features are stationary."""
        return np.zeros(len(coords), dtype=bool)


@compiled
def _products(coefficients: Any, features: Any) -> Any:
    """Fields (S, n) of coefficients (S, m) of features (n, m)."""
    return coefficients @ features.T
