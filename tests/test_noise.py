"""The EMG noise: against 50-digit references, quadrature, other packages and its own draws."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scoringrules
from numpy.typing import NDArray
from scipy import integrate, special, stats

from bne import noise
from bne._erfcx import hazard_remainders

FloatArray = NDArray[np.float64]

RATIOS = [0.0, 1e-12, 1e-4, 1e-2, 0.3, 1.0, 10.0, 1e3, 1e6, 1e12]


@pytest.fixture(params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    with jax.enable_x64(request.param == "float64"):
        yield request.param


class Reference(NamedTuple):
    """Arguments that float32 holds exactly, log densities and gradients to float64."""

    arguments: tuple[FloatArray, FloatArray, FloatArray]
    logpdf: FloatArray
    gradient: tuple[FloatArray, FloatArray, FloatArray]


def exact_terms(residual: float, log_scale: float, log_skew: float) -> list[float]:
    """Log density and gradient by the textbook formulae, at mpmath's current precision."""
    residual, log_scale, log_skew = map(mpmath.mpf, (residual, log_scale, log_skew))
    scale, rho = mpmath.exp(log_scale), mpmath.exp(log_scale - log_skew)
    r = residual / scale
    v = rho - r
    upper = mpmath.erfc(v / mpmath.sqrt(2)) / 2
    hazard = mpmath.npdf(v) / upper
    value = -log_skew + rho * (rho / 2 - r) + mpmath.log(upper)
    terms = [
        value,
        (hazard - rho) / scale,
        rho**2 - (r + rho) * hazard,
        rho * (hazard - v) - 1,
    ]
    return [float(term) for term in terms]


def make_reference(points: list[tuple[float, float, float]], digits: int) -> Reference:
    with mpmath.workdps(digits):
        rows = np.array([exact_terms(*point) for point in points])
    arguments = np.array(points)
    return Reference(tuple(arguments.T), rows[:, 0], tuple(rows[:, 1:].T))


@pytest.fixture(scope="session")
def reference() -> Reference:
    generator = np.random.default_rng(20240611)
    n = 10_000
    log_scale = generator.uniform(-4.0, 4.0, n).astype(np.float32).astype(float)
    log_ratio = np.log(10.0) * generator.uniform(-4.0, 3.0, n)
    log_skew = (log_scale - log_ratio).astype(np.float32).astype(float)
    residual = np.exp(log_scale) * generator.uniform(-40.0, 40.0, n)
    residual = residual.astype(np.float32).astype(float)
    return make_reference(list(zip(residual, log_scale, log_skew, strict=True)), digits=50)


def value_and_gradient(
    arguments: tuple[FloatArray, ...], dtype: str
) -> tuple[FloatArray, list[FloatArray]]:
    function = jax.jit(jax.vmap(jax.value_and_grad(noise.emg_logpdf, argnums=(0, 1, 2))))
    value, gradient = function(*(jnp.asarray(argument, dtype) for argument in arguments))
    assert {str(array.dtype) for array in (value, *gradient)} == {dtype}
    return np.asarray(value, float), [np.asarray(array, float) for array in gradient]


