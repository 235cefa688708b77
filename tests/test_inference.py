"""The sampler: reproducible, compiled once, and right where the posterior is known exactly."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache

import jax
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from bne import hmc, inference, model, starts
from bne._convergence import ess_bulk
from bne.adaptation import Linearised, dense_part, first_metric, learn_metric
from bne.inference import Draws, Settings
from bne.kernels import Kernel
from bne.priors import half_normal, inverse_gamma, inverse_gamma_between, log_normal
from bne.site_processes import Exact
from calibration import positions_of, scalars_of
from test_calibration import make_problem

FloatArray = NDArray[np.float64]
BRIEF = Settings(chains=4, draws=30, warmup=160, thin=2)


def dispersed(structure, data, chains, seed=0):
    data = data.non_centred(structure)
    with jax.enable_x64(True):
        prior = model.sample_prior(structure, data, np.random.default_rng(seed), chains)
    return starts.overdispersed(prior, structure)


def run(structure, data, mixtures, settings=BRIEF, seed=1) -> Draws:
    start = dispersed(structure, data, settings.chains)
    return inference.sample(structure, data, mixtures, start, settings, seed)


def assert_same(a: Draws, b: Draws) -> None:
    np.testing.assert_array_equal(a.hyper, b.hyper)
    np.testing.assert_array_equal(a.trend, b.trend)
    for name in a.gamma:
        np.testing.assert_array_equal(a.gamma[name], b.gamma[name])
    for name in a.stats:
        np.testing.assert_array_equal(a.stats[name], b.stats[name])


# A linear-Gaussian problem, in dense NumPy that shares no code with the package


@dataclass(frozen=True)
class ExactPosterior:
    """Moments of delta (S, n) and of the log hyperparameters (S, 3), one row per mixture."""

    mean: FloatArray
    sd: FloatArray
    hyper_mean: FloatArray
    hyper_sd: FloatArray


def half_normal_log(u, scale):
    return stats.halfnorm(scale=scale).logpdf(np.exp(u)) + u


def quadrature(x, response, mixtures, *, alpha, beta, count=(20, 32, 24)) -> ExactPosterior:
    r"""Dense Gaussian process regression, integrated over a grid of hyperparameters.

    :math:`\sigma, a \sim` HalfNormal(1), :math:`l \sim` InverseGamma(alpha, beta), Matern-3/2.
    """
    law = stats.invgamma(alpha, scale=beta)
    log_l = np.linspace(*np.log(law.ppf([1e-5, 1.0 - 2e-4])), count[0])
    log_a, log_s = np.linspace(-8.0, 1.5, count[1]), np.linspace(-4.0, 1.0, count[2])
    gaps = np.sqrt(3.0) * np.abs(x[:, None] - x)
    residual = response - mixtures
    variance = np.exp(2.0 * log_s)[None, :, None]
    evidence, means, covs = [], [], []
    for u in log_l:
        r = gaps * np.exp(-u)
        eigenvalues, vectors = np.linalg.eigh((1.0 + r) * np.exp(-r))
        signal = np.exp(2.0 * log_a)[:, None, None] * np.maximum(eigenvalues, 0.0)
        total = signal + variance  # (a, sigma, n)
        rotated = residual @ vectors
        fit = np.einsum("asn,mn->mas", 1.0 / total, rotated**2)
        prior = law.logpdf(np.exp(u)) + u + half_normal_log(log_a, 1.0)[:, None]
        prior = prior + half_normal_log(log_s, 1.0)
        evidence.append(prior - 0.5 * fit - 0.5 * np.log(total).sum(axis=-1))
        means.append((signal / total, vectors))
        covs.append(signal * variance / total)
    log_p = np.stack(evidence, axis=1)  # (S, l, a, sigma)
    p = np.exp(log_p - log_p.max(axis=(1, 2, 3), keepdims=True))
    p /= p.sum(axis=(1, 2, 3), keepdims=True)
    first = np.zeros_like(residual)
    second = np.zeros_like(residual)
    for i, ((gain, vectors), cov) in enumerate(zip(means, covs, strict=True)):
        rotated = residual @ vectors
        weight = p[:, i].reshape(len(p), -1)
        gain, cov = gain.reshape(-1, len(x)), cov.reshape(-1, len(x))
        first += ((weight @ gain) * rotated) @ vectors.T
        # E[(V g*r)_j^2] = sum_kl V_jk V_jl r_k r_l E[g_k g_l], with E over the grid
        cross = (weight @ (gain[:, :, None] * gain[:, None, :]).reshape(len(gain), -1)).reshape(
            len(p), len(x), len(x)
        )
        cross *= rotated[:, :, None] * rotated[:, None, :]
        second += np.einsum("jk,mkl,jl->mj", vectors, cross, vectors, optimize=True)
        second += (weight @ cov) @ (vectors**2).T
    grids = (log_s[None, None, None, :], log_a[None, None, :, None], log_l[None, :, None, None])
    hyper_mean = np.stack([(p * g).sum(axis=(1, 2, 3)) for g in grids], axis=1)
    hyper_square = np.stack([(p * g**2).sum(axis=(1, 2, 3)) for g in grids], axis=1)
    return ExactPosterior(
        first, np.sqrt(second - first**2), hyper_mean, np.sqrt(hyper_square - hyper_mean**2)
    )


@dataclass(frozen=True)
class Regression:
    """Data, mixtures, and the exact posterior given each of them."""

    structure: model.Structure
    data: model.ModelData
    mixtures: FloatArray
    exact: ExactPosterior


@cache
def regression(count: int, spread: float = 0.1) -> Regression:
    """Step 2 at twenty-six sites, with smooth random mixtures as if from step 1."""
    rng = np.random.default_rng(8)
    x = np.sort(rng.uniform(0.0, 18.0, 26))
    response = np.sin(x) + 0.4 * np.cos(0.4 * x) + 0.2 * rng.standard_normal(len(x))
    waves = np.stack([np.ones_like(x), np.sin(0.3 * x), np.cos(0.3 * x)])
    mixtures = 0.5 * np.sin(x) + spread * rng.standard_normal((count, 3)) @ waves
    alpha, beta = 2.5, 7.0
    representation = Exact.build(Kernel("matern32"), x[:, None], 0.3, 60.0)
    structure = model.Structure((model.Process("residual", 1, len(x)),), 1)
    data = model.ModelData(
        response=response,
        base=np.zeros((len(x), 1)),
        trend=np.zeros((len(x), 0)),
        features=representation.features(x[:, None]),
        representation=representation,
        priors={
            "sigma": half_normal(1.0),
            "amplitude.residual": half_normal(1.0),
            "lengthscale.residual": inverse_gamma(alpha, beta),
        },
    )
    exact = quadrature(x, response, mixtures, alpha=alpha, beta=beta)
    return Regression(structure, data, mixtures, exact)


def residual_at_sites(problem: Regression, draws: Draws) -> FloatArray:
    """Delta (chain, draw, n) at the sites, from the coefficients."""
    log_l = draws.value("log_lengthscale.residual").reshape(-1)
    factors = problem.data.features
    gamma = draws.gamma["residual"].reshape(len(log_l), -1)
    nodes = problem.data.representation.nodes
    with jax.enable_x64(True):
        values = np.concatenate(
            [
                np.asarray(nodes.evaluate(factors, u, g))
                for u, g in zip(np.array_split(log_l, 20), np.array_split(gamma, 20), strict=True)
            ]
        )
    return values.reshape(*draws.hyper.shape[:2], -1)


# Reproducible, and compiled once


def test_the_seed_decides_the_draws():
    problem = regression(BRIEF.chains * BRIEF.draws)
    first = run(problem.structure, problem.data, problem.mixtures, seed=1)
    assert_same(first, run(problem.structure, problem.data, problem.mixtures, seed=1))
    other = run(problem.structure, problem.data, problem.mixtures, seed=2)
    assert not np.any(first.hyper == other.hyper)


@pytest.mark.parametrize("cores", [1, 64, None])
def test_the_number_of_cores_does_not_change_the_draws(monkeypatch, cores):
    problem = regression(BRIEF.chains * BRIEF.draws)
    here = run(problem.structure, problem.data, problem.mixtures)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert_same(here, run(problem.structure, problem.data, problem.mixtures))


@pytest.mark.parametrize(
    "step",
    [
        "step1",
        "step2",
        pytest.param("step3", marks=pytest.mark.slow),
        pytest.param("joint", marks=pytest.mark.slow),
    ],
)
def test_a_fit_traces_the_log_density_at_most_twice(monkeypatch, step):
    traced = []

    def counting(*arguments):
        traced.append(arguments[0])
        return model.log_density(*arguments)

    problem = make_problem(step)
    data = replace(problem.data, response=problem.mixture + 0.1)
    monkeypatch.setattr(hmc, "log_density", counting)
    hmc.advance.clear_cache()
    run(problem.structure, data, problem.mixture[None])
    first = len(traced)
    assert 1 <= first <= 2
    again = replace(data, response=problem.mixture - 0.1)
    run(problem.structure, again, problem.mixture[None], seed=2)
    assert len(traced) == first, "other data of the same shape must not compile anew"


def test_draws_have_the_promised_shapes():
    problem = regression(BRIEF.chains * BRIEF.draws)
    draws = run(problem.structure, problem.data, problem.mixtures)
    n = len(problem.data.response)
    assert draws.hyper.shape == (4, 30, 3)
    assert draws.trend.shape == (4, 30, 0)
    assert draws.gamma["residual"].shape == (4, 30, 1, n)
    assert all(values.shape == (4, 60) for values in draws.stats.values())
    assert np.all(np.isfinite(draws.stats["energy"]))


# Right where the posterior is known exactly


def test_step_two_agrees_with_dense_quadrature():
    """Means within 5.5 standard errors, sds within 12 %: false alarms below 1e-5 over all sites.

    A bulk ESS of at least 1000 gives sds a standard error of about 2.2 %.
    """
    problem = regression(4)
    settings = Settings(chains=4, draws=1000, warmup=400, thin=3)
    draws = run(problem.structure, problem.data, problem.mixtures[:1], settings)
    exact = problem.exact
    for values, mean, sd in (
        (residual_at_sites(problem, draws), exact.mean[0], exact.sd[0]),
        (draws.hyper, exact.hyper_mean[0], exact.hyper_sd[0]),
    ):
        ess = ess_bulk(values)
        assert np.min(ess) > 1000
        flat = values.reshape(-1, values.shape[-1])
        assert np.all(np.abs(flat.mean(axis=0) - mean) < 5.5 * sd / np.sqrt(ess) + 0.01 * sd)
        np.testing.assert_allclose(flat.std(axis=0), sd, rtol=0.12)
    assert np.mean(draws.stats["diverging"]) < 0.005


def cut_moments(problem: Regression) -> tuple[FloatArray, FloatArray]:
    """Mean and sd (n,) of delta under the cut posterior, by the laws of total moments."""
    exact = problem.exact
    variance = np.mean(exact.sd**2, axis=0) + np.var(exact.mean, axis=0)
    return exact.mean.mean(axis=0), np.sqrt(variance)


def assert_cut(problem: Regression, delta: FloatArray) -> None:
    """Delta (S, n) has the moments of the cut posterior, each row those given its own mixture."""
    mean, sd = cut_moments(problem)
    np.testing.assert_allclose((delta.mean(axis=0) - mean) / sd, 0.0, atol=0.2)
    np.testing.assert_allclose(delta.std(axis=0), sd, rtol=0.15)
    own, others = (
        np.mean(((delta - centre) / problem.exact.sd) ** 2)
        for centre in (problem.exact.mean, np.roll(problem.exact.mean, 1, axis=0))
    )
    assert 0.85 < own < 1.25
    assert others > 1.8, "the test must tell a row from the next one"


def test_cut_posterior_has_the_total_mean_and_variance():
    """Given 800 mixtures that spread delta as much as the data leave it uncertain.

    Means within 0.2 sd and sds within 15 % are 5 standard errors of 800 draws, and the 1 or 2 %
    that three transitions leave of the last mixture.
    """
    settings = Settings(chains=4, draws=200, warmup=400, thin=3)
    problem = regression(800, spread=0.1)
    _, sd = cut_moments(problem)
    draws = run(problem.structure, problem.data, problem.mixtures, settings)
    delta = residual_at_sites(problem, draws).reshape(800, -1)
    assert_cut(problem, delta)
    average = problem.mixtures.mean(axis=0, keepdims=True)
    plugged = run(problem.structure, problem.data, average, settings)
    narrow = residual_at_sites(problem, plugged).reshape(800, -1).std(axis=0)
    assert np.mean(narrow / sd) < 0.85, "the test must tell the cut from the plug-in"


# Failures are recorded


def test_a_funnel_leaves_divergences_in_the_statistics():
    """Noise scales over many orders of magnitude, which no step size suits, and long steps."""
    problem = make_problem("step3-without-skew")
    priors = problem.data.priors | {
        "amplitude.log_scale": log_normal(10.0, 1.0),
        "lengthscale.log_scale": inverse_gamma_between(0.1, 1.0),
        "lengthscale.residual": inverse_gamma_between(0.1, 1.0),
    }
    noise = 0.1 * np.random.default_rng(0).standard_normal(26)
    response = problem.mixture + np.sin(np.linspace(0.0, 6.0, 26)) + noise
    data = replace(problem.data, priors=priors, response=response)
    settings = replace(BRIEF, draws=150, target_accept=0.6)
    draws = run(problem.structure, data, problem.mixture[None], settings)
    assert np.sum(draws.stats["diverging"]) > 0
    assert draws.stats["diverging"].dtype == bool
    assert np.all(np.isfinite(draws.hyper))


def test_positions_and_their_functions_survive_the_change_of_centring():
    """The scalars that calibration checks, from coefficients free of centring."""
    problem = make_problem("step3")
    response = problem.mixture + 0.3 * np.random.default_rng(5).standard_normal(26)
    data = replace(problem.data, response=response)
    draws = run(problem.structure, data, problem.mixture[None])
    positions = positions_of(draws, data)
    values = scalars_of(problem, data, positions)
    np.testing.assert_allclose(values[:, :7], draws.hyper.reshape(-1, 7))
    residual = values[:, list(problem.scalars).index("residual[12]")]
    features = data.features[12, : draws.gamma["residual"].shape[-1]]
    expected = draws.gamma["residual"].reshape(len(residual), -1) @ features
    np.testing.assert_allclose(residual, expected, atol=1e-9)


def test_a_metric_is_learned_from_draws_that_hardly_moved():
    """Chains that moved along one line only, some coordinates not at all, of unlike sizes."""
    structure = model.Structure((model.Process("residual", 1, 50),), 1)
    rng = np.random.default_rng(8)
    direction = np.exp(3.0 * rng.standard_normal(structure.dimension))
    direction[5:9] = 0.0
    positions = rng.standard_normal((20, 1)) * direction
    index = dense_part(structure)
    waves = np.cos(np.linspace(0.0, 10.0, 20)[:, None] * np.arange(len(index)))
    precision = 1e4 * waves.T @ waves + np.eye(len(index))
    spread = np.ones(structure.dimension)
    local = Linearised(structure, index, precision, spread, {}, waves.T)
    for found in (learn_metric(positions, local), first_metric(local)):
        unit = found.momentum @ found.block @ found.momentum.T
        np.testing.assert_allclose(unit, np.eye(len(found.block)), atol=1e-6)
