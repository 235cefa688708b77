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
from typing import Any, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy import linalg, stats

__all__ = [
    "Dual",
    "Exact",
    "Fourier",
    "Hilbert",
    "Kernel",
    "KernelName",
    "Representation",
    "covariance",
]

FloatArray = NDArray[np.float64]
KernelName = Literal["matern12", "matern32", "matern52", "squared_exponential"]
_STATIC: dict[str, Any] = {"static": True}
_JITTER = 1e-9
_PATH_FEATURES = 256
_BATCH = 64


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


class Representation(Protocol):
    """What a finite-dimensional Gaussian process has to answer."""

    @property
    def n_coefficients(self) -> int:
        """Number of coefficients of one process."""
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

    def draws(
        self, coords: FloatArray, log_lengthscales: FloatArray, coefficients: FloatArray, seed: int
    ) -> FloatArray:
        """Fields (n, S) of S posterior draws at any sites (NumPy)."""
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

    def features(self, coords: FloatArray, size: int | None = None) -> FloatArray:
        """Eigenfunctions at `coords` (n, d), all or the `size` lowest: array (n, m)."""
        size = size or self.n_coefficients
        phase = (coords - self.origin) @ np.asarray(self.frequencies)[: size // 2].T
        values = np.ones((len(coords), 2 * (size // 2) + 1))
        np.cos(phase, out=values[:, 1::2])
        np.sin(phase, out=values[:, 2::2])
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

    def draws(
        self, coords: FloatArray, log_lengthscales: FloatArray, coefficients: FloatArray, seed: int
    ) -> FloatArray:
        """Fields (n, S) of the lowest coefficients (S, m)."""
        del log_lengthscales, seed
        return np.asarray(self.features(coords, coefficients.shape[1]) @ coefficients.T)

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

    def draws(
        self, coords: FloatArray, log_lengthscales: FloatArray, coefficients: FloatArray, seed: int
    ) -> FloatArray:
        """Fields (n, S) of coefficients (S, D), one draw after the other."""
        del seed
        projections = self.features(coords)
        values = np.empty((len(coords), len(coefficients)))
        for s, (log_l, coefficient) in enumerate(zip(log_lengthscales, coefficients, strict=True)):
            values[:, s] = np.cos(projections * np.exp(-log_l) + self.phases) @ coefficient
        return values

    def outside(self, coords: FloatArray) -> NDArray[np.bool_]:
        """Nowhere: the features are stationary."""
        return np.zeros(len(coords), dtype=bool)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Nodes:
    r"""Chebyshev nodes in :math:`\log l`, between which factors of covariances are interpolated."""

    positions: Any
    weights: Any
    ends: Any

    @staticmethod
    def between(lower: float, upper: float) -> Nodes:
        """Nodes for length-scales in [lower, upper]."""
        middle, half = 0.5 * math.log(lower * upper), 0.5 * math.log(upper / lower)
        count = 6 + math.ceil(6.0 * half)
        angles = math.pi * (np.arange(count) + 0.5) / count
        weights = (-1.0) ** np.arange(count) * np.sin(angles)
        ends = np.array([middle - half, middle + half])
        return Nodes(middle + half * np.cos(angles), weights, ends)

    def evaluate(self, factors: Any, log_lengthscales: Any, coefficients: Any) -> Any:
        """Fields (J, n) from the factors (node, n, n) and coefficients (J, n)."""
        at_nodes = jnp.einsum("qnm,jm->jqn", factors, coefficients)
        return jnp.einsum("jq,jqn->jn", self.interpolation(log_lengthscales), at_nodes)

    def interpolation(self, log_lengthscales: Any) -> Any:
        """Barycentric weights (J, node), the length-scale held within the range of the nodes."""
        log_l = jnp.clip(log_lengthscales, self.ends[0], self.ends[1])
        gap = log_l[:, None] - self.positions
        ratio = self.weights / jnp.where(gap == 0.0, 1e-14, gap)
        return ratio / jnp.sum(ratio, axis=1, keepdims=True)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Exact:
    r"""The process at the training sites themselves, through Cholesky factors.

    :math:`f = L(l)\beta` with :math:`L L^T = K(l)`. The factor is smooth in :math:`\log l`: it is
    computed once at Chebyshev nodes over the range of the prior and interpolated between them,
    which replaces a factorisation and its derivative per gradient by one matrix product. Joint
    draws at other sites come from Matheron's rule,
    :math:`f_* = g_* + K_* K^{-1}(f - g)`, with *g* a fresh prior path for every draw.
    """

    sites: Any
    nodes: Nodes
    kernel: Kernel = field(metadata=_STATIC)

    @staticmethod
    def build(kernel: Kernel, sites: FloatArray, lower: float, upper: float) -> Exact:
        """Exact process at `sites` (n, d) for length-scales in [lower, upper]."""
        return Exact(sites, Nodes.between(lower, upper), kernel)

    @property
    def n_coefficients(self) -> int:
        """Number of training sites."""
        return len(self.sites)

    def features(self, coords: FloatArray) -> FloatArray:
        """Cholesky factors (node, n, n) at the training sites; `coords` must be those."""
        if not np.array_equal(coords, self.sites):
            raise ValueError("An exact process has features at its own training sites only.")
        return np.stack([self._factor(float(node)) for node in self.nodes.positions])

    def log_sd(self, log_lengthscale: Any, size: int) -> Any:
        """Zero: the factor carries the scale."""
        return jnp.zeros(size) + 0.0 * log_lengthscale

    def evaluate(
        self,
        features: Any,
        log_lengthscales: Any,
        coefficients: Any,
        sizes: tuple[int, ...] | None = None,
    ) -> Any:
        """Fields (J, n): all nodes at once, then the interpolation."""
        del sizes
        return self.nodes.evaluate(features, log_lengthscales, coefficients)

    def draws(
        self, coords: FloatArray, log_lengthscales: FloatArray, coefficients: FloatArray, seed: int
    ) -> FloatArray:
        """Fields (n, S) by Matheron's rule; draw s uses prior path s of `seed`."""
        values = np.empty((len(coords), len(coefficients)))
        for s, (log_l, coefficient) in enumerate(zip(log_lengthscales, coefficients, strict=True)):
            values[:, s] = self._path(coords, float(log_l), coefficient, seed, s)
        return values

    def outside(self, coords: FloatArray) -> NDArray[np.bool_]:
        """Nowhere: kriging holds at any site."""
        return np.zeros(len(coords), dtype=bool)

    def _factor(self, log_lengthscale: float) -> FloatArray:
        matrix = covariance(self.kernel, self.sites, self.sites, math.exp(log_lengthscale))
        factor = np.linalg.cholesky(matrix + _JITTER * np.eye(len(matrix)))
        return np.asarray(factor, dtype=float)

    def _path(
        self, coords: FloatArray, log_l: float, coefficient: FloatArray, seed: int, index: int
    ) -> FloatArray:
        rng = np.random.default_rng([seed, index])
        lengthscale = math.exp(log_l)
        prior = Fourier.build(self.kernel, coords.shape[1], _PATH_FEATURES, rng)
        beta = rng.standard_normal((1, _PATH_FEATURES)) * math.sqrt(2.0 / _PATH_FEATURES)
        at_sites = prior.draws(self.sites, np.array([log_l]), beta, 0)[:, 0]
        at_coords = prior.draws(coords, np.array([log_l]), beta, 0)[:, 0]
        factor = self._factor(log_l)
        gap = factor @ coefficient - at_sites
        weights = linalg.cho_solve((factor, True), gap, check_finite=False)
        return at_coords + covariance(self.kernel, coords, self.sites, lengthscale) @ weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dual:
    r"""A Hilbert-space process sampled through its values at a few training sites.

    With fewer sites than basis functions most directions of the coefficients are known to the
    prior alone. The values at the sites, :math:`f = L(l)\beta` with
    :math:`LL^T = \Phi S(l)\Phi^T`, are all that the data speak of; the coefficients follow from
    them by `lift`. The model is the same, its posterior has n dimensions instead of m.
    """

    basis: Hilbert
    sites: Any
    nodes: Nodes

    @staticmethod
    def build(basis: Hilbert, sites: FloatArray, lower: float, upper: float) -> Dual:
        """Process of `basis` at `sites` (n, d) for length-scales in [lower, upper]."""
        return Dual(basis, sites, Nodes.between(lower, upper))

    @property
    def n_coefficients(self) -> int:
        """Number of training sites."""
        return len(self.sites)

    def features(self, coords: FloatArray) -> FloatArray:
        """Cholesky factors (node, n, n) at the training sites; `coords` must be those."""
        if not np.array_equal(coords, self.sites):
            raise ValueError("These features exist at the training sites only.")
        phi = self.basis.features(coords)
        return np.stack([self._factor(phi, float(node)) for node in self.nodes.positions])

    def log_sd(self, log_lengthscale: Any, size: int) -> Any:
        """Zero: the factor carries the scale."""
        return jnp.zeros(size) + 0.0 * log_lengthscale

    def evaluate(
        self,
        features: Any,
        log_lengthscales: Any,
        coefficients: Any,
        sizes: tuple[int, ...] | None = None,
    ) -> Any:
        """Fields (J, n): all nodes at once, then the interpolation."""
        del sizes
        return self.nodes.evaluate(features, log_lengthscales, coefficients)

    def lift(
        self,
        log_lengthscales: FloatArray,
        amplitudes: FloatArray,
        values: FloatArray,
        seed: int,
        size: int,
    ) -> FloatArray:
        r"""Coefficients (S, size) of the basis, drawn given values (S, n) at the sites.

        :math:`\gamma = \gamma_0 + S\Phi^T(\Phi S\Phi^T)^{-1}(f - \Phi\gamma_0)` with a prior draw
        :math:`\gamma_0`. All functions of the basis take part, as in the factor at the sites, and
        the `size` lowest are kept: fewer could not pass through *f*, except by huge coefficients.
        """
        phi = self.basis.features(np.asarray(self.sites))
        rng = np.random.default_rng([seed, 11])
        noise = rng.standard_normal((len(values), self.basis.n_coefficients))
        lifted = np.empty((len(values), size))
        for start in range(0, len(values), _BATCH):
            part = slice(start, start + _BATCH)
            sd = self.basis.sd(log_lengthscales[part], self.basis.n_coefficients)
            scaled = sd[:, None, :] * phi
            gap = values[part] / amplitudes[part, None] - np.einsum(
                "snm,sm->sn", scaled, noise[part]
            )
            gram = scaled @ scaled.transpose(0, 2, 1) + _JITTER * np.eye(len(phi))
            weights = np.linalg.solve(gram, gap[..., None])[..., 0]
            shift = np.einsum("snm,sn->sm", scaled[..., :size], weights)
            lifted[part] = amplitudes[part, None] * sd[:, :size] * (noise[part, :size] + shift)
        return lifted

    def draws(
        self, coords: FloatArray, log_lengthscales: FloatArray, coefficients: FloatArray, seed: int
    ) -> FloatArray:
        """Fields (n, S) of lifted coefficients (S, m)."""
        return self.basis.draws(coords, log_lengthscales, coefficients, seed)

    def outside(self, coords: FloatArray) -> NDArray[np.bool_]:
        """Sites beyond the domain of the basis."""
        return self.basis.outside(coords)

    def _factor(self, phi: FloatArray, log_lengthscale: float) -> FloatArray:
        scaled = phi * self.basis.sd(np.array([log_lengthscale]), self.basis.n_coefficients)
        factor = np.linalg.cholesky(scaled @ scaled.T + _JITTER * np.eye(len(phi)))
        return np.asarray(factor, dtype=float)