class TestLogDensity:
    def test_value_against_mpmath(self, reference: Reference, dtype: str) -> None:
        value, _ = value_and_gradient(reference.arguments, dtype)
        tolerance = {"float32": 1e-4, "float64": 1e-10}[dtype]
        np.testing.assert_allclose(value, reference.logpdf, rtol=tolerance)

    def test_gradient_against_mpmath(self, reference: Reference, dtype: str) -> None:
        _, gradient = value_and_gradient(reference.arguments, dtype)
        relative, absolute = {"float32": (1e-3, 1e-6), "float64": (1e-8, 1e-12)}[dtype]
        for mine, exact in zip(gradient, reference.gradient, strict=True):
            np.testing.assert_allclose(mine, exact, rtol=relative, atol=absolute)

    def test_numpy_twin_against_mpmath(self, reference: Reference) -> None:
        residual, log_scale, log_skew = reference.arguments
        value = noise.emg_logpdf_numpy(residual, 0.0, np.exp(log_scale), np.exp(log_skew))
        np.testing.assert_allclose(value, reference.logpdf, rtol=1e-10)

    def test_near_normal_limit(self, dtype: str) -> None:
        residuals = (-30.0, -2.0, -0.25, 0.0, 0.5, 1.0, 3.0, 30.0)
        ratios = (-5.0, -9.0, -14.0, -20.0, -40.0)
        points = [(r, 0.25, 0.25 + ratio) for r, ratio in itertools.product(residuals, ratios)]
        exact = make_reference(points, digits=120)
        value, gradient = value_and_gradient(exact.arguments, dtype)
        tolerance = {"float32": 1e-5, "float64": 1e-12}[dtype]
        np.testing.assert_allclose(value, exact.logpdf, rtol=tolerance)
        for mine, target in zip(gradient, exact.gradient, strict=True):
            np.testing.assert_allclose(mine, target, rtol=tolerance, atol=1e-30)

    def test_vanishing_skew_is_the_normal(self, dtype: str) -> None:
        residual = jnp.linspace(-30.0, 30.0, 61, dtype=dtype)

        def total(residual: jax.Array, log_scale: jax.Array) -> jax.Array:
            return noise.emg_logpdf(residual, log_scale, -60.0).sum()

        def normal(residual: jax.Array, log_scale: jax.Array) -> jax.Array:
            return noise.normal_logpdf(residual, log_scale).sum()

        log_scale = jnp.full_like(residual, 0.7)
        mine = jax.jit(jax.grad(total, argnums=(0, 1)))(residual, log_scale)
        theirs = jax.jit(jax.grad(normal, argnums=(0, 1)))(residual, log_scale)
        tolerance = {"float32": 1e-5, "float64": 1e-13}[dtype]
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=1e-12)
        exact = stats.norm.logpdf(np.asarray(residual, float), scale=np.exp(0.7))
        np.testing.assert_allclose(noise.normal_logpdf(residual, log_scale), exact, rtol=tolerance)

    @pytest.mark.parametrize("band", [9.3, 26.6])
    def test_no_dead_band_of_erfcx(self, band: float, dtype: str) -> None:
        rho = np.sqrt(2.0) * np.linspace(band - 0.7, band + 0.7, 141) + 0.5
        log_skew = (-np.log(rho)).astype(np.float32).astype(float)
        points = [(0.5, 0.0, b) for b in log_skew]
        exact = make_reference(points, digits=50)
        value, gradient = value_and_gradient(exact.arguments, dtype)
        tolerance = {"float32": 1e-5, "float64": 1e-12}[dtype]
        np.testing.assert_allclose(value, exact.logpdf, rtol=tolerance)
        for mine, target in zip(gradient, exact.gradient, strict=True):
            np.testing.assert_allclose(mine, target, rtol=50 * tolerance)

    def test_finite_everywhere(self, dtype: str) -> None:
        size = (0.0, 1e-30, 1e-3, 1.0, 9.3, 26.6, 1e3, 1e10, 1e30)
        logs = (-85.0, -40.0, -15.0, -3.0, 0.0, 2.0, 15.0, 40.0, 85.0)
        grid = itertools.product([*size, *(-s for s in size)], logs, logs)
        arguments = tuple(np.array(list(grid)).T)
        value, gradient = value_and_gradient(arguments, dtype)
        for array in (value, *gradient):
            assert np.isfinite(array).all()
        normal = jax.jit(jax.vmap(jax.value_and_grad(noise.normal_logpdf, argnums=(0, 1))))
        value, gradient = normal(*(jnp.asarray(a, dtype) for a in arguments[:2]))
        for array in (value, *gradient):
            assert jnp.isfinite(array).all()

    def test_second_derivatives(self) -> None:
        grid = itertools.product((-5.0, -0.3, 0.0, 1.0, 4.0), (-1.0, 0.0), (-8.0, -1.0, 0.0, 2.0))
        step = 1e-5
        with jax.enable_x64(True):
            gradient = jax.jit(jax.vmap(jax.grad(lambda p: noise.emg_logpdf(*p))))
            hessian = jax.jit(jax.vmap(jax.hessian(lambda p: noise.emg_logpdf(*p))))
            points = jnp.asarray(list(grid))
            exact = hessian(points)
            for i in range(3):
                move = step * jnp.eye(3)[i]
                column = (gradient(points + move) - gradient(points - move)) / (2.0 * step)
                np.testing.assert_allclose(exact[:, :, i], column, rtol=1e-6, atol=1e-6)

    def test_precision_follows_the_residual(self) -> None:
        with jax.enable_x64(True):
            residual = jnp.ones(3, jnp.float32)
            logs = (np.float64(0.3), jnp.asarray(-3.0, jnp.float64))
            assert noise.emg_logpdf(residual, *logs).dtype == jnp.float32
            assert noise.normal_logpdf(residual, logs[0]).dtype == jnp.float32
            kernel = jax.value_and_grad(lambda r, a, b: noise.emg_logpdf(r, a, b).sum())
            narrow = [jnp.asarray(0.5, jnp.float32)] * 2
            assert "f64[3]" not in str(jax.make_jaxpr(kernel)(residual, *narrow))

    def test_broadcasting(self) -> None:
        residual, log_scale, log_skew = np.ones((4, 1)), 0.2, np.linspace(-3.0, 0.0, 5)
        value = noise.emg_logpdf(residual, log_scale, log_skew)
        assert value.shape == (4, 5)

        def total(log_scale: jax.Array, log_skew: jax.Array) -> jax.Array:
            return noise.emg_logpdf(residual, log_scale, log_skew).sum()

        by_scale, by_skew = jax.jit(jax.grad(total, argnums=(0, 1)))(0.2, log_skew)
        assert by_scale.shape == ()
        assert by_skew.shape == (5,)


