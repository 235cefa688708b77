r"""A fast, deterministic approximation: Gaussian inside, hyperparameters outside.

Given the hyperparameters :math:`\theta`, the non-centred coefficients *z* (and those of the trend)
are standard normal a priori, and a site sees them through a few fields :math:`\eta_i = A_i z`:
contrasts of the weights, mean, log scale, log skewness. Their posterior is approximated by
:math:`q(z) = N(m, H^{-1})`, found by damped Newton steps, with

.. math:: m = \sum_i A_i^T g_i, \quad H = I + \sum_i A_i^T W_i A_i, \qquad
          g_i = E_q[\nabla\ell_i(\eta_i)], \quad W_i = -E_q[\nabla^2\ell_i(\eta_i)].

With derivatives of the log likelihoods :math:`\ell_i` at *m* this is Laplace's approximation, which
misplaces the log scale by half a posterior sd; averaged over *q*, by a cubature of degree 5 in the
fields of each site, they give the Gaussian nearest to the posterior (Opper and Archambeau, 2009)
and a bound *F* of :math:`\log p(y\mid\theta)` with a cheap slope. As in INLA (Rue, Martino and
Chopin, 2009) *F* is maximised, then explored at well-spread points in the eigenbasis of its
curvature, each axis with a scale on either side. It works in scores :math:`t_j`, standard normal
under the prior: :math:`\theta_j = F_j^{-1}(\Phi(t_j))`. Draws of *q* at every point, weighted by
:math:`p(y, z, \theta)` over their density, truncated (Ionides, 2008), are resampled: that mends
most of what the Gaussians miss.

With a mixture for every draw (the cut posterior) all this is done at their mean. A change
:math:`\Delta` of the mixture shifts *z* by :math:`-H^{-1}A^TW\Delta` and changes *F* by
:math:`g^T\Delta - \Delta^T(W - WAH^{-1}A^TW)\Delta/2` (the mean's rows and columns of *W*), which
is exact for Gaussian noise of known scale; so every draw weights the points in its own way.
"""

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
from scipy import optimize, special, stats

from bne._compile import compiled_by_structure
from bne.inference import Draws
from bne.model import ModelData, Structure, log_prior_sd, softmax_weights
from bne.noise import emg_logpdf, normal_logpdf
from bne.priors import ScoreMap
from bne.split_t import SplitT

__all__ = ["approximate"]

FloatArray = NDArray[np.float64]
Progress = Callable[[int, int], None]

_POINTS = 256  # of the design; twice as many for more than four hyperparameters
_POOL = 128  # draws at each
_DIRECTIONS = 64  # of change of the mixture
_INFLATION = 1.3  # of the design's scales
_RATE, _SLACK, _TOLERANCE = 0.75, 0.05, 1e-2  # of the Newton steps
_LONG, _SHORT = 40, 10  # their number, where the bound is climbed and at the design


def approximate(
    structure: Structure,
    data: ModelData,
    mixtures: FloatArray,
    n_draws: int,
    seed: int,
    *,
    progress: Progress | None = None,
) -> Draws:
    r"""Approximate the posterior of one structure; the method stands at the top of the module.

    How far it is from Markov chains stands in ``docs/measured.md``: means of single functions and
    hyperparameters can be off by a few tenths of a posterior sd, their sds by up to half.

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
        Called with the number of points of the design that are done, and of all.

    Returns
    -------
    Draws
        One chain of exchangeable draws, without statistics.
    """
    rng = np.random.default_rng([seed, 23])
    centre = mixtures.mean(axis=0)
    changes = mixtures - centre if "weights" not in structure else mixtures[:1] * 0.0
    directions, shifts = _directions(changes, n_draws)
    marginal = Marginal(structure, data.non_centred(structure), centre)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        peak = _peak(marginal, pool)
        scores, log_design = _design(peak, rng)

        def visit(index: int) -> Candidates:
            point_rng = np.random.default_rng([seed, 29, index])
            return marginal.candidates(scores[index], peak, directions, point_rng)

        candidates: list[Candidates] = []
        for found in pool.map(visit, range(len(scores))):
            candidates.append(found)
            if progress is not None:
                progress(len(candidates), len(scores))
    point, which = _choose(candidates, log_design, shifts, rng)
    chosen = [candidates[i] for i in point]
    z = [c.z[k] + c.gain @ shift for c, k, shift in zip(chosen, which, shifts, strict=True)]
    return _as_draws(
        structure, marginal.theta(scores)[point], np.stack(z) * np.stack([c.scale for c in chosen])
    )


