r"""placeholder"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy import linalg, optimize, stats

from bne.inference import Draws
from bne.model import ModelData, Structure, log_prior_sd, softmax_weights
from bne.noise import emg_logpdf, normal_logpdf
from bne.processes import Dual, Exact, Hilbert

__all__ = ["approximate"]

FloatArray = NDArray[np.float64]
Progress = Callable[[int, int], None]

_DAMPING = 0.75
DEBUG=bool(os.environ.get('DBG'))
_LIMIT = 40
_DIRECTIONS = 64
_BOUND = 6.0
_compiled = partial(
    jax.jit,
    static_argnames=("structure",),
    compiler_options={"xla_cpu_multi_thread_eigen": False},
)


class Sites(NamedTuple):
    eta: Any
    slope: Any
    precision: Any


class Fit(NamedTuple):
    """Gaussian q(z) given theta: mean (M,), Cholesky factor of H (M, M), and the bound on log p(y)."""

    mean: Any
    factor: Any
    sites: Sites
    wanted: Any
    value: Any


class Block(NamedTuple):
    """Coefficients `place` that act on channel `channel` through `columns` (n, size)."""

    channel: int
    place: slice
    columns: Any


# The fields of a site


def _channels(structure: Structure) -> tuple[str, ...]:
    names = [f"weights{j}" for j in range(structure.n_models - 1) if "weights" in structure]
    if "residual" in structure or structure.n_trend:
        names.append("residual")
    return (*names, *(name for name in ("log_scale", "log_skew") if name in structure))


def _blocks(structure: Structure, theta: Any, data: ModelData) -> list[Block]:
    channels, start = _channels(structure), structure.n_trend
    found = []
    if structure.n_trend:
        found.append(Block(channels.index("residual"), slice(0, start), data.trend))
    for process in structure.processes:
        log_l = structure.log_lengthscale(theta, process.name)
        columns = _columns(data, log_l, process.size)
        columns = columns * jnp.exp(log_prior_sd(structure, theta, data, process))
        for copy in range(process.copies):
            name = f"weights{copy}" if process.name == "weights" else process.name
            place = slice(start, start + process.size)
            found.append(Block(channels.index(name), place, columns))
            start += process.size
    return found


def _columns(data: ModelData, log_lengthscale: Any, size: int) -> Any:
    known = data.representation
    if isinstance(known, Hilbert):
        return data.features[:, :size]
    if isinstance(known, Dual | Exact):
        weights = known.nodes.interpolation(log_lengthscale[None])[0]
        return jnp.tensordot(weights, data.features, 1)
    eye = jnp.eye(size, known.n_coefficients)
    return known.evaluate(data.features, jnp.full(size, log_lengthscale), eye).T


def _fields(blocks: list[Block], z: Any, n_channels: int) -> Any:
    n = blocks[0].columns.shape[0]
    fields = [jnp.zeros((n, *z.shape[1:]))] * n_channels
    for channel, place, columns in blocks:
        fields[channel] = fields[channel] + columns @ z[place]
    return jnp.stack(fields, 1)


def _log_likelihood(structure: Structure, eta: Any, log_sigma: Any, log_skew_mean: Any, site: Any) -> Any:
    response, base, mean = site
    at = dict(zip(_channels(structure), eta, strict=True))
    if "weights" in structure:
        mean = base @ softmax_weights(eta[: structure.n_models - 1], structure.n_models)
    residual = response - mean - at.get("residual", 0.0)
    log_scale = log_sigma + at.get("log_scale", 0.0)
    if "log_skew" in at:
        return emg_logpdf(residual, log_scale, log_skew_mean + at["log_skew"])
    return normal_logpdf(residual, log_scale)


def _cubature(dim: int) -> tuple[FloatArray, FloatArray]:
    """Nodes (Q, dim) and weights of degree 5 for a standard normal; Gauss-Hermite for dim <= 2."""
    axes = np.sqrt(3.0) * np.eye(dim)
    pairs = [a * axes[i] + b * axes[j] for i in range(dim) for j in range(i) for a in (1, -1) for b in (1, -1)]
    nodes = np.concatenate([np.zeros((1, dim)), axes, -axes, np.reshape(pairs, (-1, dim))])
    weights = np.full(len(nodes), 1.0 / 36.0)
    weights[0], weights[1 : 2 * dim + 1] = (dim * dim - 7 * dim + 18) / 18.0, (4 - dim) / 18.0
    return nodes, weights


# The Gaussian given theta


def _assemble(blocks: list[Block], precision: Any, size: int) -> Any:
    H = jnp.eye(size)
    for i, (c, rows, left) in enumerate(blocks):
        for d, columns, right in blocks[: i + 1]:
            H = H.at[rows, columns].add((left * precision[:, c, d, None]).T @ right)
    return H


def _factor(blocks: list[Block], precision: Any, size: int) -> tuple[Any, Any]:
    def attempt(precision: Any) -> tuple[Any, Any]:
        return jnp.linalg.cholesky(_assemble(blocks, precision, size), symmetrize_input=False), precision

    def convex(precision: Any) -> tuple[Any, Any]:
        values, vectors = jnp.linalg.eigh(precision)
        return attempt((vectors * jnp.maximum(values, 0.0)[:, None]) @ jnp.swapaxes(vectors, 1, 2))

    factor, _ = attempt(precision)
    return jax.lax.cond(jnp.all(jnp.isfinite(factor)), lambda p: (factor, p), convex, precision)


def _inverse(factor: Any) -> Any:
    return jax.scipy.linalg.solve_triangular(factor, jnp.eye(len(factor)), lower=True)


def _expectations(structure: Structure, theta: Any, data: ModelData, mixture: Any, eta: Any, covariance: Any) -> Any:
    nodes, weights = _cubature(eta.shape[1])
    root = jnp.linalg.cholesky(covariance + 1e-12 * jnp.eye(eta.shape[1]))

    def one(eta: Any, root: Any, site: Any) -> Any:
        def log_likelihood(e: Any, log_sigma: Any) -> Any:
            return _log_likelihood(structure, e, log_sigma, data.log_skew_mean, site)

        def at(node: Any, weight: Any) -> Any:
            e, log_sigma = eta + root @ node, structure.log_sigma(theta)
            value, by_sigma = jax.value_and_grad(log_likelihood, 1)(e, log_sigma)
            slope, curvature = jax.grad(log_likelihood)(e, log_sigma), jax.hessian(log_likelihood)(e, log_sigma)
            return jax.tree.map(lambda x: weight * x, (value, by_sigma, slope, curvature))

        return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.vmap(at)(nodes, weights))

    return jax.vmap(one)(eta, root, (data.response, data.base, mixture))


@_compiled
def _fit(structure: Structure, theta: Any, data: ModelData, mixture: Any, start: Sites, tolerance: Any, limit: Any) -> Fit:
    blocks = _blocks(structure, theta, data)
    size, n_channels = structure.dimension - structure.n_hyper, len(_channels(structure))

    def gaussian(precision: Any, mean_of: Any) -> Any:
        factor, precision = _factor(blocks, precision, size)
        mean = mean_of(factor, precision)
        inverse = _inverse(factor)
        eta = _fields(blocks, mean, n_channels)
        spread = _fields(blocks, inverse.T, n_channels)
        covariance = jnp.einsum("ncm,ndm->ncd", spread, spread)
        value, _, slope, curvature = _expectations(structure, theta, data, mixture, eta, covariance)
        bound = jnp.sum(value) - 0.5 * (mean @ mean + jnp.sum(inverse**2) - size)
        bound = bound - jnp.sum(jnp.log(jnp.diag(factor)))
        return Fit(mean, factor, Sites(eta, slope, precision), -curvature, bound)

    def first(factor: Any, precision: Any) -> Any:
        linear = start.slope + jnp.einsum("ncd,nd->nc", precision, start.eta)
        return jax.scipy.linalg.cho_solve((factor, True), _pull(blocks, linear))

    def update(carry: Any) -> Any:
        fit, _, rate, i = carry
        step = _pull(blocks, fit.sites.slope) - fit.mean
        precision = (1 - rate) * fit.sites.precision + rate * fit.wanted
        new = gaussian(precision, lambda factor, _: fit.mean + rate * jax.scipy.linalg.cho_solve((factor, True), step))
        moved = jnp.sum((new.factor.T @ (new.mean - fit.mean)) ** 2)/rate**2
        good = new.value > fit.value - 0.05
        if DEBUG: jax.debug.print("{} {} {} {}", i, new.value, moved, rate)
        new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, fit)
        rate = jnp.where(good, jnp.minimum(1.5 * rate, _DAMPING), 0.4 * rate)
        return new, jnp.where(good, moved, jnp.inf), rate, i + 1

    carry = (gaussian(start.precision, first), jnp.inf, jnp.asarray(_DAMPING), 0)
    fit, moved, _, i = jax.lax.while_loop(lambda c: (c[3] < limit) & (c[1] > tolerance), update, carry)
    return fit, i, moved


@_compiled
def _cold(structure: Structure, theta: Any, data: ModelData, mixture: Any) -> Sites:
    n, n_channels = len(data.response), len(_channels(structure))
    eta = jnp.zeros((n, n_channels))
    fun = lambda e, site: _log_likelihood(structure, e, structure.log_sigma(theta), data.log_skew_mean, site)
    W = -jax.vmap(jax.hessian(fun))(eta, (data.response, data.base, mixture))
    values, vectors = jnp.linalg.eigh(W)
    W = (vectors * jnp.maximum(values, 0.0)[:, None]) @ jnp.swapaxes(vectors, 1, 2)
    return Sites(eta, eta, W)


def _pull(blocks: list[Block], slopes: Any) -> Any:
    return jnp.concatenate([columns.T @ slopes[:, c] for c, _, columns in blocks])


@_compiled
def _slope(structure: Structure, theta: Any, data: ModelData, mixture: Any, fit: Fit) -> Any:
    inverse = _inverse(fit.factor)
    n_channels = len(_channels(structure))

    def moments(theta: Any) -> Any:
        blocks = _blocks(structure, theta, data)
        spread = _fields(blocks, inverse.T, n_channels)
        return _fields(blocks, fit.mean, n_channels), jnp.einsum("ncm,ndm->ncd", spread, spread)

    (eta, covariance), back = jax.vjp(moments, theta)
    _, by_sigma, slope, curvature = _expectations(structure, theta, data, mixture, eta, covariance)
    return back((slope, 0.5 * curvature))[0].at[0].add(jnp.sum(by_sigma))


# The hyperparameters


class Marginal:
    r"""The bound as a function of the scores t: :math:`\theta_j = F_j^{-1}(\Phi(t_j))`."""

    def __init__(self, structure: Structure, data: ModelData, mixture: FloatArray) -> None:
        self.structure, self.data, self.mixture = structure, data, mixture
        n, n_channels = len(mixture), len(_channels(structure))
        self.sites = Sites(np.zeros((n, n_channels)), np.zeros((n, n_channels)), np.zeros((n, n_channels, n_channels)))
        self.steps = 0
        self.calls = 0

    def theta(self, scores: FloatArray) -> FloatArray:
        """Hyperparameters (..., H) of scores."""
        p = stats.norm.cdf(np.clip(scores, -_BOUND, _BOUND))
        names = self.structure.hyperparameters
        priors = [self.data.priors[name.removeprefix("log_")] for name in names]
        return np.log(np.stack([prior.quantile(p[..., j]) for j, prior in enumerate(priors)], -1))

    def fit(self, theta: FloatArray, start: Sites, tolerance: float, limit: int = _LIMIT) -> Fit:
        with jax.enable_x64(True):
            if start is None: start = _cold(self.structure, theta, self.data, self.mixture)
            out = _fit(self.structure, theta, self.data, self.mixture, start, tolerance, limit)
            out = jax.tree.map(np.asarray, jax.device_get(out))
        self.steps += int(out[1]); self.calls += 1
        return out[0]

    def value_and_slope(self, scores: FloatArray, start=None) -> tuple[float, FloatArray]:
        h = 1e-4
        thetas = self.theta(scores + h * np.array([0.0, -1.0, 1.0])[:, None])
        fit = self.fit(thetas[0], self.sites if start is None else start, 1e-4)
        if not np.isfinite(fit.value):
            return -1e10, np.zeros(len(scores)), fit.sites
        if start is None:
            self.sites = fit.sites
        with jax.enable_x64(True):
            slope = np.asarray(_slope(self.structure, thetas[0], self.data, self.mixture, fit))
        return float(fit.value) - 0.5 * scores @ scores, slope * (thetas[2] - thetas[1]) / (2 * h) - scores, fit.sites