def test_hazard_remainders_against_mpmath(dtype: str) -> None:
    x = np.concatenate([[0.0], np.logspace(-8, 8, 300), np.linspace(0.0, 60.0, 200)])
    x = x.astype(np.float32).astype(float)
    with mpmath.workdps(80):
        hazard = [mpmath.npdf(t) / (mpmath.erfc(mpmath.mpf(t) / mpmath.sqrt(2)) / 2) for t in x]
        e = [h - t for h, t in zip(hazard, x, strict=True)]
        d = [1 / remainder - t for remainder, t in zip(e, x, strict=True)]
        exact = [np.array([float(value) for value in values]) for values in (e, d)]
    tolerance = {"float32": 1e-6, "float64": 2e-15}[dtype]
    for mine, target in zip(hazard_remainders(jnp.asarray(x, dtype)), exact, strict=True):
        np.testing.assert_allclose(mine, target, rtol=tolerance)


class TestDistribution:
    @pytest.mark.parametrize("skew", [0.05, 0.5, 2.0])
    def test_against_scipy(self, skew: float) -> None:
        y = np.linspace(-6.0, 15.0, 106)
        mine, theirs = noise.EMG(1.0, 1.5, skew), stats.exponnorm(skew / 1.5, 1.0, 1.5)
        np.testing.assert_allclose(mine.logpdf(y), theirs.logpdf(y), rtol=1e-10)
        np.testing.assert_allclose(mine.pdf(y), theirs.pdf(y), rtol=1e-10)
        np.testing.assert_allclose(mine.cdf(y), theirs.cdf(y), atol=1e-12)
        np.testing.assert_allclose(mine.sf(y), theirs.sf(y), atol=1e-12)

    @pytest.mark.parametrize("ratio", RATIOS)
    def test_round_trip(self, ratio: float) -> None:
        tail = np.logspace(-6, np.log10(0.5), 200)
        p = np.concatenate([tail, 1.0 - tail])
        law = noise.EMG(3.0, 2.0, 2.0 * ratio)
        y = law.ppf(p)
        np.testing.assert_allclose(law.cdf(y), p, rtol=0.0, atol=1e-12)
        np.testing.assert_allclose(law.logcdf(y[:200]), np.log(tail), atol=1e-9)
        np.testing.assert_allclose(law.sf(y[200:]), tail, rtol=1e-9)

    def test_round_trip_in_bulk(self) -> None:
        generator = np.random.default_rng(1)
        p = generator.uniform(1e-6, 1.0 - 1e-6, (500, 1))
        law = noise.EMG(generator.normal(size=40), 0.5, 0.5 * np.logspace(-3, 4, 40))
        np.testing.assert_allclose(law.cdf(law.ppf(p)), np.broadcast_to(p, (500, 40)), atol=1e-12)

    def test_ends_of_the_line(self) -> None:
        law = noise.EMG(0.0, 1.0, [0.0, 1.0, 1e6])
        assert (law.ppf(0.0) == -np.inf).all()
        assert (law.ppf(1.0) == np.inf).all()
        ends = np.array([[-np.inf], [np.inf]])
        np.testing.assert_array_equal(law.cdf(ends), [[0.0] * 3, [1.0] * 3])
        np.testing.assert_array_equal(law.sf(ends), [[1.0] * 3, [0.0] * 3])
        np.testing.assert_array_equal(law.pdf(ends), np.zeros((2, 3)))
        np.testing.assert_array_equal(law.logcdf(ends), [[-np.inf] * 3, [0.0] * 3])
        assert np.isnan(law.cdf(np.nan)).all()

    def test_log_cdf_far_left(self) -> None:
        for ratio, r in itertools.product([1e-3, 1.0, 1e5, 1e10], [-1e3, -40.0, -3.0, -0.1, 0.2]):
            with mpmath.workdps(120):
                rho, z = 1 / mpmath.mpf(ratio), mpmath.mpf(r)
                tail = mpmath.erfc((rho - z) / mpmath.sqrt(2)) / 2
                cdf = mpmath.erfc(-z / mpmath.sqrt(2)) / 2 - mpmath.exp(rho * (rho / 2 - z)) * tail
                exact = float(mpmath.log(cdf))
            assert noise.EMG(0.0, 1.0, ratio).logcdf(r) == pytest.approx(exact, abs=1e-9, rel=1e-12)

    def test_density_is_the_slope_of_the_cdf(self) -> None:
        y, step = np.linspace(-4.0, 12.0, 81), 1e-4
        cdf, pdf = noise.emg_cdf_pdf(y, 0.5, 1.0, 2.0)
        low = noise.emg_cdf(y - step, 0.5, 1.0, 2.0)
        high = noise.emg_cdf(y + step, 0.5, 1.0, 2.0)
        np.testing.assert_allclose((high - low) / (2.0 * step), pdf, atol=1e-8)
        np.testing.assert_allclose(cdf + noise.emg_sf(y, 0.5, 1.0, 2.0), 1.0, rtol=1e-15)

    def test_zero_skew_is_the_normal(self) -> None:
        law, y = noise.EMG([0.0, 1.0], 2.0), np.linspace(-20.0, 20.0, 41)[:, None]
        normal = stats.norm([0.0, 1.0], 2.0)
        np.testing.assert_allclose(law.logpdf(y), normal.logpdf(y), rtol=1e-14)
        np.testing.assert_allclose(law.cdf(y), normal.cdf(y), rtol=1e-13)
        np.testing.assert_allclose(law.ppf([0.01, 0.6]), normal.ppf([0.01, 0.6]), rtol=1e-13)


