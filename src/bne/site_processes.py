r"""Processes sampled through their values at the training sites.

With few sites, the values there are all that the data speak of. They are written
:math:`f = R(l)\beta` with the symmetric root of their covariance, which is smooth in
:math:`\log l`: it is computed once at Chebyshev nodes over the range of the prior and interpolated
between them, so that a gradient costs a matrix product and no factorisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from bne.kernels import Kernel, covariance
from bne.processes import Fourier, Hilbert

__all__ = ["Dual", "Exact", "Nodes"]

FloatArray = NDArray[np.float64]
_JITTER = 1e-9
_PATH_FEATURES = 256
_BATCH = 64
_FEWEST_NODES, _MOST_NODES = 6, 30
_EXACT_ERROR, _BASIS_ERROR = 1e-4, 1e-3  # of a covariance, as a share of the variance
_TRIED_SITES = 60


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Nodes:
    r"""Chebyshev nodes in :math:`\log l`, between which roots of covariances are interpolated."""

    positions: Any
    weights: Any
    ends: Any

    @staticmethod
    def between(
        lower: float, upper: float, root: Callable[[float], FloatArray], error: float
    ) -> Nodes:
        """As few nodes as interpolate `root` (of log l) well, for length-scales in [lower, upper].

        What is compared is the covariance, half way between neighbouring nodes: there it is off by
        at most the share `error` of the variance, unless that takes more than `_MOST_NODES`.
        """
        nodes = Nodes.of(_FEWEST_NODES, math.log(lower), math.log(upper))
        while len(nodes.positions) < _MOST_NODES and nodes._error(root) > error:
            nodes = Nodes.of(len(nodes.positions) + 1, math.log(lower), math.log(upper))
        return nodes

    @staticmethod
    def of(count: int, lower: float, upper: float) -> Nodes:
        """Chebyshev nodes of the first kind, log l in [lower, upper]."""
        angles = math.pi * (np.arange(count) + 0.5) / count
        weights = (-1.0) ** np.arange(count) * np.sin(angles)
        middle, half = 0.5 * (lower + upper), 0.5 * (upper - lower)
        return Nodes(middle + half * np.cos(angles), weights, np.array([lower, upper]))

    def _error(self, root: Callable[[float], FloatArray]) -> float:
        roots = np.stack([root(float(node)) for node in self.positions])
        between = 0.5 * (self.positions[1:] + self.positions[:-1])
        ratio = self.weights / (between[:, None] - self.positions)
        interpolated = np.tensordot(ratio / ratio.sum(axis=1, keepdims=True), roots, 1)
        exact = np.stack([root(float(point)) for point in between])
        gap = interpolated @ interpolated.transpose(0, 2, 1) - exact @ exact.transpose(0, 2, 1)
        return float(np.abs(gap).max())

    def evaluate(self, roots: Any, log_lengthscales: Any, coefficients: Any, xp: Any = jnp) -> Any:
        """Fields (J, n) from the symmetric roots (node, n, n) and coefficients (J, n)."""
        at_nodes = xp.einsum("qnm,jm->jqn", roots, coefficients)
        return xp.einsum("jq,jqn->jn", self.interpolation(log_lengthscales, xp), at_nodes)

    def interpolation(self, log_lengthscales: Any, xp: Any = jnp) -> Any:
        """Barycentric weights (J, node), the length-scale held within the range of the nodes."""
        log_l = xp.clip(log_lengthscales, self.ends[0], self.ends[1])
        gap = log_l[:, None] - self.positions
        ratio = self.weights / xp.where(gap == 0.0, 1e-14, gap)
        return ratio / xp.sum(ratio, axis=1, keepdims=True)


class _AtSites:
    """What processes share that are sampled through their values at `sites`."""

    sites: Any
    nodes: Nodes

    @property
    def n_coefficients(self) -> int:
        """Number of training sites."""
        return len(self.sites)

    @property
    def moving(self) -> bool:
        """The root changes with the length-scale."""
        return True

    def features(self, coords: FloatArray) -> FloatArray:
        """Roots (node, n, n) at the training sites; `coords` must be those."""
        if not np.array_equal(coords, self.sites):
            raise ValueError("These features exist at the training sites only.")
        return np.stack([self.root(float(node)) for node in self.nodes.positions])

    def root(self, log_lengthscale: float) -> FloatArray:
        """Symmetric root (n, n) of the covariance at the sites."""
        raise NotImplementedError

    def log_sd(self, log_lengthscale: Any, size: int) -> Any:
        """Zero: the root carries the scale."""
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

    def columns(self, features: Any, log_lengthscale: Any, size: int) -> Any:
        """The interpolated root (n, n)."""
        shares = self.nodes.interpolation(jnp.reshape(log_lengthscale, 1))[0]
        return jnp.tensordot(shares, features, 1)[:, :size]

    def values(self, log_lengthscales: FloatArray, coefficients: FloatArray) -> FloatArray:
        """Values (S, n) at the sites, in NumPy."""
        roots = self.features(np.asarray(self.sites))
        parts = [
            self.nodes.evaluate(roots, log_lengthscales[part], coefficients[part], np)
            for part in _batches(len(coefficients))
        ]
        return np.concatenate(parts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Exact(_AtSites):
    r"""The exact process; joint draws elsewhere come from Matheron's rule.

    :math:`f_* = g_* + K_* K^{-1}(f - g)` with *g* a fresh prior path for every draw, made of many
    random waves.
    """

    sites: Any
    nodes: Nodes
    kernel: Kernel = field(metadata={"static": True})

    @staticmethod
    def build(kernel: Kernel, sites: FloatArray, lower: float, upper: float) -> Exact:
        """Exact process at `sites` (n, d) for length-scales in [lower, upper]."""
        tried = Exact(_thinned(sites), Nodes.of(2, 0.0, 1.0), kernel)
        return Exact(sites, Nodes.between(lower, upper, tried.root, _EXACT_ERROR), kernel)

    def root(self, log_lengthscale: float) -> FloatArray:
        """Symmetric root (n, n) of the covariance at the sites."""
        return _symmetric_root(self._covariance(log_lengthscale))

    def prepare(
        self, log_lengthscales: FloatArray, coefficients: FloatArray, seed: int
    ) -> FloatArray:
        """Weights :math:`K^{-1}(f - g)` (S, n)."""
        weights = self.values(log_lengthscales, coefficients)
        for s, log_l in enumerate(log_lengthscales):
            gap = weights[s] - self._prior_path(self.sites, float(log_l), seed, s)
            factor = np.linalg.cholesky(self._covariance(float(log_l)))
            weights[s] = linalg.cho_solve((factor, True), gap, check_finite=False)
        return weights

    def draws(
        self, coords: FloatArray, log_lengthscales: FloatArray, prepared: FloatArray, seed: int
    ) -> FloatArray:
        """Fields (n, S); draw s uses prior path s of `seed`, which `prepare` was given too."""
        fields = np.empty((len(coords), len(prepared)))
        for s, (log_l, weights) in enumerate(zip(log_lengthscales, prepared, strict=True)):
            known = covariance(self.kernel, coords, self.sites, math.exp(log_l)) @ weights
            fields[:, s] = known + self._prior_path(coords, float(log_l), seed, s)
        return fields

    def outside(self, coords: FloatArray) -> NDArray[np.bool_]:
        """Nowhere: kriging holds at any site."""
        return np.zeros(len(coords), dtype=bool)

    def _covariance(self, log_lengthscale: float) -> FloatArray:
        matrix = covariance(self.kernel, self.sites, self.sites, math.exp(log_lengthscale))
        return matrix + _JITTER * np.eye(len(matrix))

    def _prior_path(self, coords: FloatArray, log_l: float, seed: int, index: int) -> FloatArray:
        rng = np.random.default_rng([seed, index])
        waves = Fourier.build(self.kernel, coords.shape[1], _PATH_FEATURES, rng)
        beta = rng.standard_normal((1, _PATH_FEATURES)) * math.sqrt(2.0 / _PATH_FEATURES)
        return waves.draws(coords, np.array([log_l]), beta, 0)[:, 0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dual(_AtSites):
    r"""A Hilbert-space process sampled through its values at a few training sites.

    With fewer sites than basis functions most directions of the coefficients are known to the
    prior alone. The values, with covariance :math:`\Phi S(l)\Phi^T`, have n dimensions instead of
    m; the coefficients follow from them. The model is the same.
    """

    basis: Hilbert
    sites: Any
    nodes: Nodes

    @staticmethod
    def build(basis: Hilbert, sites: FloatArray, lower: float, upper: float) -> Dual:
        """Process of `basis` at `sites` (n, d) for length-scales in [lower, upper]."""
        tried = Dual(basis, _thinned(sites), Nodes.of(2, 0.0, 1.0))
        return Dual(basis, sites, Nodes.between(lower, upper, tried.root, _BASIS_ERROR))

    def root(self, log_lengthscale: float) -> FloatArray:
        """Symmetric root (n, n) of the covariance at the sites."""
        sd = self.basis.sd(np.array([log_lengthscale]), self.basis.n_coefficients)
        scaled = self._features() * sd
        return _symmetric_root(scaled @ scaled.T + _JITTER * np.eye(len(scaled)))

    def prepare(self, log_lengthscales: FloatArray, coefficients: FloatArray, seed: int) -> Any:
        r"""Coefficients (S, m) of the basis, drawn given the values at the sites.

        :math:`\gamma = \gamma_0 + S\Phi^T(\Phi S\Phi^T)^{-1}(f - \Phi\gamma_0)` with a prior draw
        :math:`\gamma_0`. All functions of the basis take part: fewer could not pass through *f*,
        except by huge coefficients.
        """
        values = self.values(log_lengthscales, coefficients)
        phi, products = self._features(), self._products()
        rng = np.random.default_rng([seed, 11])
        lifted = rng.standard_normal((len(values), self.basis.n_coefficients))
        for part in _batches(len(values)):
            sd = self.basis.sd(log_lengthscales[part], self.basis.n_coefficients)
            gap = values[part] - (lifted[part] * sd) @ phi.T
            gram = (sd[:, ::2] ** 2 @ products).reshape(-1, *[len(phi)] * 2)
            weights = np.linalg.solve(gram + _JITTER * np.eye(len(phi)), gap[..., None])[..., 0]
            lifted[part] = sd * (lifted[part] + sd * (weights @ phi))
        return self.basis.prepare(log_lengthscales, lifted, seed)

    def draws(
        self, coords: FloatArray, log_lengthscales: FloatArray, prepared: Any, seed: int
    ) -> NDArray[Any]:
        """Fields (n, S) of coefficients (S, m) of the basis."""
        return self.basis.draws(coords, log_lengthscales, prepared, seed)

    def outside(self, coords: FloatArray) -> NDArray[np.bool_]:
        """Sites beyond the domain of the basis."""
        return self.basis.outside(coords)

    def _features(self) -> FloatArray:
        """Eigenfunctions at the sites, (n, m)."""
        return self.basis.features(np.asarray(self.sites))

    def _products(self) -> FloatArray:
        """Products of eigenfunctions at pairs of sites, cosine with sine, (m // 2 + 1, n n)."""
        phi = self._features().T
        products = phi[:, :, None] * phi[:, None, :]
        products[2::2] += products[1::2]
        return products[::2].reshape(-1, phi.shape[1] ** 2)


def _batches(count: int) -> list[slice]:
    return [slice(start, start + _BATCH) for start in range(0, count, _BATCH)]


def _symmetric_root(matrix: FloatArray) -> FloatArray:
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T)


def _thinned(sites: FloatArray) -> FloatArray:
    """Few enough sites to try nodes on."""
    return sites[:: -(-len(sites) // _TRIED_SITES)]
