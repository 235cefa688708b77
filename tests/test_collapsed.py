"""Step 2 with the residual integrated out: the same posterior, from other draws."""

from __future__ import annotations

import os
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bne import model
from bne._convergence import ess_bulk, rhat
from bne.approximation import Geometry, choose, default_lengthscales
from bne.collapsed import Collapsed, _advance, sample_collapsed
from bne.inference import Settings
from bne.kernels import Kernel
from bne.priors import half_normal
from bne.split_t import SplitT
from bne.surrogate import Surrogate
from bne.trend import Trend
from calibration import Problem, calibrate
from test_calibration import assert_calibrated, make_problem
from test_inference import assert_cut, assert_same, cut_moments, regression, residual_at_sites

LONG = Settings(chains=4, draws=4000)
BRIEF = Settings(chains=4, draws=60)


def run(problem, mixtures, settings=BRIEF, seed=3, **hooks):
    return sample_collapsed(problem.structure, problem.data, mixtures, settings, seed, **hooks)


def collapsed_instead(structure, data, mixtures, start, settings, seed):
    """`sample_collapsed` with the arguments of `bne.inference.sample`."""
    del start
    return sample_collapsed(structure, data, mixtures, settings, seed)


# Right where the posterior is known exactly


def test_it_agrees_with_dense_quadrature():
    """Means within 5.5 standard errors, sds within 12 %, as asked of Markov chains.

    The long lower tail of the log amplitude gives its sd a standard error of 5.4 % from 4,000
    independent draws (of sixteen seeds), hence 2.7 % from 16,000.
    """
    problem = regression(4)
    draws = run(problem, problem.mixtures[:1], LONG)
    exact = problem.exact
    for values, mean, sd in (
        (residual_at_sites(problem, draws), exact.mean[0], exact.sd[0]),
        (draws.hyper, exact.hyper_mean[0], exact.hyper_sd[0]),
    ):
        ess = ess_bulk(values)
        assert np.min(ess) > 6000
        assert np.max(rhat(values)) < 1.01
        flat = values.reshape(-1, values.shape[-1])
        assert np.all(np.abs(flat.mean(axis=0) - mean) < 5.5 * sd / np.sqrt(ess) + 0.01 * sd)
        np.testing.assert_allclose(flat.std(axis=0), sd, rtol=0.12)


def test_the_cut_posterior_has_the_total_mean_and_variance():
    problem = regression(800, spread=0.1)
    settings = Settings(chains=4, draws=200)
    draws = run(problem, problem.mixtures, settings)
    assert_cut(problem, residual_at_sites(problem, draws).reshape(800, -1))
    average = problem.mixtures.mean(axis=0, keepdims=True)
    narrow = (
        residual_at_sites(problem, run(problem, average, settings)).reshape(800, -1).std(axis=0)
    )
    assert np.mean(narrow / cut_moments(problem)[1]) < 0.85, "cut and plug-in must differ"


@pytest.mark.parametrize("dual", [False, True])
def test_twenty_runs_raise_no_alarm(monkeypatch, dual):
    monkeypatch.setattr("bne.inference.sample", collapsed_instead)
    settings = Settings(chains=4, draws=100)
    assert_calibrated(calibrate(make_problem("step2", dual=dual), settings, runs=20, seed=15))


@pytest.mark.slow
@pytest.mark.parametrize("dual", [False, True])
def test_three_hundred_runs_raise_no_alarm(monkeypatch, dual):
    monkeypatch.setattr("bne.inference.sample", collapsed_instead)
    settings = Settings(chains=4, draws=150)
    assert_calibrated(calibrate(make_problem("step2", dual=dual), settings, runs=300, seed=16))


def make_trend_problem(gp: str) -> Problem:
    """Step 2 with a prior mean and two hyperparameters: the amplitude of the residual is one."""
    found = make_problem("step2")
    rng = np.random.default_rng(4)
    x = np.sort(rng.uniform(-3.0, 3.0, (24, 1)), axis=0)
    base = np.column_stack([np.sin(x), 0.3 * x])
    geometry, kernel = Geometry.of(x), Kernel("matern32")
    lengthscales = {"residual": default_lengthscales(geometry, kernel)["residual"]}
    chosen = choose(gp, kernel, geometry, lengthscales)
    trend = Trend.fit("linear", x, base).columns(x, base)
    data = replace(
        found.data,
        response=np.zeros(len(x)),
        base=base,
        trend=trend,
        features=chosen.features(x),
        representation=chosen.representation,
        priors={"sigma": half_normal(1.0), "lengthscale.residual": lengthscales["residual"]},
    )
    process = model.Process("residual", 1, chosen.sizes["residual"], learned_amplitude=False)
    return Problem(model.Structure((process,), 2, trend.shape[1]), data, base[:, 0], (2, 9, 20))


@pytest.mark.parametrize("gp", ["hilbert", "exact"])
def test_a_prior_mean_and_another_representation_raise_no_alarm(monkeypatch, gp):
    monkeypatch.setattr("bne.inference.sample", collapsed_instead)
    settings = Settings(chains=4, draws=100)
    assert_calibrated(calibrate(make_trend_problem(gp), settings, runs=20, seed=17))


# Reproducible, and resumed