class TestCRPS:
    @pytest.mark.parametrize(("scale", "skew"), [(1, 0), (1, 0.05), (1, 1), (0.5, 4), (0.02, 2)])
    @pytest.mark.parametrize("y", [-3.0, 0.0, 0.7, 2.5, 12.0])
    def test_against_quadrature(self, y: float, scale: float, skew: float) -> None:
        law = noise.EMG(0.3, scale, skew)

        def squared(t: float) -> float:
            return float(law.sf(t) if t >= y else law.cdf(t)) ** 2

        low, high = min(y, 0.3 - 12.0 * scale), max(y, 0.3 + 12.0 * scale + 40.0 * skew)
        ends = sorted({low, min(max(y, low), high), 0.3 - 2 * scale, 0.3 + 2 * scale, high})
        pieces = itertools.pairwise(ends)
        total = sum(
            integrate.quad(squared, a, b, epsabs=1e-13, epsrel=1e-12, limit=200)[0]
            for a, b in pieces
        )
        assert law.crps(y) == pytest.approx(total, rel=1e-9, abs=1e-10)

    def test_against_sampling(self) -> None:
        law, n = noise.EMG(1.0, 0.8, 1.5), 200_000
        first, second = law.rvs((2, n), random_state=5)
        for y in (-1.0, 2.0, 6.0):
            terms = np.abs(first - y) - 0.5 * np.abs(first - second)
            z = (terms.mean() - law.crps(y)) / (terms.std() / np.sqrt(n))
            assert abs(z) < 4.5

    def test_normal_limit(self) -> None:
        y = np.linspace(-8.0, 8.0, 33)
        exact = scoringrules.crps_normal(y, 0.5, 1.3)
        for skew in (0.0, 1e-300, 1e-15):
            np.testing.assert_allclose(noise.EMG(0.5, 1.3, skew).crps(y), exact, rtol=1e-12)

    def test_exponential_limit(self) -> None:
        y = np.linspace(0.1, 12.0, 33)
        exact = scoringrules.crps_exponential(y, 1.0 / 1.7)
        np.testing.assert_allclose(noise.EMG(0.0, 1e-9, 1.7).crps(y), exact, rtol=1e-9)

    def test_spread_between_two_members(self) -> None:
        n = 200_000
        a, b = noise.EMG(0.0, 1.0, 2.0), noise.EMG(1.5, 0.4, 0.5)
        gaps = np.abs(a.rvs(n, random_state=1) - b.rvs(n, random_state=2))
        root = np.hypot(1.0, 0.4)
        exact = 0.8 * noise.emg_abs_deviation(0.0, -1.5, root, 2.0)
        exact += 0.2 * noise.emg_abs_deviation(0.0, 1.5, root, 0.5)
        assert abs(gaps.mean() - exact) < 4.5 * gaps.std() / np.sqrt(n)


