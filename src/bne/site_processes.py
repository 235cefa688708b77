r"""Processes sampled through their values at the training sites.

With few sites, the values there are all that the data speak of. They are written
:math:`f = R(l)Q\beta` with the symmetric root of their covariance, which is smooth in
:math:`\log l`: it is computed once at Chebyshev nodes over the range of the prior and interpolated
between them, so that a gradient costs a matrix product and no factorisation. The fixed axes *Q* are
the eigenvectors of the root at the middle of that range: each coefficient is then, nearly, one wave
of the field, of which the data know much or little, and is centred accordingly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
_EDGE = 1.0 - 1e-12


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Nodes:
    r"""Interpolation of the roots of covariances in :math:`\log l`.

    .. math:: R(l) \approx \sum_k c_k(l) B_k, \qquad
              c_k(l) = \sum_j M_{jk} T_j(t),

    with Chebyshev polynomials :math:`T_j` of :math:`\log l`, of which *t* in [-1, 1] is the place
    between the `ends`, through the roots at Chebyshev nodes; and with as few `mixing` directions
    *M* as tell these roots apart (their principal components), because all :math:`B_k` take part
    in every gradient.

    Parameters
    ----------
    positions : (Q,) the nodes, in log l.
    ends : (2,) in log l; beyond them the length-scale is held.
    combine : (Q, K) from roots at the nodes to the matrices B.
    mixing : (Q, K)
    """

    positions: Any
    ends: Any
    combine: Any
    mixing: Any

    @staticmethod
    def between(
        lower: float, upper: float, root: Callable[[float], FloatArray], error: float
    ) -> Nodes:
        """As few nodes as interpolate `root` (of log l) well, for length-scales in [lower, upper].

        What is compared is the covariance, half way between neighbouring nodes: there it is off by
        at most the share `error` of the variance, unless that takes more than `_MOST_NODES`. Nodes
        alone may take half of that.
        """
        ends = math.log(lower), math.log(upper)
        count, found = _FEWEST_NODES, np.inf
        while count < _MOST_NODES and found > 0.5 * error:
            count += found < np.inf
            nodes = Nodes.of(count, *ends)
            roots = np.stack([root(float(node)) for node in nodes.positions])
            exact = np.stack([root(float(point)) for point in nodes._between()])
            found = nodes._error(roots, exact)
        _, vectors = np.linalg.eigh(np.einsum("qnm,pnm->qp", roots, roots))
        for kept in range(2, count):
            fewer = nodes._projected(vectors[:, -kept:])
            if fewer._error(roots, exact) <= max(error, found):
                return fewer
        return nodes

    @staticmethod
    def of(count: int, lower: float, upper: float) -> Nodes:
        """Chebyshev nodes of the first kind, log l in [lower, upper]."""
        angles = math.pi * (np.arange(count) + 0.5) / count
        middle, half = 0.5 * (lower + upper), 0.5 * (upper - lower)
        polynomials = np.cos(np.outer(np.arange(count), angles))
        mixing = polynomials * np.where(np.arange(count) > 0, 2.0, 1.0)[:, None] / count
        ends = np.array([lower, upper])
        return Nodes(middle + half * np.cos(angles), ends, np.eye(count), mixing)

    def _projected(self, directions: FloatArray) -> Nodes:
        """On the orthonormal `directions` (Q, K) alone."""
        return replace(self, combine=directions, mixing=self.mixing @ directions)

    def _between(self) -> FloatArray:
        return np.asarray(0.5 * (self.positions[1:] + self.positions[:-1]))

    def _error(self, roots: FloatArray, exact: FloatArray) -> float:
        """Error of the covariance half way between nodes, given `roots` at the nodes."""
        shares = self.interpolation(self._between(), np)
        found = np.tensordot(shares, self.matrices(roots), 1)
        gap = found @ found.transpose(0, 2, 1) - exact @ exact.transpose(0, 2, 1)
        return float(np.abs(gap).max())

    def matrices(self, roots: FloatArray) -> FloatArray:
        """Matrices B (K, n, n) from the roots (Q, n, n) at the nodes."""
        return np.ascontiguousarray(np.tensordot(self.combine.T, roots, 1))

    def evaluate(self, matrices: Any, log_lengthscales: Any, coefficients: Any) -> Any:
        """Fields (J, n) from the matrices B (K, n, n) and coefficients (J, n)."""
        return _mixed(self, matrices, log_lengthscales, coefficients)

    def interpolation(self, log_lengthscales: Any, xp: Any = jnp) -> Any:
        """Shares c (J, K), the length-scale held within the range of the nodes."""
        return xp.cos(self._angles(log_lengthscales, xp)) @ self.mixing

    def shares_and_slopes(self, log_lengthscales: Any) -> Any:
        """Shares c and their derivatives by log l (2, J, K)."""
        angles = self._angles(log_lengthscales, jnp)
        order, first = np.arange(angles.shape[-1]), angles[..., 1:2]
        low, high = self.ends
        inside = (log_lengthscales > low) & (log_lengthscales < high)
        rate = jnp.where(inside, 2.0 / (high - low), 0.0)[..., None] / jnp.sin(first)
        both = jnp.stack([jnp.cos(angles), rate * order * jnp.sin(angles)])
        return both @ self.mixing

    def _angles(self, log_lengthscales: Any, xp: Any) -> Any:
        low, high = self.ends
        t = (2.0 * log_lengthscales - low - high) / (high - low)
        return xp.arccos(xp.clip(t, -_EDGE, _EDGE))[..., None] * np.arange(len(self.mixing))


@jax.custom_jvp
def _mixed(nodes: Nodes, matrices: Any, log_lengthscales: Any, coefficients: Any) -> Any:
    r"""Fields :math:`\sum_k c_k(l) B_k \beta` (J, n): all products at once, then their mixture."""
    return _mixed_jvp((nodes, matrices, log_lengthscales, coefficients), None)[0]


@_mixed.defjvp
def _mixed_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Fields and their change with length-scales and coefficients; the products serve both."""
    nodes, matrices, log_l, coefficients = primals
    shape = len(log_l), *matrices.shape[:2]
    side_by_side = matrices.reshape(-1, matrices.shape[2]).T

    def products(coefficients: Any) -> Any:
        return (coefficients @ side_by_side).reshape(shape)

    shares = nodes.shares_and_slopes(log_l)
    values, slopes = jnp.sum(shares[..., None] * products(coefficients), axis=2)
    if tangents is None:
        return values, None
    change = jnp.sum(shares[0, ..., None] * products(tangents[3]), axis=1)
    return values, change + slopes * tangents[2][:, None]