def test_the_seed_decides_the_draws_and_the_number_of_cores_does_not(monkeypatch):
    problem = regression(240)
    first = run(problem, problem.mixtures)
    assert first.hyper.shape == (4, 60, 3)
    assert first.trend.shape == (4, 60, 0)
    assert first.gamma["residual"].shape == (4, 60, 1, len(problem.data.response))
    other = run(problem, problem.mixtures, seed=4)
    assert not np.any(first.hyper == other.hyper)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert_same(first, run(problem, problem.mixtures))


@pytest.mark.parametrize("stop_at", [1, 2, 4])
def test_an_interrupted_run_resumes_to_the_same_draws(stop_at):
    problem = regression(240)
    whole = run(problem, problem.mixtures)
    states = []

    def stop(sampler: Collapsed) -> None:
        if sampler.block == stop_at:
            states.append(sampler.state())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(problem, problem.mixtures, after_block=stop)
    assert_same(whole, run(problem, problem.mixtures, state=states[0]))


def test_a_bad_surrogate_slows_the_chain_but_does_not_change_its_law(monkeypatch):
    """With a surrogate that is too wide and has waves of its own."""

    whole = Surrogate.basis

    def wavy(surrogate, steps, xp=jnp):
        basis, quadratic = whole(surrogate, steps, xp)
        return 0.0 * basis, 0.3 * quadratic + 0.5 * xp.sin(3.0 * steps[:, 0])

    monkeypatch.setattr(Surrogate, "basis", wavy)
    _advance.clear_cache()
    problem = regression(4)
    draws = run(problem, problem.mixtures[:1], Settings(chains=4, draws=2000), seed=5)
    _advance.clear_cache()
    assert np.mean(draws.stats["acceptance"]) < 0.7
    ess, exact = ess_bulk(draws.hyper), problem.exact
    assert np.min(ess) > 300
    gap = np.abs(draws.hyper.mean(axis=(0, 1)) - exact.hyper_mean[0])
    assert np.all(gap < 5.5 * exact.hyper_sd[0] / np.sqrt(ess) + 0.01 * exact.hyper_sd[0])


# The law that candidates come from


def test_the_split_t_law_has_the_density_that_it_says(rng):
    """Histograms of 200,000 draws along an axis, within 5 standard errors per bin."""
    angle = 0.6
    axes = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    law = SplitT(np.array([1.0, -2.0]), axes, np.array([[0.5, 1.0], [2.0, 1.0]]))
    steps = law.sample_steps(rng, (200_000,))
    along = (law.point(steps) - law.centre) @ axes
    edges = np.array([-1.5, -0.5, -0.2, 0.0, 0.5, 1.0, 3.0])
    counts = np.histogram(along[:, 0], edges)[0]
    scale = np.array([0.5, 2.0])[(edges[:-1] >= 0.0).astype(int)]
    expected = stats.t(4).cdf(edges[1:] / scale) - stats.t(4).cdf(edges[:-1] / scale)
    errors = np.sqrt(200_000 * expected * (1.0 - expected))
    assert np.all(np.abs(counts - 200_000 * expected) < 5.0 * errors)
    grid = np.array([[-0.7, 0.3], [0.4, 0.3]]) / np.array([[0.5, 1.0], [2.0, 1.0]])
    ratio = stats.t(4).pdf(grid[0, 0]) / 0.5 / (stats.t(4).pdf(grid[1, 0]) / 2.0)
    found = law.log_density(grid)
    np.testing.assert_allclose(found[0] - found[1], np.log(ratio), rtol=1e-12)


def test_a_split_t_law_finds_curvature_and_sides_of_a_density():
    """Of independent normal laws in rotated axes, one of them twice as wide above the peak."""
    axes = np.array([[0.8, -0.6], [0.6, 0.8]])
    sds, above = np.array([0.2, 0.5]), np.array([0.4, 0.5])

    def density(point):
        along = (point - 1.0) @ axes
        sd = np.where(along < 0.0, sds, above)
        return -0.5 * float(np.sum((along / sd) ** 2)), -axes @ (along / sd**2)

    class Serial:
        map = staticmethod(map)

    law = SplitT.around(np.ones(2), density, Serial(), inflation=1.0)
    order = np.argsort(law.scales.sum(axis=0))
    low, high = law.scales[:, order]
    flip = np.sign(np.sum(law.axes[:, order] * axes, axis=0))
    found = np.where(flip > 0, [low, high], [high, low])
    np.testing.assert_allclose(found, [sds, above], rtol=1e-6)


def test_a_split_t_law_fits_draws_also_where_a_side_is_empty(rng):
    draws = rng.standard_normal((20_000, 2)) * [1.0, 3.0]
    draws[:, 0] = np.where(draws[:, 0] > 0.0, 2.0, 1.0) * draws[:, 0]
    law = SplitT.of_draws(draws, inflation=1.0)
    order = np.argmax(np.abs(law.axes), axis=1)
    np.testing.assert_allclose(np.sort(law.scales[:, order[0]]), [1.0, 2.0], rtol=0.05)
    np.testing.assert_allclose(law.scales[:, order[1]], 3.0, rtol=0.05)
    most_at_the_end = np.concatenate([np.zeros((60, 1)), rng.uniform(0.0, 1.0, (50, 1))])
    assert np.all(np.isfinite(SplitT.of_draws(most_at_the_end, inflation=1.0).scales))