# The hyperparameters (NumPy)


class Marginal:
    """Log density of the scores t: the bound F(theta(t)) minus t't/2."""

    def __init__(self, structure: Structure, data: ModelData, mixture: FloatArray) -> None:
        self.structure = structure
        self.data = data
        self.mixture = mixture
        names = (name.removeprefix("log_") for name in structure.hyperparameters)
        self.theta = ScoreMap(data.priors[name] for name in names).theta

    def fit(self, scores: FloatArray, start: Sites | None, limit: int = _LONG) -> tuple[float, Fit]:
        """Value, and the Gaussian, at scores (H,); from the sites `start` or from none."""
        arguments = self.structure, self.theta(scores), self.data, self.mixture
        with jax.enable_x64(True):
            found = _fit(*arguments, _cold(*arguments) if start is None else start, limit)
            fit: Fit = jax.tree.map(np.asarray, found)
        value = float(fit.value) - 0.5 * float(scores @ scores)
        return (value if np.isfinite(value) else -np.inf), fit

    def slope(self, scores: FloatArray, fit: Fit) -> FloatArray:
        """Slope (H,) in the scores."""
        with jax.enable_x64(True):
            slope = np.asarray(_slope(self.structure, self.theta(scores), self.data, fit))
        return slope * self.theta(scores, 1) - scores

    def candidates(
        self, scores: FloatArray, peak: Peak, directions: FloatArray, rng: np.random.Generator
    ) -> Candidates:
        """Draws of the Gaussian at scores (H,), with the log density of both over q."""
        half = rng.standard_normal((self.structure.dimension - self.structure.n_hyper, _POOL // 2))
        _, fit = self.fit(scores, peak.predict(scores), _SHORT)
        arguments = self.structure, self.theta(scores), self.data, self.mixture
        with jax.enable_x64(True):
            found = _candidates(*arguments, fit, directions, np.hstack([half, -half]))
            found = jax.tree.map(np.asarray, found)
        usable = np.isfinite(found.log_ratio) & np.all(np.isfinite(found.z))
        log_ratio = np.where(usable, found.log_ratio - 0.5 * scores @ scores, -np.inf)
        candidates: Candidates = found._replace(log_ratio=log_ratio)
        return candidates


class Peak(NamedTuple):
    """Where the posterior of the scores is highest, and how it falls off.

    `scores` (H,), the `sites` there and their `drift` with every score, the `axes` (H, H) of the
    curvature, and a scale below and above along each, (2, H).
    """

    scores: FloatArray
    sites: Sites
    drift: Sites
    axes: FloatArray
    scales: FloatArray

    def predict(self, scores: FloatArray) -> Sites:
        """Sites at other scores, to the first order."""
        change = scores - self.scores
        return Sites(
            *(s + np.tensordot(change, d, 1) for s, d in zip(self.sites, self.drift, strict=True))
        )


def _peak(marginal: Marginal, pool: ThreadPoolExecutor) -> Peak:
    """Find the maximum and measure its curvature, its sides, and the drift of the sites."""
    climbs = pool.map(partial(_climb, marginal), _starts(marginal.structure))
    _, scores, rough, sites = max(climbs, key=lambda climb: climb[0])
    steps = np.clip(0.7 * rough, 0.02, 0.7)

    def nearby(step: FloatArray) -> tuple[FloatArray, Sites]:
        _, fit = marginal.fit(scores + step, sites)
        return marginal.slope(scores + step, fit), fit.sites

    def differences(*values: Any) -> FloatArray:
        above, below = np.split(np.stack(values), 2)
        return np.asarray((above - below) / (2.0 * steps.reshape(-1, *[1] * (above.ndim - 1))))

    found = list(pool.map(nearby, [*np.diag(steps), *np.diag(-steps)]))
    slopes, drift = jax.tree.map(differences, *found)
    values, axes = np.linalg.eigh(-0.5 * (slopes + slopes.T))
    sds = 1.0 / np.sqrt(np.maximum(values, 0.5))
    slope = np.mean([slope for slope, _ in found], axis=0)
    peak = Peak(scores, sites, drift, axes, np.stack([sds, sds]))
    return _sides(marginal, peak, axes @ (sds * np.clip(sds * (axes.T @ slope), -1.0, 1.0)), pool)


def _sides(marginal: Marginal, peak: Peak, step: FloatArray, pool: ThreadPoolExecutor) -> Peak:
    """Move the peak by a last `step`, and measure how far the density falls on either side."""
    centre = peak.scores + step
    top, fit = marginal.fit(centre, peak.predict(centre))
    if np.isfinite(top):
        peak = peak._replace(scores=centre, sites=fit.sites)
    ends = 1.5 * (peak.axes * peak.scales[:, None]) * np.array([-1.0, 1.0])[:, None, None]
    ends = peak.scores + np.concatenate(list(np.swapaxes(ends, 1, 2)))
    falls = [top - value for value, _ in pool.map(lambda t: marginal.fit(t, peak.predict(t)), ends)]
    stretch = 1.5 / np.sqrt(2.0 * np.maximum(np.reshape(falls, (2, -1)), 1e-3))
    return peak._replace(scales=peak.scales * np.clip(np.nan_to_num(stretch, nan=1.0), 0.5, 2.0))


def _starts(structure: Structure) -> list[FloatArray]:
    """Prior medians; more and faster variation around less noise; two points of the prior.

    From a single start the climb can end where noise explains what a fine structure should.
    """
    flexible = [0.7 if "amplitude" in name else -1.0 for name in structure.hyperparameters]
    sobol = stats.qmc.Sobol(structure.n_hyper, scramble=False).random(4)[2:]
    return [np.zeros(structure.n_hyper), np.array(flexible), *special.ndtri(0.15 + 0.7 * sobol)]


def _climb(marginal: Marginal, start: FloatArray) -> tuple[float, FloatArray, FloatArray, Sites]:
    """Quasi-Newton ascent from `start`: the highest value, its scores, rough sds, the sites."""
    value, fit = marginal.fit(start, None)
    best: tuple[float, FloatArray, Sites] = (value, start, fit.sites)

    def descent(scores: FloatArray) -> tuple[float, FloatArray]:
        nonlocal best
        value, fit = marginal.fit(scores, best[2])
        if not np.isfinite(value):
            return 1e10, np.zeros(len(scores))
        if value > best[0]:
            best = (value, scores.copy(), fit.sites)
        return -value, -marginal.slope(scores, fit)

    found = optimize.minimize(
        descent,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(-4.0, 4.0)] * len(start),
        options={"ftol": 1e-4, "gtol": 0.05, "maxfun": 40, "maxls": 8},
    )
    inverse: Any = found.hess_inv
    return best[0], best[1], np.sqrt(np.diag(inverse.todense())), best[2]


def _design(peak: Peak, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Scores (N, H) of a shifted Sobol sequence on split t laws, and their log density.

    Amplitudes have long lower tails, which normal laws would miss.
    """
    n_hyper = len(peak.scores)
    count = _POINTS * (1 if n_hyper <= 4 else 2)
    sobol = stats.qmc.Sobol(n_hyper, scramble=False).random(count)
    law = SplitT(peak.scores, peak.axes, _INFLATION * peak.scales)
    steps = law.steps_of(np.clip((sobol + rng.random(n_hyper)) % 1.0, 1e-6, 1.0 - 1e-6))
    return law.point(steps), law.log_density(steps)


# Draws (NumPy)


class Candidates(NamedTuple):
    """Draws at one point of the design, and their answer to shifts c along the directions.

    Coefficients `z` (D, M), whose prior sds are `scale` (M,), with `log_ratio` (D,); the log weight
    changes by ``linear @ c - c @ quadratic @ c / 2``, and z by ``gain @ c``.
    """

    z: Any
    scale: Any
    log_ratio: Any
    linear: Any
    quadratic: Any
    gain: Any


def _directions(changes: FloatArray, n_draws: int) -> tuple[FloatArray, FloatArray]:
    """Principal directions (n, R) of changes (S, n) and the shifts (n_draws, R); R is fixed."""
    directions = np.zeros((changes.shape[1], _DIRECTIONS))
    shifts = np.zeros((n_draws, _DIRECTIONS))
    if len(changes) > 1:
        left, size, right = np.linalg.svd(changes, full_matrices=False)
        kept = min(len(size), _DIRECTIONS)
        directions[:, :kept] = right[:kept].T
        shifts[:, :kept] = left[:, :kept] * size[:kept]
    return directions, shifts


def _choose(
    candidates: list[Candidates],
    log_design: FloatArray,
    shifts: FloatArray,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Point of the design, and candidate there, of every draw: stratified resampling."""
    log_weights = np.stack([c.log_ratio for c in candidates]) - log_design[:, None]
    weights = _truncated(log_weights.reshape(1, -1)).reshape(log_weights.shape)
    answers = [
        shifts @ c.linear - 0.5 * np.sum((shifts @ c.quadratic) * shifts, axis=1)
        for c in candidates
    ]
    with np.errstate(divide="ignore"):
        own = np.cumsum(_truncated(np.stack(answers, axis=1) + np.log(weights.sum(axis=1))), axis=1)
    n_draws = len(shifts)
    level = rng.permutation((np.arange(n_draws) + rng.random(n_draws)) / n_draws)
    point = np.minimum(np.sum(own <= level[:, None], axis=1), len(candidates) - 1)
    upper = own[np.arange(n_draws), point]
    lower = np.where(point > 0, own[np.arange(n_draws), point - 1], 0.0)
    rest = (level - lower) / (upper - lower)
    within = np.cumsum(weights, axis=1)[point]
    which = np.sum(within <= rest[:, None] * within[:, -1:], axis=1)
    return point, np.minimum(which, _POOL - 1)


def _truncated(log_weights: FloatArray) -> FloatArray:
    """Weights (S, N), rows summing to one, none above sqrt(N) times the mean of its row."""
    weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
    largest = weights.mean(axis=1, keepdims=True) * np.sqrt(weights.shape[1])
    weights = np.minimum(weights, largest)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _as_draws(structure: Structure, hyper: FloatArray, latent: FloatArray) -> Draws:
    n_draws, start, gamma = len(latent), structure.n_trend, {}
    for process in structure.processes:
        end = start + process.copies * process.size
        gamma[process.name] = latent[:, start:end].reshape(1, n_draws, process.copies, -1)
        start = end
    return Draws(structure, hyper[None], latent[None, :, : structure.n_trend], gamma)


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
        log_l = structure.log_lengthscale(theta, process.name)
        columns = data.representation.columns(data.features, log_l, process.size)
        columns = columns * jnp.exp(log_prior_sd(structure, theta, data, process))
        for copy in range(process.copies):
            name = f"weights{copy}" if process.name == "weights" else process.name
            place = slice(start, start + process.size)
            found.append(Block(channels.index(name), place, columns))
            start += process.size
    return found


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

    def attempt(precision: Any) -> Any:
        return jnp.linalg.cholesky(_assemble(blocks, precision, size), symmetrize_input=False)

    def mend(precision: Any) -> tuple[Any, Any]:
        return attempt(_convex(precision)), _convex(precision)

    factor = attempt(precision)
    definite = jnp.all(jnp.isfinite(factor))
    pair: tuple[Any, Any] = jax.lax.cond(definite, lambda p: (factor, p), mend, precision)
    return pair


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
) -> tuple[Any, Any, Any, Any]:
    r"""Means over q of the log likelihood, its slopes (fields; log sigma) and curvature, per site.

    The curvature needs no second derivative: for :math:`\eta = \bar\eta + Re`, *e* standard normal,
    :math:`E\,\nabla^2\ell = E[\nabla\ell\,e^T]R^{-1}` (Stein's identity).
    """
    n_channels = eta.shape[1]
    nodes, weights = _cubature(n_channels)
    root = jnp.linalg.cholesky(covariance + 1e-12 * jnp.eye(n_channels))
    places = eta[:, None] + jnp.einsum("ncd,qd->nqc", root, nodes)

    def at(site: Any, place: Any) -> Any:
        density = partial(_log_likelihood, structure, data, site)
        value, slopes = jax.value_and_grad(density, (0, 1))(place, structure.log_sigma(theta))
        return value, *slopes

    each = jax.vmap(jax.vmap(at, (None, 0)))
    value, slope, by_sigma = each((data.response, data.base, mixture), places)
    tilted = jnp.einsum("q,qd,nqc->ndc", weights, nodes, slope)
    curvature = jax.scipy.linalg.solve_triangular(root, tilted, lower=True, trans=1)
    curvature = 0.5 * (curvature + jnp.swapaxes(curvature, 1, 2))
    return value @ weights, jnp.einsum("q,nqc->nc", weights, slope), by_sigma @ weights, curvature


@compiled_by_structure
def _fit(
    structure: Structure,
    theta: Any,
    data: ModelData,
    mixture: Any,
    start: Sites,
    limit: Any,
) -> Fit:
    """Newton steps from `start`, damped so that the bound rises, until q stands."""
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
    fit: Fit = jax.lax.while_loop(lambda c: (c[3] < limit) & (c[1] > _TOLERANCE), update, carry)[0]
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


@compiled_by_structure
def _slope(structure: Structure, theta: Any, data: ModelData, fit: Fit) -> Any:
    """Slope (H,) of the bound in theta: at its maximum over q, that at fixed q."""
    inverse, shape = _inverse(fit.factor), fit.sites.eta.shape

    def moments(theta: Any) -> Any:
        return _moments(_blocks(structure, theta, data), fit.mean, inverse, shape)

    _, back = jax.vjp(moments, theta)
    slope = back((fit.sites.slope, -0.5 * fit.wanted))[0]
    return slope.at[0].add(fit.by_sigma)


@compiled_by_structure
def _cold(structure: Structure, theta: Any, data: ModelData, mixture: Any) -> Sites:
    """Sites to begin with: no field anywhere, the curvature there."""

    def curvature(site: Any) -> Any:
        density = partial(_log_likelihood, structure, data, site)
        return jax.hessian(density)(jnp.zeros(n_channels), structure.log_sigma(theta))

    n_channels = len(_channels(structure))
    zero = jnp.zeros((len(data.response), n_channels))
    sites = (data.response, data.base, mixture)
    return Sites(zero, zero, _convex(-jax.vmap(curvature)(sites)))


@compiled_by_structure
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
    at = next((i for i, name in enumerate(_channels(structure)) if name == "residual"), 0)
    weighted = fit.sites.precision[:, :, at, None] * directions[:, None]
    pulled = _pull(blocks, weighted)
    gain = -_solve(fit.factor, pulled)
    quadratic = _convex(directions.T @ weighted[:, at] + pulled.T @ gain)
    linear = fit.sites.slope[:, at] @ directions
    return Candidates(z.T, jnp.concatenate(scale), log_ratio, linear, quadratic, gain)