class _AtSites:
    """What processes share that are sampled through their values at `sites`."""

    sites: Any
    nodes: Nodes
    axes: Any

    @property
    def n_coefficients(self) -> int:
        """Number of training sites."""
        return len(self.sites)

    @property
    def moving(self) -> bool:
        """The root changes with the length-scale."""
        return True

    def features(self, coords: FloatArray) -> FloatArray:
        """Matrices (K, n, n) whose mixtures are the roots; `coords` must be the training sites."""
        if not np.array_equal(coords, self.sites):
            raise ValueError("These features exist at the training sites only.")
        roots = np.stack([self.root(float(node)) for node in self.nodes.positions])
        return self.nodes.matrices(roots)

    def root(self, log_lengthscale: float) -> FloatArray:
        """Root RQ (n, n) of the covariance at the sites."""
        raise NotImplementedError

    def _waves(self) -> FloatArray:
        """Eigenvectors (n, n) of the root at the middle of the nodes, the slowest wave first."""
        _, vectors = np.linalg.eigh(self.root(float(np.mean(self.nodes.ends))))
        return np.ascontiguousarray(vectors[:, ::-1])

    def log_sd(self, log_lengthscale: Any, size: int) -> Any:
        """Zero: the root carries the scale."""
        del log_lengthscale
        return jnp.zeros(size)

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
        """The interpolated root on the axes (n, n)."""
        shares = self.nodes.interpolation(jnp.reshape(log_lengthscale, 1))[0]
        return jnp.tensordot(shares, features, 1)[:, :size]

    def values(self, log_lengthscales: FloatArray, coefficients: FloatArray) -> FloatArray:
        """Values (S, n) at the sites, in NumPy."""
        matrices = self.features(np.asarray(self.sites))
        values = np.zeros(coefficients.shape)
        for share, matrix in zip(
            self.nodes.interpolation(log_lengthscales, np).T, matrices, strict=True
        ):
            values += share[:, None] * (coefficients @ matrix.T)
        return values


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Exact(_AtSites):
    r"""The exact process; joint draws elsewhere come from Matheron's rule.

    :math:`f_* = g_* + K_* K^{-1}(f - g)` with *g* a fresh prior path for every draw, made of many
    random waves.
    """

    sites: Any
    nodes: Nodes
    axes: Any
    kernel: Kernel = field(metadata={"static": True})

    @staticmethod
    def build(kernel: Kernel, sites: FloatArray, lower: float, upper: float) -> Exact:
        """Exact process at `sites` (n, d) for length-scales in [lower, upper]."""
        few = _thinned(sites)
        tried = Exact(few, Nodes.of(2, 0.0, 1.0), np.eye(len(few)), kernel)
        nodes = Nodes.between(lower, upper, tried.root, _EXACT_ERROR)
        plain = Exact(sites, nodes, np.eye(len(sites)), kernel)
        return replace(plain, axes=plain._waves())

    def root(self, log_lengthscale: float) -> FloatArray:
        """Root RQ (n, n) of the covariance at the sites."""
        return np.asarray(_symmetric_root(self._covariance(log_lengthscale)) @ self.axes)

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
    axes: Any

    @staticmethod
    def build(basis: Hilbert, sites: FloatArray, lower: float, upper: float) -> Dual:
        """Process of `basis` at `sites` (n, d) for length-scales in [lower, upper]."""
        few = _thinned(sites)
        tried = Dual(basis, few, Nodes.of(2, 0.0, 1.0), np.eye(len(few)))
        nodes = Nodes.between(lower, upper, tried.root, _BASIS_ERROR)
        plain = Dual(basis, sites, nodes, np.eye(len(sites)))
        return replace(plain, axes=plain._waves())

    def root(self, log_lengthscale: float) -> FloatArray:
        """Root RQ (n, n) of the covariance at the sites."""
        sd = self.basis.sd(np.array([log_lengthscale]), self.basis.n_coefficients)
        scaled = self._features() * sd
        root = _symmetric_root(scaled @ scaled.T + _JITTER * np.eye(len(scaled)))
        return np.asarray(root @ self.axes)

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
