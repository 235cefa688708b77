r"""A stand-in for the posterior of step 2's hyperparameters, given each of many mixtures.

Hyperparameters are taken by scores *t*, standard normal under the prior, and places in steps
:math:`\tau` of a law around the peak (`bne.split_t`). The log posterior density of the scores is
interpolated between the points of a design by

.. math:: -\tfrac12\tau^TQ\tau + \beta_0 + b^T\tau + \sum_j \beta_j\,k(\tau, \tau_j)

with a Matern-5/2 function *k* and a curvature *Q* that all mixtures share, positive definite: far
from all points it falls off like a normal law. The law is widened until it holds the posteriors of
all mixtures.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Executor
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from bne._compile import compiled_by_structure
from bne.evidence import Regression, all_evidence
from bne.model import ModelData, Structure, log_hyperprior
from bne.priors import ScoreMap
from bne.split_t import SplitT

__all__ = ["Candidates", "Points", "Surrogate", "build"]

FloatArray = NDArray[np.float64]
Values = tuple[FloatArray, FloatArray]

_NEAR, _WIDE = 96, 64  # points of a design: near the peak, and from the prior
_FARTHEST = 5.0  # of the near ones, in steps
_STRETCHES = 1.0, 2.0  # of the laws, each fitted better, at which the design is extended
_NODES = _NEAR * (1 + len(_STRETCHES)) + _WIDE
_NEGLIGIBLE, _FEWEST = 40.0, 60  # how far below the peak a point matters; points to keep anyway
_REACH = 3.0  # length-scale of k
_INFLATION = 1.3  # of the laws over the posterior
_SOFT = 10.0  # fall below the peak that halves the say in the curvature, roughly
_PRIOR_SHARE = 0.3  # of the candidates
_POOLED, _DISTINCT = 1000, 50  # draws to fit a law to, of which so many must be different
_SOME = 32  # mixtures by which the peak is found
_FINE = {"sigma": -2.0, "lengthscale": -1.3, "amplitude": 0.8}  # scores of a second start
_LOG_2PI = float(np.log(2.0 * np.pi))


class Points(NamedTuple):
    """Places: steps and hyperparameters (..., H), and two log densities (...) of the scores.

    That of the prior, up to a constant, and that of the law of candidates.
    """

    steps: Any
    theta: Any
    prior: Any
    law: Any


class Surrogate(NamedTuple):
    """The interpolation of S functions.

    Points of the design (J, H), in steps, the curvature (H, H) that they share, and coefficients
    (S, J + 1 + H) of their `basis`.
    """

    nodes: Any
    curvature: Any
    coefficients: Any

    def basis(self, steps: Any, xp: Any = jnp) -> tuple[Any, Any]:
        """Functions (N, J + 1 + H) of steps (N, H), and what is added to them, (N,)."""
        quadratic = -0.5 * xp.sum((steps @ self.curvature) * steps, axis=1)
        linear = xp.concatenate([xp.ones((len(steps), 1)), steps], axis=1)
        return xp.concatenate([_matern(steps, self.nodes, xp), linear], axis=1), quadratic


class Candidates:
    """The law of candidates: split t, but a share of them from the prior.

    Parameters
    ----------
    structure : Structure
    data : ModelData
    law : SplitT
        Of the scores.
    """

    def __init__(self, structure: Structure, data: ModelData, law: SplitT) -> None:
        self.structure, self.data, self.law = structure, data, law
        names = (name.removeprefix("log_") for name in structure.hyperparameters)
        self.theta = ScoreMap(data.priors[name] for name in names).theta

    def around(self, law: SplitT) -> Candidates:
        """Candidates around another law."""
        moved = copy(self)
        moved.law = law
        return moved

    def points(self, scores: FloatArray) -> Points:
        """Places at scores (..., H); beyond the largest the prior is taken for zero."""
        theta, steps = self.theta(scores), self.law.steps(scores)
        with jax.enable_x64(True):
            density = log_hyperprior(self.structure, np.moveaxis(theta, -1, 0), self.data)
        prior = np.asarray(density) + np.sum(np.log(self.theta(scores, 1)), axis=-1)
        outside = np.max(np.abs(scores), axis=-1) > ScoreMap.LARGEST
        wide = -0.5 * np.sum(scores**2 + _LOG_2PI, axis=-1) + np.log(_PRIOR_SHARE)
        near = self.law.log_density(steps) + np.log1p(-_PRIOR_SHARE)
        prior = np.where(outside, -np.inf, prior)
        return Points(steps, theta, prior, np.logaddexp(near, wide))

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Points:
        """Independent places (*shape)."""
        near = self.law.point(self.law.sample_steps(rng, shape))
        wide = rng.standard_normal(near.shape)
        return self.points(np.where(rng.random((*shape, 1)) < _PRIOR_SHARE, wide, near))


def build(
    structure: Structure, regression: Regression, rng: np.random.Generator, pool: Executor
) -> tuple[Candidates, Surrogate, FloatArray]:
    """Find the peak, the law and the surrogate; and scores (N, H) of draws under it.

    Parameters
    ----------
    structure : Structure
    regression : Regression
    rng : Generator
    pool : Executor
        Points of the design are visited side by side.
    """
    candidates = _around_the_peak(structure, regression, pool)
    visit = partial(_visit, candidates, regression, pool)
    found = visit(_near(candidates.law), _from_prior(structure))
    for stretch in _STRETCHES:
        draws = _draw(candidates, _interpolate(candidates.law, found), rng)
        if len(np.unique(draws, axis=0)) >= _DISTINCT:
            candidates = candidates.around(SplitT.of_draws(draws, inflation=_INFLATION))
        law = candidates.law
        more = visit(_near(law._replace(scales=stretch * law.scales)))
        found = np.concatenate([found[0], more[0]]), np.concatenate([found[1], more[1]])
    surrogate = _interpolate(candidates.law, found)
    return candidates, surrogate, _draw(candidates, surrogate, rng)


# The peak


@compiled_by_structure
def _average(structure: Structure, theta: Any, some: Regression) -> tuple[Any, Any]:
    """Mean log evidence of some mixtures, and its slope."""

    def density(theta: Any) -> Any:
        return jnp.mean(all_evidence(structure, theta, some))

    found: tuple[Any, Any] = jax.value_and_grad(density)(theta)
    return found


def _around_the_peak(structure: Structure, regression: Regression, pool: Executor) -> Candidates:
    """Candidates around the highest posterior density, on average over some mixtures.

    It is climbed from the middle of the prior, and from little noise around a fine structure.
    """
    h = structure.n_hyper
    blank = SplitT(np.zeros(h), np.eye(h), np.ones((2, h)))
    candidates = Candidates(structure, regression.data, blank)
    last = len(regression.residuals) - 1
    some = regression.some(np.unique(np.linspace(0, last, _SOME).round().astype(int)))

    def density(scores: FloatArray) -> tuple[float, FloatArray]:
        with jax.enable_x64(True):
            value, slope = _average(structure, candidates.theta(scores), some)
        if not np.isfinite(value) or not np.all(np.isfinite(slope)):
            return -np.inf, -scores
        slope = np.asarray(slope) * candidates.theta(scores, 1) - scores
        return float(value) - 0.5 * float(scores @ scores), slope

    kinds = [name.removeprefix("log_").partition(".")[0] for name in structure.hyperparameters]
    starts = [np.zeros(h), np.array([_FINE[kind] for kind in kinds])]
    climbs = list(pool.map(partial(_climb, density), starts))
    peak = max(climbs, key=lambda climb: climb[0])[1]
    return candidates.around(SplitT.around(peak, density, pool, inflation=_INFLATION))


def _climb(
    density: Callable[[FloatArray], tuple[float, FloatArray]], start: FloatArray
) -> tuple[float, FloatArray]:
    def descent(scores: FloatArray) -> tuple[float, FloatArray]:
        value, slope = density(scores)
        return (-value, -slope) if np.isfinite(value) else (1e10, -slope)

    found = optimize.minimize(
        descent,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(-5.0, 5.0)] * len(start),
        options={"ftol": 1e-6, "maxiter": 40},
    )
    return -float(found.fun), np.asarray(found.x)


# The design


def _sobol(n_hyper: int, count: int) -> FloatArray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # their number is no power of two
        points = stats.qmc.Sobol(n_hyper, scramble=False).random(count + 1)[1:]
    return np.clip(points, 1e-6, 1.0 - 1e-6)


def _near(law: SplitT) -> FloatArray:
    """Scores (J, H) of well-spread points of a law that are not too far out."""
    steps = law.steps_of(_sobol(len(law.centre), 2 * _NEAR))
    scores = law.point(steps)
    inside = np.max(np.abs(scores), axis=1) <= ScoreMap.LARGEST
    near = np.max(np.abs(steps), axis=1) <= _FARTHEST
    return np.asarray(scores[inside & near][:_NEAR])


def _from_prior(structure: Structure) -> FloatArray:
    """Scores (J, H) of well-spread points of the prior."""
    return np.asarray(special.ndtri(_sobol(structure.n_hyper, _WIDE)))


_evidence_at = compiled_by_structure(all_evidence)


def _visit(
    candidates: Candidates, regression: Regression, pool: Executor, *scores: FloatArray
) -> Values:
    """Scores (J, H) at which the log posterior density is finite, and it per mixture, (J, S)."""
    at = np.concatenate(scores)
    points = candidates.points(at)

    def evidence(theta: FloatArray) -> FloatArray:
        with jax.enable_x64(True):
            return np.asarray(_evidence_at(candidates.structure, theta, regression))

    values = np.stack(list(pool.map(evidence, points.theta))) + points.prior[:, None]
    usable = np.all(np.isfinite(values), axis=1)
    return at[usable], values[usable]


# The interpolation


def _interpolate(law: SplitT, found: Values) -> Surrogate:
    """Surrogate through values (J, S) at scores (J, H), but for those that hardly matter.

    Nodes are filled up to a fixed number, so that code is compiled once.
    """
    nodes, values = law.steps(found[0]), found[1]
    fall = np.min(values.max(axis=0) - values, axis=1)
    few = np.sort(fall)[min(_FEWEST, len(fall)) - 1]
    keep = fall <= max(few, _NEGLIGIBLE)
    nodes, values = nodes[keep], values[keep]
    blank = np.zeros((0, nodes.shape[1]))
    bare = Surrogate(blank, _curvature(nodes, values.mean(axis=1)), None)
    linear, quadratic = bare.basis(nodes, np)
    size, extra = linear.shape
    system = np.zeros((size + extra, size + extra))
    system[:size, :size] = _matern(nodes, nodes, np)
    system[:size, size:], system[size:, :size] = linear, linear.T
    right = np.concatenate([values - quadratic[:, None], np.zeros((extra, values.shape[1]))])
    solved = np.linalg.lstsq(system, right, rcond=1e-13)[0].T
    coefficients = np.zeros((values.shape[1], _NODES + extra))
    coefficients[:, :size], coefficients[:, _NODES:] = solved[:, :size], solved[:, size:]
    filled = np.zeros((_NODES, nodes.shape[1]))
    filled[:size] = nodes
    return Surrogate(filled, bare.curvature, coefficients)


def _curvature(steps: FloatArray, values: FloatArray) -> FloatArray:
    """Curvature (H, H) of values (J,) at steps (J, H), by those not far below the highest."""
    h = steps.shape[1]
    upper = np.triu_indices(h)
    quadratic = -0.5 * steps[:, upper[0]] * steps[:, upper[1]]
    design = np.concatenate([np.ones((len(steps), 1)), steps, quadratic], axis=1)
    weight = np.exp(0.5 * np.maximum(values - values.max(), -_NEGLIGIBLE) / _SOFT)
    fitted = np.linalg.lstsq(design * weight[:, None], values * weight, rcond=None)[0]
    found = np.zeros((h, h))
    found[upper] = fitted[1 + h :]
    eigenvalues, axes = np.linalg.eigh(0.5 * (found + found.T))
    return np.asarray((axes * np.maximum(eigenvalues, _INFLATION**2)) @ axes.T)


def _matern(steps: Any, nodes: Any, xp: Any) -> Any:
    squared = xp.sum((steps[:, None] - nodes) ** 2, axis=2)
    t = xp.sqrt(5.0 * squared + 1e-12) / _REACH
    return (1.0 + t + t * t / 3.0) * xp.exp(-t)


def _draw(candidates: Candidates, surrogate: Surrogate, rng: np.random.Generator) -> FloatArray:
    """Scores (N, H), each a draw given one of the mixtures, under a surrogate."""
    points = candidates.sample(rng, (_POOLED,))
    some = rng.integers(0, len(surrogate.coefficients), _POOLED)
    basis, quadratic = surrogate.basis(points.steps, np)
    value = surrogate.coefficients[some] @ basis.T + quadratic - points.law
    value = np.where(np.isfinite(points.prior), value, -np.inf)
    weights = np.exp(value - value.max(axis=1, keepdims=True))
    share = np.cumsum(weights, axis=1) / weights.sum(axis=1, keepdims=True)
    chosen = np.minimum(np.sum(share < rng.random((_POOLED, 1)), axis=1), _POOLED - 1)
    return candidates.law.point(points.steps[chosen])