class TestMomentsAndDraws:
    @pytest.mark.parametrize("skew", [0.0, 0.3, 3.0])
    def test_draws_follow_the_law(self, skew: float) -> None:
        law, n = noise.EMG(-2.0, 1.2, skew), 100_000
        draws = law.rvs(n, random_state=11)
        assert abs(draws.mean() - law.mean()) < 4.5 * law.std() / np.sqrt(n)
        fourth = 3.0 * 1.2**4 + 6.0 * 1.2**2 * skew**2 + 9.0 * skew**4
        error = np.sqrt((fourth - law.var() ** 2) / n)
        assert abs(draws.var() - law.var()) < 4.5 * error
        assert stats.kstest(law.cdf(draws), "uniform").pvalue > 1e-5

    def test_moments_broadcast(self) -> None:
        law = noise.EMG([0.0, 1.0], [[3.0], [5.0], [6.0]], 4.0)
        assert law.shape == law.mean().shape == law.var().shape == (3, 2)
        np.testing.assert_allclose(law.mean()[0], [4.0, 5.0])
        np.testing.assert_allclose(law.var()[:, 1], [25.0, 41.0, 52.0])
        np.testing.assert_allclose(law.std() ** 2, law.var())

    def test_draws_are_reproducible(self) -> None:
        law = noise.EMG([0.0, 10.0], 1.0, 2.0)
        first, second = law.rvs(random_state=3), law.rvs(random_state=3)
        np.testing.assert_array_equal(first, second)
        assert first.shape == (2,)
        generator = np.random.default_rng(3)
        np.testing.assert_array_equal(law.rvs(random_state=generator), first)
        assert (law.rvs(random_state=generator) != first).all()
        assert law.rvs((5, 2), random_state=0).shape == (5, 2)

    def test_draws_differ_within_a_broadcast_parameter(self) -> None:
        draws = noise.EMG(0.0, 1.0, 1.0).rvs(4, random_state=0)
        assert np.unique(draws).size == 4


class TestMessages:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((0.0, 0.0, 1.0), r"scale must be positive and finite; found 0\."),
            ((0.0, [1.0, -2.0, np.nan], 1.0), r"found -2 at position 1 \(2 of 3 values are wrong"),
            ((0.0, np.inf, 1.0), "scale must be positive and finite; found inf"),
            ((0.0, 1.0, -0.1), r"skew must be non-negative and finite; found -0\.1"),
            ((0.0, 1.0, np.nan), "skew must be non-negative and finite; found nan"),
            (([0.0, np.nan], 1.0, 1.0), "loc must be finite; found nan at position 1"),
            (("ten", 1.0, 1.0), "loc must be a number or an array of numbers"),
            (([0.0, 1.0], [1.0, 1.0, 1.0], 0.0), "do not broadcast together"),
        ],
    )
    def test_parameters(self, arguments: tuple[Any, ...], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            noise.EMG(*arguments)

    def test_probabilities(self) -> None:
        with pytest.raises(ValueError, match=r"p must lie between 0 and 1; found 1\.5 at position"):
            noise.EMG(0.0, 1.0, 1.0).ppf([0.5, 1.5])

    def test_size(self) -> None:
        with pytest.raises(
            ValueError, match=r"size \(3,\) does not fit parameters of shape \(2,\)"
        ):
            noise.EMG([0.0, 1.0], 1.0).rvs(3)

    def test_outcomes(self) -> None:
        with pytest.raises(ValueError, match="y must be a number"):
            noise.EMG(0.0, 1.0).crps("high")


def test_median_of_the_normal_part() -> None:
    assert noise.EMG(7.0, 2.0).ppf(0.5) == pytest.approx(7.0, abs=1e-12)
    assert noise.EMG(7.0, 2.0).crps(7.0) == pytest.approx(
        2.0 * (2.0 * stats.norm.pdf(0.0) - 1.0 / np.sqrt(np.pi))
    )
    assert special.ndtr(0.0) == noise.EMG(7.0, 2.0).cdf(7.0)
