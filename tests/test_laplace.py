"""The fast approximation: right where the posterior is known, close to Markov chains elsewhere.

Every comparison has fixed seeds; the bounds allow for the error of the approximation, and stand far
outside the chance of the draws (4000 independent ones locate a mean to 0.016 sd, an sd to 1.1 %).
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import jax
import numpy as np
import pytest

import bne
from bne.inference import Settings, sample
from bne.laplace import approximate
from bne.model import sample_prior
from calibration import positions_of, scalars_of, simulate
from test_calibration import make_problem
from test_estimators import make_table
from test_inference import assert_cut, assert_same, regression, residual_at_sites

N_DRAWS = 2000


def fast(problem, mixtures, *, n_draws=N_DRAWS, seed=1):
    return approximate(problem.structure, problem.data, mixtures, n_draws, seed)


# A linear-Gaussian problem, whose posterior is known


def test_step_two_agrees_with_dense_quadrature():
    problem = regression(4)
    draws = fast(problem, problem.mixtures[:1])
    delta = residual_at_sites(problem, draws)[0]
    exact = problem.exact
    np.testing.assert_allclose((delta.mean(axis=0) - exact.mean[0]) / exact.sd[0], 0.0, atol=0.12)
    np.testing.assert_allclose(delta.std(axis=0), exact.sd[0], rtol=0.08)
    gap = (draws.hyper[0].mean(axis=0) - exact.hyper_mean[0]) / exact.hyper_sd[0]
    np.testing.assert_allclose(gap, 0.0, atol=0.15)
    np.testing.assert_allclose(draws.hyper[0].std(axis=0), exact.hyper_sd[0], rtol=0.2)


def test_the_cut_posterior_has_the_total_mean_and_variance():
    problem = regression(800, spread=0.1)
    draws = fast(problem, problem.mixtures, n_draws=800)
    assert_cut(problem, residual_at_sites(problem, draws).reshape(800, -1))


def test_the_seed_decides_the_draws():
    problem = regression(4)
    first = fast(problem, problem.mixtures[:1], n_draws=50)
    assert_same(first, fast(problem, problem.mixtures[:1], n_draws=50))
    other = fast(problem, problem.mixtures[:1], n_draws=50, seed=2)
    assert not np.any(first.hyper == other.hyper)
    assert first.hyper.shape == (1, 50, 3)
    assert not first.stats


# Against Markov chains


@pytest.mark.parametrize(
    ("step", "shift", "ratio"),
    [
        ("step1", 0.35, 0.35),
        pytest.param("step3", 0.35, 0.4, marks=pytest.mark.slow),
        pytest.param("joint", 0.5, 0.5, marks=pytest.mark.slow),
    ],
)
def test_means_and_sds_are_near_those_of_markov_chains(step, shift, ratio):
    """All checked scalars: means within `shift` sd, sds within the share `ratio`."""
    problem = make_problem(step)
    _, response = simulate(problem, np.random.default_rng(2))
    data = replace(problem.data, response=response).non_centred(problem.structure)
    with jax.enable_x64(True):
        start = sample_prior(problem.structure, data, np.random.default_rng(3), 4)
    settings = Settings(chains=4, draws=1000, warmup=500)
    exact = sample(problem.structure, data, problem.mixture[None], start, settings, 4)
    quick = approximate(problem.structure, data, problem.mixture[None], 4000, 5)
    slow_values, fast_values = (
        scalars_of(problem, data, positions_of(draws, data)) for draws in (exact, quick)
    )
    gap = (fast_values.mean(axis=0) - slow_values.mean(axis=0)) / slow_values.std(axis=0)
    sds = fast_values.std(axis=0) / slow_values.std(axis=0)
    told = dict(
        zip(problem.scalars, np.round(np.stack([gap, sds], axis=1), 2).tolist(), strict=True)
    )
    assert np.max(np.abs(gap)) < shift, told
    assert np.max(np.abs(np.log(sds))) < ratio, told


# Through the estimators


@pytest.mark.parametrize("gp", ["hilbert", "rff", "exact"])
def test_every_representation_is_approximated_and_labelled(gp):
    table = make_table(30)
    model = bne.BAE(["a", "b", "c"], ["x0", "x1"], gp=gp, inference="fast", random_state=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "With .* basis functions")
        model.set_params(chains=1, draws=100).fit(table, table["y"])
    assert np.isfinite(model.summary(table).to_numpy(dtype=float)).all()
    assert "approximation" in model.inference_
    assert "approximation" in model.diagnose().verdict
    assert model.posterior_.attrs["inference"] == model.inference_
