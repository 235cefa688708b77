"""Priors of the positive hyperparameters, against SciPy's densities, quantiles and draws."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from bne.priors import (
    Prior,
    half_normal,
    inverse_gamma,
    inverse_gamma_between,
    log_normal,
)

# Each prior beside SciPy's law of theta with the same meaning, written out independently.
CASES: list[tuple[Prior, Any]] = [
    (half_normal(5.0), stats.halfnorm(scale=5.0)),
    (half_normal(0.3), stats.halfnorm(scale=0.3)),
    (inverse_gamma(4.6, 22.0), stats.invgamma(4.6, scale=22.0)),
    (inverse_gamma(0.8, 0.05), stats.invgamma(0.8, scale=0.05)),
    (log_normal(2.0, 0.7), stats.lognorm(0.7, scale=2.0)),
    (log_normal(1e-3, 2.0), stats.lognorm(2.0, scale=1e-3)),
]
IDS = [f"{prior.family}-{prior.first:g}" for prior, _ in CASES]


@pytest.mark.parametrize(("prior", "law"), CASES, ids=IDS)
class TestFamilies:
    def test_log_density_is_that_of_the_logarithm(self, prior: Prior, law: Any) -> None:
        u = np.log(law.ppf(np.linspace(1e-4, 1.0 - 1e-4, 101)))
        with jax.enable_x64(True):
            mine = np.asarray(prior.log_density(jnp.asarray(u)))
        exact = law.logpdf(np.exp(u)) + u  # the Jacobian of theta = exp(u)
        np.testing.assert_allclose(mine - mine[0], exact - exact[0], atol=1e-9)

    def test_log_density_in_single_precision(self, prior: Prior, law: Any) -> None:
        u = np.log(law.ppf(np.linspace(0.01, 0.99, 21)))
        mine = prior.log_density(jnp.asarray(u, jnp.float32))
        assert mine.dtype == jnp.float32
        exact = law.logpdf(np.exp(u)) + u
        np.testing.assert_allclose(mine - mine[10], exact - exact[10], atol=1e-4)

    def test_gradient_by_differences(self, prior: Prior, law: Any) -> None:
        h = 1e-5
        with jax.enable_x64(True):
            u = jnp.log(jnp.asarray(law.ppf(np.array([0.01, 0.3, 0.9, 0.999]))))
            gradient = jax.vmap(jax.grad(prior.log_density))(u)
            slope = (prior.log_density(u + h) - prior.log_density(u - h)) / (2.0 * h)
        np.testing.assert_allclose(gradient, slope, rtol=1e-6, atol=1e-7)

    def test_density_integrates_to_the_quantiles(self, prior: Prior, law: Any) -> None:
        ends = np.log(law.ppf([1e-9, 0.2, 0.7, 1.0 - 1e-9]))

        def density(u: float) -> float:
            with jax.enable_x64(True):
                return float(jnp.exp(prior.log_density(jnp.asarray(u))))

        parts = [integrate.quad(density, *pair)[0] for pair in itertools.pairwise(ends)]
        np.testing.assert_allclose(np.array(parts) / np.sum(parts), [0.2, 0.5, 0.3], atol=1e-6)

    def test_quantiles(self, prior: Prior, law: Any) -> None:
        p = np.array([0.001, 0.25, 0.5, 0.99])
        np.testing.assert_allclose(prior.quantile(p), law.ppf(p), rtol=1e-12)
        assert float(prior.quantile(0.5)) == pytest.approx(law.median())

    def test_draws_follow_the_law(self, prior: Prior, law: Any, rng: np.random.Generator) -> None:
        draws = prior.sample_log(rng, 20_000)
        assert stats.kstest(np.exp(draws), law.cdf).pvalue > 1e-5

    def test_moments_of_draws(self, prior: Prior, law: Any, rng: np.random.Generator) -> None:
        n = 50_000
        draws = prior.sample_log(rng, n)
        middle = (np.arange(20_000) + 0.5) / 20_000
        u = np.log(law.ppf(middle))
        mean, sd = u.mean(), u.std()
        fourth = np.mean((u - mean) ** 4)
        z = stats.norm.isf(0.5e-6)  # false alarms: 1e-6 for each of the two
        assert abs(draws.mean() - mean) < z * sd / np.sqrt(n) + 1e-3 * sd
        spread = np.sqrt((fourth / sd**4 - 1.0) / n)
        assert abs(draws.var() / sd**2 - 1.0) < z * spread + 0.01

    def test_draws_repeat_with_their_seed_and_keep_their_shape(
        self, prior: Prior, law: Any
    ) -> None:
        del law
        a, b = (prior.sample_log(np.random.default_rng(5), (3, 4)) for _ in range(2))
        assert a.shape == (3, 4)
        np.testing.assert_array_equal(a, b)

    def test_round_trip(self, prior: Prior, law: Any) -> None:
        del law
        assert Prior.from_dict(json.loads(json.dumps(prior.to_dict()))) == prior


def test_round_trip_of_a_prior_that_jax_has_held() -> None:
    held = jax.tree.map(jnp.asarray, half_normal(0.5))
    assert Prior.from_dict(json.loads(json.dumps(held.to_dict()))) == half_normal(0.5)


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="Unknown prior family 'cauchy'"):
        Prior.from_dict({"family": "cauchy", "first": 1.0, "second": 0.0})


def test_priors_of_one_family_share_compiled_code() -> None:
    traced = []

    @jax.jit
    def density(prior: Prior, u: jax.Array) -> jax.Array:
        traced.append(prior.family)
        return prior.log_density(u)

    u = jnp.asarray(0.1)
    for prior in (half_normal(1.0), half_normal(2.0), inverse_gamma(2.0, 3.0), half_normal(3.0)):
        density(prior, u)
    assert traced == ["half_normal", "inverse_gamma"]


class TestInverseGammaBetween:
    @pytest.mark.parametrize(
        ("lower", "upper"), [(2.0, 10.0), (1e-3, 5.0), (3.0, 3.1), (9.9, 10.0), (1e5, 4e6)]
    )
    def test_puts_one_percent_in_each_tail(self, lower: float, upper: float) -> None:
        prior = inverse_gamma_between(lower, upper)
        law = stats.invgamma(prior.first, scale=prior.second)
        assert law.cdf(lower) == pytest.approx(0.01, rel=1e-6)
        assert law.sf(upper) == pytest.approx(0.01, rel=1e-6)

    @pytest.mark.parametrize("mass", [0.5, 0.9, 0.999])
    def test_puts_any_share_between(self, mass: float) -> None:
        prior = inverse_gamma_between(1.0, 20.0, mass=mass)
        law = stats.invgamma(prior.first, scale=prior.second)
        assert law.cdf(1.0) == pytest.approx(0.5 * (1.0 - mass), rel=1e-5)
        assert law.sf(20.0) == pytest.approx(0.5 * (1.0 - mass), rel=1e-5)

    @pytest.mark.parametrize("ratio", [1.002, 1e6])
    def test_reaches_narrow_and_wide_intervals(self, ratio: float) -> None:
        prior = inverse_gamma_between(1.0, ratio)
        np.testing.assert_allclose(prior.quantile(np.array([0.01, 0.99])), [1.0, ratio], rtol=1e-5)

    @pytest.mark.parametrize("ends", [(0.0, 1.0), (2.0, 1.0), (1.0, 1.0), (1.0, np.inf), (-1, 1)])
    def test_refuses_an_empty_interval(self, ends: tuple[float, float]) -> None:
        with pytest.raises(ValueError, match="A prior needs 0 < lower < upper, got"):
            inverse_gamma_between(*ends)
