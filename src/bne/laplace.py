r"""A fast, deterministic approximation: Gaussian inside, hyperparameters outside.

Given the hyperparameters :math:`\theta`, the non-centred coefficients (with those of the trend) are
standard normal a priori, and every site sees them through a few fields :math:`\eta_i = A_i(\theta)
z`: contrasts of the weights, mean, log scale, log skewness. Their posterior is approximated by
:math:`q_\theta(z) = N(m, H^{-1})` with

.. math:: m = \sum_i A_i^T g_i, \quad H = I + \sum_i A_i^T W_i A_i, \qquad
          g_i = E_q[\nabla\ell_i(\eta_i)], \quad W_i = -E_q[\nabla^2\ell_i(\eta_i)],

:math:`\ell_i` the log likelihood of site *i*, found by damped Newton steps. With derivatives at
*m* this would be Laplace's approximation, whose log scale was off by half a posterior sd; averaged
over *q*, by a cubature of degree 5 in the fields of a single site, they give the Gaussian that is
nearest to the posterior (Opper and Archambeau, 2009), and a bound :math:`F(\theta)` of
:math:`\log p(y\mid\theta)` whose slope is cheap. As in INLA (Rue, Martino and Chopin, 2009) *F* is
maximised, explored at well-spread points in the eigenbasis of its curvature, with one scale on each
side of every axis, and the points are weighted; the axes are scores, :math:`\theta_j =
F_j^{-1}(\Phi(t_j))` with the distribution function of the prior, in which every prior is standard
normal. Draws of *z* at each point are weighted by :math:`p(y, z\mid\theta)/q_\theta(z)`, truncated
as in Ionides (2008), and resampled: that mends most of what the Gaussian misses.

With one mixture per draw (the cut posterior) all is done at their mean :math:`\bar\mu`. For a
change :math:`\Delta` of the mixture, *z* shifts by :math:`-H^{-1}A^TW\Delta` and *F* changes by
:math:`g^T\Delta - \frac12\Delta^T(W - WAH^{-1}A^TW)\Delta` (columns of the mean), exactly so for
Gaussian noise; each draw weights the points with its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from bne.inference import Draws
from bne.model import ModelData, Structure, log_prior_sd, softmax_weights
from bne.noise import emg_logpdf, normal_logpdf
from bne.processes import Dual, Exact, Hilbert

__all__ = ["approximate"]

FloatArray = NDArray[np.float64]
Part = TypeVar("Part")
Progress = Callable[[int, int], None]

_POINTS = 128
_POOL = 128
_DIRECTIONS = 64
_RATE, _LIMIT, _SLACK = 0.75, 40, 0.05
_TOLERANCE = 3e-3
_INFLATION = 1.2
_LARGEST_SCORE = 6.0
_compiled = partial(
    jax.jit,
    static_argnames=("structure",),
    compiler_options={"xla_cpu_multi_thread_eigen": False},
)


def approximate(
    structure: Structure,
    data: ModelData,
    mixtures: FloatArray,
    n_draws: int,
    seed: int,
    *,
    progress: Progress | None = None,
) -> Draws:
    r"""Approximate the posterior of one structure; the formulas stand above.

    MEASURED

    Parameters
    ----------
    structure : Structure
    data : ModelData
        With any centring.
    mixtures : (S, n)
        Mixtures at the sites: one for all draws (S = 1), or one for each (S = `n_draws`).
    n_draws : int
        Number of draws.
    seed : int
        The same seed gives the same draws.
    progress : callable, optional
        Called with the parts of the work done and their number.

    Returns
    -------
    Draws
        One chain of exchangeable draws, without statistics.
    """
    rng = np.random.default_rng([seed, 23])
    centre = mixtures.mean(axis=0)
    marginal = Marginal(structure, data.non_centred(structure), centre)
    directions, shifts = _directions(mixtures - centre, n_draws)
    size = structure.dimension - structure.n_hyper
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        meter = Meter(2 + 4 * structure.n_hyper + _POINTS, progress)
        peak = _peak(marginal, pool, meter)
        scores, log_design = _design(peak, rng, _POINTS)

        def visit(index: int) -> Candidates:
            noise = _antithetic(np.random.default_rng([seed, 29, index]), size, _POOL)
            start = peak.predict(scores[index])
            return marginal.candidates(scores[index], start, directions, noise)

        candidates = list(meter.over(pool.map(visit, range(_POINTS))))
    point, which = _choose(candidates, log_design, shifts, rng)
    z = np.stack(
        [
            candidates[i].scale * (candidates[i].z[k] + candidates[i].gain @ c)
            for i, k, c in zip(point, which, shifts, strict=True)
        ]
    )
    return _as_draws(structure, marginal.theta(scores)[point], z)


class Meter:
    """Counts the parts of the work that are done."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self.progress = progress
        self.done = 0

    def over(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Pass on `parts`, counting."""
        for part in parts:
            self.done += 1
            if self.progress is not None:
                self.progress(self.done, self.total)
            yield part


# The hyperparameters (NumPy)


class Marginal:
    r"""Log density of the scores t: the bound at :math:`\theta(t)` minus :math:`|t|^2/2`."""

    def __init__(self, structure: Structure, data: ModelData, mixture: FloatArray) -> None:
        self.structure = structure
        self.data = data
        self.mixture = mixture

    def theta(self, scores: FloatArray) -> FloatArray:
        """Hyperparameters (..., H) of scores (..., H)."""
        p = special.ndtr(np.clip(scores, -_LARGEST_SCORE, _LARGEST_SCORE))
        names = [name.removeprefix("log_") for name in self.structure.hyperparameters]
        values = [self.data.priors[name].quantile(p[..., j]) for j, name in enumerate(names)]
        return np.log(np.stack(values, axis=-1))

    def fit(self, scores: FloatArray, start: Sites | None) -> tuple[float, Fit]:
        """Value, and the Gaussian, at scores (H,); from the sites `start` or from none."""
        theta = self.theta(scores)
        with jax.enable_x64(True):
            if start is None:
                start = _cold(self.structure, theta, self.data, self.mixture)
            found = _fit(self.structure, theta, self.data, self.mixture, start, _TOLERANCE)
            fit: Fit = jax.tree.map(np.asarray, found)
        value = float(fit.value) - 0.5 * float(scores @ scores)
        return (value if np.isfinite(value) else -np.inf), fit

    def slope(self, scores: FloatArray, fit: Fit) -> FloatArray:
        """Slope (H,) in the scores."""
        theta, below, above = self.theta(scores + np.array([[0.0], [-1e-4], [1e-4]]))
        with jax.enable_x64(True):
            slope = np.asarray(_slope(self.structure, theta, self.data, fit))
        return np.asarray(slope * (above - below) / 2e-4 - scores)

    def candidates(
        self, scores: FloatArray, start: Sites, directions: FloatArray, noise: FloatArray
    ) -> Candidates:
        """Draws of the Gaussian at scores (H,), and their weights before the design's."""
        _, fit = self.fit(scores, start)
        theta = self.theta(scores)
        with jax.enable_x64(True):
            found = _candidates(
                self.structure, theta, self.data, self.mixture, fit, directions, noise
            )
            candidates: Candidates = jax.tree.map(np.asarray, found)
        log_ratio = np.where(np.isfinite(candidates.log_ratio), candidates.log_ratio, -np.inf)
        return candidates._replace(log_ratio=log_ratio - 0.5 * scores @ scores)


class Peak(NamedTuple):
    """Where the scores are most likely, and how the density falls off from there.

    `scores` (H,), the `sites` there, their `drift` with each score, and the posterior's `axes`
    (H, H) with a scale below and above along each, (H, 2).
    """

    scores: FloatArray
    sites: Sites
    drift: Sites
    axes: FloatArray
    scales: FloatArray

    def predict(self, scores: FloatArray) -> Sites:
        """Sites at other scores, to the first order."""
        change = scores - self.scores
        moved = (
            s + np.tensordot(change, d, 1) for s, d in zip(self.sites, self.drift, strict=True)
        )
        return Sites(*moved)


def _climb(marginal: Marginal, start: FloatArray) -> tuple[float, FloatArray, FloatArray, Sites]:
    """BFGS from `start`: value, scores, their rough sds, and the sites."""
    value, fit = marginal.fit(start, None)
    best = [value, start, fit.sites]

    def descent(scores: FloatArray) -> tuple[float, FloatArray]:
        value, fit = marginal.fit(scores, best[2])
        if not np.isfinite(value):
            return 1e10, np.zeros(len(scores))
        if value > best[0]:
            best[:] = [value, scores, fit.sites]
        return -value, -marginal.slope(scores, fit)

    options = {"gtol": 0.1, "maxiter": 30}
    found = optimize.minimize(descent, start, jac=True, method="BFGS", options=options)
    return best[0], best[1], np.sqrt(np.diag(found.hess_inv)), best[2]


def _starts(structure: Structure) -> list[FloatArray]:
    """Prior medians, and functions that vary more and faster around less noise.

    From the first alone an explanation of the data without the fine structure may be found.
    """
    flexible = [0.35 if "amplitude" in name else -0.5 for name in structure.hyperparameters]
    return [np.zeros(structure.n_hyper), np.array(flexible)]


def _peak(marginal: Marginal, pool: ThreadPoolExecutor, meter: Meter) -> Peak:
    """Find the maximum and measure its curvature, sides and the drift of the sites."""
    climbs = list(meter.over(pool.map(partial(_climb, marginal), _starts(marginal.structure))))
    top, scores, rough, sites = max(climbs, key=lambda climb: climb[0])
    steps = np.diag(np.clip(0.7 * rough, 0.05, 0.7))

    def nearby(step: FloatArray) -> tuple[FloatArray, Sites]:
        _, fit = marginal.fit(scores + step, sites)
        return marginal.slope(scores + step, fit), fit.sites

    pairs = list(meter.over(pool.map(nearby, [*steps, *-steps])))
    width = 2.0 * np.diag(steps)
    n_hyper = len(scores)
    above, below = pairs[:n_hyper], pairs[n_hyper:]
    curvature = np.array(
        [(b - a) / w for (a, _), (b, _), w in zip(above, below, width, strict=True)]
    )
    changes = [
        jax.tree.map(lambda a, b, w=w: (a - b) / w, a, b)
        for (_, a), (_, b), w in zip(above, below, width, strict=True)
    ]
    drift = Sites(*(np.stack(parts) for parts in zip(*changes, strict=True)))
    values, axes = np.linalg.eigh(0.5 * (curvature + curvature.T))
    peak = Peak(scores, sites, drift, axes, 1.0 / np.sqrt(np.maximum(values, 0.5)))
    return _sides(marginal, top, peak, pool, meter)


def _sides(
    marginal: Marginal, top: float, peak: Peak, pool: ThreadPoolExecutor, meter: Meter
) -> Peak:
    r"""Scale on either side of each axis, :math:`c/\sqrt{2\,\mathrm{drop}}` for a step of c = 1.5."""
    ends = 1.5 * (peak.axes * peak.scales).T

    def drop(step: FloatArray) -> float:
        scores = peak.scores + step
        return top - marginal.fit(scores, peak.predict(scores))[0]

    drops = np.array(list(meter.over(pool.map(drop, [*-ends, *ends])))).reshape(2, -1)
    stretch = np.clip(1.5 / np.sqrt(2.0 * np.maximum(drops, 1e-3)), 0.5, 2.0)
    return peak._replace(scales=(peak.scales * stretch).T)


def _design(peak: Peak, rng: np.random.Generator, count: int) -> tuple[FloatArray, FloatArray]:
    """Scores (N, H) of a shifted Sobol sequence on the split normal, and their log density."""
    n_hyper = len(peak.scores)
    sobol = stats.qmc.Sobol(n_hyper, scramble=False).random(count)
    uniform = np.clip((sobol + rng.random(n_hyper)) % 1.0, 1e-6, 1.0 - 1e-6)
    normal = special.ndtri(uniform)
    scales = _INFLATION * np.where(normal < 0.0, peak.scales[:, 0], peak.scales[:, 1])
    return peak.scores + (normal * scales) @ peak.axes.T, -0.5 * np.sum(normal**2, axis=1)


# Draws (NumPy)


class Candidates(NamedTuple):
    """Draws at one point of the design, and how they answer to a change of the mixture.

    Coefficients `z` (D, M) with the prior sds `scale` (M,), log weights `log_ratio` (D,); for
    shifts c along the directions: log weight + `linear` c - c `quadratic` c / 2, z + `gain` c.
    """

    z: Any
    scale: Any
    log_ratio: Any
    linear: Any
    quadratic: Any
    gain: Any


def _directions(changes: FloatArray, n_draws: int) -> tuple[FloatArray, FloatArray]:
    """Principal directions (n, R) of changes (S, n) and their scores (n_draws, R), R fixed."""
    n = changes.shape[1]
    directions, shifts = np.zeros((n, _DIRECTIONS)), np.zeros((n_draws, _DIRECTIONS))
    if len(changes) > 1:
        left, size, right = np.linalg.svd(changes, full_matrices=False)
        kept = min(len(size), _DIRECTIONS)
        directions[:, :kept] = right[:kept].T
        shifts[:, :kept] = left[:, :kept] * size[:kept]
    return directions, shifts


def _antithetic(rng: np.random.Generator, size: int, count: int) -> FloatArray:
    half = rng.standard_normal((size, count // 2))
    return np.concatenate([half, -half], axis=1)


def _truncated(log_weights: FloatArray) -> FloatArray:
    """Weights that sum to one, none above the square root of their number times their mean."""
    weights = np.exp(log_weights - log_weights.max())
    weights = np.minimum(weights, weights.mean() * np.sqrt(weights.size))
    return np.asarray(weights / weights.sum())


def _choose(
    candidates: list[Candidates],
    log_design: FloatArray,
    shifts: FloatArray,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Point of the design and candidate there, for every draw: stratified resampling."""
    weights = _truncated(np.stack([c.log_ratio for c in candidates]) - log_design[:, None])
    own = np.stack([_answer(c, shifts) for c in candidates], axis=1)
    own = np.exp(own - own.max(axis=1, keepdims=True)) * weights.sum(axis=1)
    own = np.minimum(own, own.mean(axis=1, keepdims=True) * np.sqrt(own.shape[1]))
    upper = np.cumsum(own, axis=1) / own.sum(axis=1, keepdims=True)
    n_draws = len(shifts)
    level = rng.permutation((np.arange(n_draws) + rng.random(n_draws)) / n_draws)
    point = np.minimum(np.sum(upper < level[:, None], axis=1), len(candidates) - 1)
    rows = np.arange(n_draws)
    lower = np.where(point > 0, upper[rows, point - 1], 0.0)
    rest = (level - lower) / (upper[rows, point] - lower)
    within = np.cumsum(weights, axis=1)[point]
    which = np.sum(within < rest[:, None] * within[:, -1:], axis=1)
    return point, np.minimum(which, weights.shape[1] - 1)


def _answer(candidates: Candidates, shifts: FloatArray) -> FloatArray:
    """Change (S,) of the log weight of a point with the mixture."""
    curved = np.sum((shifts @ candidates.quadratic) * shifts, axis=1)
    return np.asarray(shifts @ candidates.linear - 0.5 * curved)


def _as_draws(structure: Structure, hyper: FloatArray, latent: FloatArray) -> Draws:
    trend, start, gamma = latent[:, : structure.n_trend], structure.n_trend, {}
    for process in structure.processes:
        end = start + process.copies * process.size
        shape = (1, len(latent), process.copies, process.size)
        gamma[process.name] = latent[:, start:end].reshape(shape)
        start = end
    return Draws(structure, hyper[None], trend[None], gamma)


# The Gaussian given the hyperparameters (JAX)


class Sites(NamedTuple):
    """What q knows of the sites: fields (n, C), expected slopes (n, C), precisions W (n, C, C)."""

    eta: Any
    slope: Any
    precision: Any


class Fit(NamedTuple):
    """The Gaussian given theta: mean (M,), Cholesky factor of H (M, M), and the bound F.

    `wanted` holds the precisions that the mean curvature under q asks for, `by_sigma` the slope of
    the bound in log sigma at fixed fields.
    """

    mean: Any
    factor: Any
    sites: Sites
    wanted: Any
    by_sigma: Any
    value: Any


class Block(NamedTuple):
    """Coefficients at `place` act on the field `channel` through `columns` (n, size)."""

    channel: int
    place: slice
    columns: Any


def _channels(structure: Structure) -> tuple[str, ...]:
    """Names of the fields of a site."""
    if "weights" in structure:
        names = [f"weights{j}" for j in range(structure.n_models - 1)]
        names += ["residual"] if "residual" in structure or structure.n_trend else []
    else:
        names = ["residual"]
    return (*names, *(name for name in ("log_scale", "log_skew") if name in structure))


def _blocks(structure: Structure, theta: Any, data: ModelData) -> list[Block]:
    channels, start, found = _channels(structure), structure.n_trend, []
    if structure.n_trend:
        found.append(Block(channels.index("residual"), slice(0, start), data.trend))
    for process in structure.processes:
        columns = _columns(data, structure.log_lengthscale(theta, process.name), process.size)
        columns = columns * jnp.exp(log_prior_sd(structure, theta, data, process))
        for copy in range(process.copies):
            name = f"weights{copy}" if process.name == "weights" else process.name
            place = slice(start, start + process.size)
            found.append(Block(channels.index(name), place, columns))
            start += process.size
    return found


def _columns(data: ModelData, log_lengthscale: Any, size: int) -> Any:
    """Fields (n, size) of unit coefficients; the first two cases save a product with identity."""
    known = data.representation
    if isinstance(known, Hilbert):
        return data.features[:, :size]
    if isinstance(known, Dual | Exact):
        return jnp.tensordot(known.nodes.interpolation(log_lengthscale[None])[0], data.features, 1)
    eye = jnp.eye(size, known.n_coefficients)
    return known.evaluate(data.features, jnp.full(size, log_lengthscale), eye).T


def _fields(blocks: list[Block], coefficients: Any, shape: tuple[int, int]) -> Any:
    """Fields (n, C, ...) of coefficients (M, ...)."""
    n, n_channels = shape
    fields = [jnp.zeros((n, *coefficients.shape[1:]))] * n_channels
    for channel, place, columns in blocks:
        fields[channel] = fields[channel] + columns @ coefficients[place]
    return jnp.stack(fields, 1)


def _pull(blocks: list[Block], slopes: Any) -> Any:
    """The transpose of `_fields`: (n, C, ...) to (M, ...)."""
    parts = [columns.T @ slopes[:, channel] for channel, _, columns in blocks]
    return jnp.concatenate([jnp.zeros((0, *slopes.shape[2:])), *parts])


def _assemble(blocks: list[Block], precision: Any, size: int) -> Any:
    """Lower triangle of H."""
    H = jnp.eye(size)
    for i, (c, rows, left) in enumerate(blocks):
        for d, columns, right in blocks[: i + 1]:
            H = H.at[rows, columns].add((left * precision[:, c, d, None]).T @ right)
    return H


def _factor(blocks: list[Block], precision: Any, size: int) -> tuple[Any, Any]:
    """Factor of H and the precisions it stands for: convex ones where H would be indefinite."""

    def attempt(precision: Any) -> tuple[Any, Any]:
        H = _assemble(blocks, precision, size)
        return jnp.linalg.cholesky(H, symmetrize_input=False), precision

    factor, _ = attempt(precision)
    definite = jnp.all(jnp.isfinite(factor))
    return jax.lax.cond(definite, lambda p: (factor, p), lambda p: attempt(_convex(p)), precision)


def _convex(precision: Any) -> Any:
    values, vectors = jnp.linalg.eigh(precision)
    return (vectors * jnp.maximum(values, 0.0)[..., None, :]) @ jnp.swapaxes(vectors, -1, -2)


def _log_likelihood(
    structure: Structure, data: ModelData, site: Any, eta: Any, log_sigma: Any
) -> Any:
    """Log likelihood of one `site` (response, predictions of the base models, mixture)."""
    response, base, mean = site
    at = dict(zip(_channels(structure), eta, strict=True))
    if "weights" in structure:
        mean = base @ softmax_weights(eta[: structure.n_models - 1], structure.n_models)
    residual = response - mean - at.get("residual", 0.0)
    log_scale = log_sigma + at.get("log_scale", 0.0)
    if "log_skew" in structure:
        return emg_logpdf(residual, log_scale, data.log_skew_mean + at["log_skew"])
    return normal_logpdf(residual, log_scale)


def _cubature(dim: int) -> tuple[FloatArray, FloatArray]:
    """Nodes (Q, dim) and weights of degree 5 for a standard normal (Stroud, 1971)."""
    axes = np.sqrt(3.0) * np.eye(dim)
    pairs = [s * axes[i] + t * axes[j] for i in range(dim) for j in range(i)
             for s in (-1, 1) for t in (-1, 1)]  # fmt: skip
    nodes = np.concatenate([np.zeros((1, dim)), -axes, axes, np.reshape(pairs, (-1, dim))])
    weights = np.full(len(nodes), 1.0 / 36.0)
    weights[0] = (dim * dim - 7 * dim + 18) / 18.0
    weights[1 : 2 * dim + 1] = (4 - dim) / 18.0
    return nodes, weights


def _expectations(
    structure: Structure, theta: Any, data: ModelData, mixture: Any, eta: Any, covariance: Any
) -> Any:
    """Means over q of the sites' log likelihood, its slopes (fields; log sigma) and curvature."""
    n_channels = eta.shape[1]
    nodes, weights = _cubature(n_channels)
    root = jnp.linalg.cholesky(covariance + 1e-12 * jnp.eye(n_channels))

    def one(eta: Any, root: Any, site: Any) -> Any:
        density = jax.value_and_grad(partial(_log_likelihood, structure, data, site), (0, 1))

        def at(node: Any, weight: Any) -> Any:
            def push(eta: Any) -> Any:
                return density(eta, structure.log_sigma(theta))

            def along(direction: Any) -> Any:
                return jax.jvp(push, (eta + root @ node,), (direction,))

            (value, (slope, by_sigma)), (_, (curvature, _)) = jax.vmap(
                along, out_axes=((None, None), 0)
            )(jnp.eye(n_channels))
            terms = (value, slope, by_sigma, curvature)
            return jax.tree.map(lambda term: weight * term, terms)

        return jax.tree.map(lambda terms: jnp.sum(terms, axis=0), jax.vmap(at)(nodes, weights))

    return jax.vmap(one)(eta, root, (data.response, data.base, mixture))


@_compiled
def _fit(
    structure: Structure, theta: Any, data: ModelData, mixture: Any, start: Sites, tolerance: Any
) -> Fit:
    """Newton steps from `start`, damped so that the bound rises, until q moves by `tolerance`."""
    blocks, shape = _blocks(structure, theta, data), (len(data.response), len(_channels(structure)))
    size = structure.dimension - structure.n_hyper

    def gaussian(old: Fit, rate: Any, first: Any) -> tuple[Fit, Any]:
        sites = old.sites
        mixed = (1 - rate) * sites.precision + rate * old.wanted
        factor, precision = _factor(blocks, mixed, size)
        pseudo = first * jnp.einsum("ncd,nd->nc", precision, sites.eta)
        step = rate * _solve(factor, _pull(blocks, sites.slope + pseudo) - old.mean)
        mean, inverse = old.mean + step, _inverse(factor)
        eta, covariance = _moments(blocks, mean, inverse, shape)
        value, slope, by_sigma, curvature = _expectations(
            structure, theta, data, mixture, eta, covariance
        )
        bound = jnp.sum(value) - 0.5 * (mean @ mean + jnp.sum(inverse**2) - size)
        bound = bound - jnp.sum(jnp.log(jnp.diag(factor)))
        new = Fit(mean, factor, Sites(eta, slope, precision), -curvature, jnp.sum(by_sigma), bound)
        return new, jnp.sum((factor.T @ step) ** 2) / rate**2

    def update(carry: Any) -> Any:
        fit, _, rate, i = carry
        first = jnp.where(i == 0, 1.0, 0.0)
        new, moved = gaussian(fit, jnp.where(i == 0, 1.0, rate), first)
        better = new.value > fit.value - _SLACK
        fit = jax.tree.map(lambda a, b: jnp.where(better, a, b), new, fit)
        moved = jnp.where(better & (i > 0), moved, jnp.inf)
        rate = jnp.where(better, jnp.minimum(1.5 * rate, _RATE), 0.4 * rate)
        return fit, moved, rate, i + 1

    empty = Fit(
        jnp.zeros(size), jnp.eye(size), start, start.precision, jnp.zeros(()), jnp.array(-jnp.inf)
    )
    carry = (empty, jnp.array(jnp.inf), jnp.array(_RATE), 0)
    fit: Fit = jax.lax.while_loop(lambda c: (c[3] < _LIMIT) & (c[1] > tolerance), update, carry)[0]
    return fit


def _solve(factor: Any, right: Any) -> Any:
    return jax.scipy.linalg.cho_solve((factor, True), right)


def _inverse(factor: Any) -> Any:
    return jax.scipy.linalg.solve_triangular(factor, jnp.eye(len(factor)), lower=True)


def _moments(
    blocks: list[Block], mean: Any, inverse: Any, shape: tuple[int, int]
) -> tuple[Any, Any]:
    """Means (n, C) and covariances (n, C, C) of the fields under q."""
    spread = _fields(blocks, inverse.T, shape)
    return _fields(blocks, mean, shape), jnp.einsum("ncm,ndm->ncd", spread, spread)


@_compiled
def _slope(structure: Structure, theta: Any, data: ModelData, fit: Fit) -> Any:
    """Slope (H,) of the bound in theta: at its maximum over q, that at fixed q."""
    inverse, shape = _inverse(fit.factor), fit.sites.eta.shape

    def moments(theta: Any) -> Any:
        return _moments(_blocks(structure, theta, data), fit.mean, inverse, shape)

    _, back = jax.vjp(moments, theta)
    slope = back((fit.sites.slope, -0.5 * fit.wanted))[0]
    return slope.at[0].add(fit.by_sigma)


@_compiled
def _cold(structure: Structure, theta: Any, data: ModelData, mixture: Any) -> Sites:
    """Sites to begin with: no field anywhere, the curvature there."""

    def curvature(site: Any) -> Any:
        density = partial(_log_likelihood, structure, data, site)
        return jax.hessian(density)(jnp.zeros(n_channels), structure.log_sigma(theta))

    n_channels = len(_channels(structure))
    zero = jnp.zeros((len(data.response), n_channels))
    sites = (data.response, data.base, mixture)
    return Sites(zero, zero, _convex(-jax.vmap(curvature)(sites)))


@_compiled
def _candidates(
    structure: Structure,
    theta: Any,
    data: ModelData,
    mixture: Any,
    fit: Fit,
    directions: Any,
    noise: Any,
) -> Candidates:
    """Draws of q from `noise` (M, D), and the answer to mixtures along `directions` (n, R)."""
    blocks, shape = _blocks(structure, theta, data), fit.sites.eta.shape
    z = fit.mean[:, None] + jax.scipy.linalg.solve_triangular(fit.factor.T, noise)
    density = partial(_log_likelihood, structure, data)
    each = jax.vmap(jax.vmap(density, (None, 1, None)), (0, 0, None))
    sites = (data.response, data.base, mixture)
    value = jnp.sum(each(sites, _fields(blocks, z, shape), structure.log_sigma(theta)), axis=0)
    log_ratio = value + 0.5 * jnp.sum(noise**2 - z**2, axis=0)
    log_ratio = log_ratio - jnp.sum(jnp.log(jnp.diag(fit.factor)))
    scale = [jnp.ones(structure.n_trend)]
    for process in structure.processes:
        sd = jnp.exp(log_prior_sd(structure, theta, data, process))
        scale += [sd] * process.copies
    scale = jnp.concatenate(scale)
    if "weights" in structure:
        R = directions.shape[1]
        zero = jnp.zeros((len(z), R))
        return Candidates(z.T, scale, log_ratio, jnp.zeros(R), jnp.zeros((R, R)), zero)
    at = _channels(structure).index("residual")
    weighted = fit.sites.precision[:, :, at, None] * directions[:, None]
    pulled = _pull(blocks, weighted)
    shift = -_solve(fit.factor, pulled)
    curvature = directions.T @ weighted[:, at] + pulled.T @ shift
    linear = fit.sites.slope[:, at] @ directions
    return Candidates(z.T, scale, log_ratio, linear, _convex(curvature), shift)
