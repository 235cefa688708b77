"""Kernels against scikit-learn and quadrature; representations against dense Gaussian processes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import integrate, stats
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, Matern

from bne.approximation import Geometry, choose, default_lengthscales
from bne.kernels import Kernel, covariance
from bne.processes import Fourier, Hilbert
from bne.site_processes import Dual, Exact, Nodes

FloatArray = NDArray[np.float64]

KERNELS = ["matern12", "matern32", "matern52", "squared_exponential"]
Z = float(stats.norm.isf(0.5e-7))  # two-sided false alarms of 1e-7 per comparison


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return Kernel(request.param)


def dense(kernel: Kernel, a: FloatArray, b: FloatArray, lengthscale: float) -> FloatArray:
    """Correlations by scikit-learn."""
    known = {"matern12": 0.5, "matern32": 1.5, "matern52": 2.5}
    if kernel.name in known:
        return Matern(lengthscale, nu=known[kernel.name])(a, b)
    return RBF(lengthscale)(a, b)


def sites_in(rng: np.random.Generator, n: int, dim: int) -> FloatArray:
    """Sites in a box of sides 100, 70 and 80."""
    return rng.uniform(size=(n, dim)) * np.array([100.0, 70.0, 80.0])[:dim]


def spectral_density(kernel: Kernel, omega: float, lengthscale: float, dim: int) -> float:
    return math.exp(float(kernel.log_spectral_density(omega**2, math.log(lengthscale), dim, np)))


class TestKernels:
    def test_correlation_starts_at_one_and_decreases(self, kernel: Kernel) -> None:
        r = np.linspace(0.0, 8.0, 400)
        values = kernel.correlation(r)
        assert values[0] == 1.0
        assert (np.diff(values) < 0.0).all()
        assert (values > 0.0).all()

    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_covariance_against_scikit_learn(
        self, kernel: Kernel, dim: int, rng: np.random.Generator
    ) -> None:
        a, b = sites_in(rng, 30, dim), sites_in(rng, 20, dim)
        exact = dense(kernel, a, b, 17.0)
        np.testing.assert_allclose(covariance(kernel, a, b, 17.0), exact, atol=1e-7)

    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_covariance_is_positive_definite(
        self, kernel: Kernel, dim: int, rng: np.random.Generator
    ) -> None:
        sites = sites_in(rng, 80, dim)
        matrix = covariance(kernel, sites, sites, 12.0)
        np.testing.assert_allclose(matrix, matrix.T, atol=1e-12)
        np.testing.assert_allclose(np.diag(matrix), 1.0, atol=1e-6)
        assert np.linalg.eigvalsh(matrix).min() > -1e-9

    def test_jax_and_numpy_agree(self, kernel: Kernel) -> None:
        r = np.linspace(0.0, 5.0, 30)
        np.testing.assert_allclose(kernel.correlation(jnp.asarray(r), jnp), kernel.correlation(r))
        mine = kernel.log_spectral_density(jnp.asarray(r), 0.3, 2)
        np.testing.assert_allclose(mine, kernel.log_spectral_density(r, 0.3, 2, np))

    @pytest.mark.parametrize("distance", [0.4, 2.0, 5.0])
    def test_spectral_density_integrates_to_the_correlation(
        self, kernel: Kernel, distance: float
    ) -> None:
        lengthscale = 1.7

        def density(omega: float) -> float:
            return spectral_density(kernel, omega, lengthscale, 1)

        whole = integrate.quad(density, 0.0, np.inf)[0]
        wave = integrate.quad(density, 0.0, np.inf, weight="cos", wvar=distance)[0]
        assert wave / whole == pytest.approx(kernel.correlation(distance / lengthscale), abs=1e-6)

    @pytest.mark.parametrize("distance", [0.4, 2.0, 5.0])
    def test_spectral_density_in_space_integrates_to_the_correlation(
        self, kernel: Kernel, distance: float
    ) -> None:
        whole = integrate.quad(lambda w: w**2 * spectral_density(kernel, w, 1.0, 3), 0, np.inf)[0]
        wave = integrate.quad(
            lambda w: w * spectral_density(kernel, w, 1.0, 3) / distance,
            0,
            np.inf,
            weight="sin",
            wvar=distance,
        )[0]
        assert wave / whole == pytest.approx(kernel.correlation(distance), abs=1e-6)

    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_spectral_tail_against_quadrature(self, kernel: Kernel, dim: int) -> None:
        def shell(omega: float) -> float:
            return omega ** (dim - 1) * spectral_density(kernel, omega, 2.5, dim)

        whole = integrate.quad(shell, 0.0, 1.0)[0] + integrate.quad(shell, 1.0, np.inf)[0]
        for frequency in (0.05, 0.4, 1.0, 2.0):
            tail = integrate.quad(shell, frequency, np.inf, epsabs=1e-12)[0]
            assert kernel.spectral_tail(frequency, 2.5, dim) == pytest.approx(
                tail / whole, abs=1e-7
            )

    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_frequencies_reproduce_the_correlation(
        self, kernel: Kernel, dim: int, rng: np.random.Generator
    ) -> None:
        n = 50_000
        frequencies = kernel.sample_frequencies(n, dim, rng)
        assert frequencies.shape == (n, dim)
        direction = rng.standard_normal(dim)
        direction /= np.linalg.norm(direction)
        for distance in (0.1, 0.7, 2.0):
            waves = np.cos(frequencies @ (distance * direction))
            error = Z * waves.std() / np.sqrt(n)
            assert waves.mean() == pytest.approx(kernel.correlation(distance), abs=error)

    def test_an_unknown_name_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match="Unknown kernel 'cubic'; choose one of matern12, ma"):
            Kernel("cubic")


class Chosen(NamedTuple):
    """Sites, what was chosen for them, and the quantiles of the residual's length-scale."""

    sites: FloatArray
    geometry: Geometry
    basis: Hilbert
    lengthscales: FloatArray


@cache
def chosen(kernel: Kernel, dim: int, n: int, seed: int = 3) -> Chosen:
    sites = sites_in(np.random.default_rng(seed), n, dim)
    geometry = Geometry.of(sites)
    priors = default_lengthscales(geometry, kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Matern-1/2 in space is coarse, and says so
        found = choose("hilbert", kernel, geometry, priors).representation
        basis = getattr(found, "basis", found)
    assert isinstance(basis, Hilbert)
    quantiles = priors["residual"].quantile((np.arange(40) + 0.5) / 40)
    return Chosen(sites, geometry, basis, quantiles)


def implied(basis: Hilbert, a: FloatArray, b: FloatArray, lengthscale: float) -> FloatArray:
    sd = basis.sd(np.log([lengthscale]), basis.n_coefficients)[0]
    return (basis.features(a) * sd**2) @ basis.features(b).T


def regression(
    K: FloatArray, K_new: FloatArray, variance_new: FloatArray, y: FloatArray, noise: float
) -> tuple[FloatArray, FloatArray]:
    """Posterior mean and sd of a Gaussian regression from covariance matrices."""
    solved = np.linalg.solve(K + noise**2 * np.eye(len(K)), np.c_[y, K_new.T])
    variance = variance_new - np.sum(K_new.T * solved[:, 1:], axis=0)
    return K_new @ solved[:, 0], np.sqrt(variance)


class TestHilbert:
    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_variance_is_one_everywhere(
        self, kernel: Kernel, dim: int, rng: np.random.Generator
    ) -> None:
        c = chosen(kernel, dim, 60)
        anywhere = rng.uniform(-300.0, 500.0, (40, dim))
        for lengthscale in (1.0, 10.0, 1000.0):
            variance = np.diag(implied(c.basis, anywhere, anywhere, lengthscale))
            np.testing.assert_allclose(variance, 1.0, rtol=1e-10)

    # Without what lies beyond the highest frequency, a share t of the variance, a correlation k
    # becomes (k - t k') / (1 - t) with |k'| <= 1: an error of at most 2 t / (1 - t).
    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_covariance_is_within_the_truncation(
        self, kernel: Kernel, dim: int, rng: np.random.Generator
    ) -> None:
        c = chosen(kernel, dim, 60)
        low, high = c.geometry.domain
        others = rng.uniform(low, high, (150, dim))
        highest = math.sqrt(float(np.max(c.basis.squared_frequencies)))
        for lengthscale in c.lengthscales[[0, 2, 8]]:
            tail = float(kernel.spectral_tail(highest, lengthscale, dim))
            error = implied(c.basis, others, c.sites, lengthscale) - dense(
                kernel, others, c.sites, lengthscale
            )
            assert np.abs(error).max() < 2.0 * tail / (1.0 - tail) + 0.01

    @pytest.mark.parametrize(("dim", "n"), [(1, 60), (2, 60), (2, 150), (3, 60)])
    def test_covariance_with_training_sites_is_within_its_bounds_on_average(
        self, dim: int, n: int, rng: np.random.Generator
    ) -> None:
        kernel = Kernel("matern32")
        c = chosen(kernel, dim, n)
        others = rng.uniform(*c.geometry.domain, (100, dim))
        error = np.mean(
            [
                implied(c.basis, others, c.sites, ls) - dense(kernel, others, c.sites, ls)
                for ls in c.lengthscales
            ],
            axis=0,
        )
        assert np.abs(error).max() < 0.09  # TRUNCATION + WRAPPING

    def test_the_first_coefficients_alone_have_unit_variance(self) -> None:
        basis = chosen(Kernel(), 2, 60).basis
        for size in (3, 21, basis.n_coefficients):
            sd = np.exp(np.asarray(basis.log_sd(jnp.log(20.0), size)))
            phi = basis.features(np.array([[3.0, 4.0]]))[0, :size]
            assert np.sum((phi * sd) ** 2) == pytest.approx(1.0, rel=1e-10)
            np.testing.assert_allclose(basis.sd(np.log([20.0]), size)[0], sd, rtol=1e-10)

    def test_fields_of_unequal_sizes_are_plain_products(self, rng: np.random.Generator) -> None:
        c = chosen(Kernel(), 2, 60)
        phi = c.basis.features(c.sites)
        sizes = (21, 3, c.basis.n_coefficients, 21)
        beta = rng.standard_normal((4, c.basis.n_coefficients))
        for row, size in zip(beta, sizes, strict=True):
            row[size:] = 0.0
        fields = c.basis.evaluate(phi, jnp.zeros(4), jnp.asarray(beta), sizes)
        np.testing.assert_allclose(fields, beta @ phi.T, atol=1e-12)
        fields = c.basis.evaluate(phi, jnp.zeros(4), jnp.asarray(beta))
        np.testing.assert_allclose(fields, beta @ phi.T, atol=1e-12)

    def test_draws_are_the_fields_at_other_sites(self, rng: np.random.Generator) -> None:
        c = chosen(Kernel(), 2, 60)
        beta = rng.standard_normal((5, c.basis.n_coefficients))
        draws = c.basis.draws(c.sites, np.zeros(5), beta, seed=1)
        fields = c.basis.evaluate(c.basis.features(c.sites), jnp.zeros(5), jnp.asarray(beta))
        np.testing.assert_allclose(draws, np.asarray(fields).T, atol=1e-12)
        blocks = c.basis.blocks(c.basis.features(c.sites), [21, c.basis.n_coefficients])
        again = c.basis.evaluate(blocks, jnp.zeros(5), jnp.asarray(beta))
        np.testing.assert_allclose(draws, np.asarray(again).T, atol=1e-12)
        short = c.basis.draws(c.sites, np.zeros(5), beta[:, :21], seed=1)
        beta[:, 21:] = 0.0
        np.testing.assert_allclose(short, c.basis.draws(c.sites, np.zeros(5), beta, 1), atol=1e-12)

    def test_prepared_draws_are_off_by_a_millionth(self, rng: np.random.Generator) -> None:
        c = chosen(Kernel(), 2, 60)
        log_l = np.full(200, math.log(20.0))
        sd = c.basis.sd(log_l, c.basis.n_coefficients)
        beta = sd * rng.standard_normal(sd.shape)  # fields of unit variance
        new = rng.uniform(*c.geometry.domain, (300, 2))
        error = c.basis.draws(new, log_l, c.basis.prepare(log_l, beta, 0), 0) - c.basis.draws(
            new, log_l, beta, 0
        )
        assert np.sqrt(np.mean(error**2)) < 1e-6
        assert np.abs(error).max() < 1e-5

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_the_sites_beside_a_site_change_no_bit(
        self, dtype: Any, rng: np.random.Generator
    ) -> None:
        c = chosen(Kernel(), 2, 60)
        beta = rng.standard_normal((41, c.basis.n_coefficients)).astype(dtype)
        new = rng.uniform(*c.geometry.domain, (523, 2))
        whole = c.basis.draws(new, np.zeros(41), beta, 0)
        assert whole.dtype == dtype
        for rows in (slice(3, 7), slice(255, 256), slice(100, 400), slice(511, 523)):
            part = c.basis.draws(new[rows], np.zeros(41), beta, 0)
            np.testing.assert_array_equal(part, whole[rows])

    def test_knows_where_it_ends(self) -> None:
        c = chosen(Kernel(), 2, 60)
        low, high = c.geometry.domain
        asked = np.stack([low, high, c.sites[0], low - 1.0, [c.sites[0, 0], high[1] + 0.1]])
        np.testing.assert_array_equal(c.basis.outside(asked), [False, False, False, True, True])

    # What lies beyond the highest frequency is missing from the spread between sites; in space,
    # where the functions are fewest along each axis, it is most.
    @pytest.mark.parametrize(
        ("dim", "n", "far_off", "narrower"),
        [(1, 40, 0.03, 0.05), (2, 70, 0.04, 0.08), (3, 80, 0.1, 0.2)],
    )
    def test_regression_agrees_with_the_exact_process(
        self, dim: int, n: int, far_off: float, narrower: float, rng: np.random.Generator
    ) -> None:
        kernel, noise = Kernel(), 0.5
        c = chosen(kernel, dim, n)
        ls = float(np.median(c.lengthscales))
        y = np.linalg.cholesky(dense(kernel, c.sites, c.sites, ls)) @ rng.standard_normal(n)
        y += noise * rng.standard_normal(n)
        inside = rng.uniform(c.sites.min(0), c.sites.max(0), (100, dim))
        anywhere = rng.uniform(*c.geometry.domain, (100, dim))
        new = np.concatenate([inside, anywhere])
        peer = GaussianProcessRegressor(Matern(ls, nu=1.5), alpha=noise**2, optimizer=None)
        mean, sd = peer.fit(c.sites, y).predict(new, return_std=True)
        mine, my_sd = regression(
            implied(c.basis, c.sites, c.sites, ls),
            implied(c.basis, new, c.sites, ls),
            np.ones(len(new)),
            y,
            noise,
        )
        error = (mine - mean) / sd
        for part in (slice(0, 100), slice(100, 200)):
            assert np.sqrt(np.mean(error[part] ** 2)) < far_off
            np.testing.assert_allclose(my_sd[part], sd[part], rtol=narrower)

    @pytest.mark.parametrize(("dim", "n"), [(1, 40), (2, 70)])
    def test_regression_half_a_width_outside_falls_back_to_the_prior(
        self, dim: int, n: int, rng: np.random.Generator
    ) -> None:
        noise = 0.2
        c = chosen(Kernel(), dim, n)
        width, middle = np.ptp(c.sites, axis=0), c.sites.mean(axis=0)
        ls = 0.12 * float(np.max(width))
        y = 2.0 + rng.standard_normal(n)
        far = np.stack([c.sites.min(0) - 0.5 * width, c.sites.max(0) + 0.5 * width, middle])
        far[:2, 1:] = middle[1:]  # off along the first axis only
        assert not c.basis.outside(far).any()
        mean, sd = regression(
            implied(c.basis, c.sites, c.sites, ls),
            implied(c.basis, far, c.sites, ls),
            np.ones(3),
            y,
            noise,
        )
        np.testing.assert_allclose(sd[:2], 1.0, rtol=0.05)
        np.testing.assert_allclose(mean[:2], 0.0, atol=0.1)
        assert sd[2] < 0.95


class TestFourier:
    def error(self, n_features: int, seed: int, kernel: Kernel) -> float:
        rng = np.random.default_rng(seed)
        sites = sites_in(rng, 50, 2)
        process = Fourier.build(kernel, 2, n_features, rng)
        phi = np.cos(process.features(sites) / 25.0 + process.phases)
        sd = np.exp(np.asarray(process.log_sd(math.log(25.0), n_features)))
        difference = (phi * sd**2) @ phi.T - dense(kernel, sites, sites, 25.0)
        return float(np.sqrt(np.mean(difference**2)))

    def test_covariance_converges(self, kernel: Kernel) -> None:
        errors = [np.mean([self.error(d, s, kernel) for s in range(9)]) for d in (128, 512, 2048)]
        np.testing.assert_allclose(errors[1:] / errors[0], [0.5, 0.25], rtol=0.4)
        assert errors[0] < 0.12  # 128 features: roughly 1 / sqrt(128)
        assert errors[2] < 0.03

    def test_fields_are_cosines(self, rng: np.random.Generator) -> None:
        process, sites = Fourier.build(Kernel(), 2, 64, rng), sites_in(rng, 10, 2)
        beta = rng.standard_normal((2, 64))
        phi = np.cos(
            process.features(sites)[None] / np.array([3.0, 40.0])[:, None, None] + process.phases
        )
        fields = process.evaluate(process.features(sites), jnp.log(jnp.array([3.0, 40.0])), beta)
        np.testing.assert_allclose(fields, np.einsum("jnm,jm->jn", phi, beta), atol=1e-10)

    def test_draws_are_the_fields_at_other_sites(self, rng: np.random.Generator) -> None:
        process, sites = Fourier.build(Kernel(), 2, 64, rng), sites_in(rng, 10, 2)
        beta, log_l = rng.standard_normal((6, 64)), np.linspace(1.0, 4.0, 6)
        fields = process.evaluate(process.features(sites), jnp.asarray(log_l), jnp.asarray(beta))
        draws = process.draws(sites, log_l, beta, seed=0)
        np.testing.assert_allclose(draws, np.asarray(fields).T, atol=1e-12)
        assert not process.outside(sites + 1e6).any()


class TestNodes:
    def test_interpolation_is_exact_at_the_nodes(self) -> None:
        nodes = Nodes.of(18, math.log(2.0), math.log(50.0))
        weights = nodes.interpolation(jnp.asarray(nodes.positions))
        np.testing.assert_allclose(weights, np.eye(len(nodes.positions)), atol=1e-10)

    def test_interpolation_of_a_smooth_function(self) -> None:
        nodes = Nodes.of(18, math.log(2.0), math.log(50.0))
        log_l = np.linspace(math.log(2.0), math.log(50.0), 101)
        weights = np.asarray(nodes.interpolation(jnp.asarray(log_l)))
        values = weights @ np.cos(nodes.positions)
        np.testing.assert_allclose(values, np.cos(log_l), atol=1e-8)

    def test_length_scales_beyond_the_range_are_held_at_its_ends(self) -> None:
        nodes = Nodes.of(18, math.log(2.0), math.log(50.0))
        beyond = nodes.interpolation(jnp.log(jnp.asarray([0.1, 900.0])))
        ends = nodes.interpolation(jnp.log(jnp.asarray([2.0, 50.0])))
        np.testing.assert_allclose(beyond, ends, atol=1e-9)

    def test_slopes_are_those_of_the_shares_and_vanish_beyond_the_range(self) -> None:
        nodes = Nodes.of(9, math.log(2.0), math.log(50.0))
        log_l, h = jnp.log(jnp.asarray([1.0, 2.1, 7.0, 31.0, 49.0, 60.0])), 1e-6
        shares, slopes = nodes.shares_and_slopes(log_l)
        np.testing.assert_allclose(shares, nodes.interpolation(log_l), atol=1e-12)
        above, below = nodes.interpolation(log_l + h), nodes.interpolation(log_l - h)
        np.testing.assert_allclose(slopes, (above - below) / (2.0 * h), atol=1e-6)
        np.testing.assert_array_equal(slopes[jnp.asarray([0, -1])], 0.0)

    @pytest.mark.parametrize("error", [1e-2, 1e-3])
    def test_fewer_matrices_than_nodes_within_the_error(self, error: float) -> None:
        sites = sites_in(np.random.default_rng(3), 40, 2)
        root = Exact.build(Kernel(), sites, 5.0, 150.0).root
        nodes = Nodes.between(5.0, 150.0, root, error)
        matrices = nodes.matrices(np.stack([root(float(u)) for u in nodes.positions]))
        assert len(matrices) < len(nodes.positions)
        for log_l in np.linspace(math.log(5.0), math.log(150.0), 50):
            shares = nodes.interpolation(np.array([log_l]), np)[0]
            found = np.tensordot(shares, matrices, 1)
            exact = dense(Kernel(), sites, sites, math.exp(log_l))
            assert np.abs(found @ found.T - exact).max() < 2.0 * error

    # Largest error of a covariance rebuilt from the interpolated root, as a share of the variance.
    # The covariance of the squared exponential is singular to rounding, and its root moves fast.
    TOLERANCE = {  # noqa: RUF012
        "matern12": 1e-4,
        "matern32": 1e-4,
        "matern52": 1e-4,
        "squared_exponential": 2e-3,
    }

    @pytest.mark.parametrize(("dim", "n"), [(1, 40), (2, 51), (3, 60)])
    def test_interpolated_root_against_the_covariance(
        self, kernel: Kernel, dim: int, n: int, rng: np.random.Generator
    ) -> None:
        sites = sites_in(rng, n, dim)
        prior = default_lengthscales(Geometry.of(sites), kernel)["residual"]
        lower, upper = float(prior.quantile(1e-5)), float(prior.quantile(0.9995))
        process = Exact.build(kernel, sites, lower, upper)
        log_l = rng.uniform(math.log(lower), math.log(upper), 25)
        factors = np.einsum(
            "jq,qnm->jnm", process.nodes.interpolation(jnp.asarray(log_l)), process.features(sites)
        )
        for factor, value in zip(factors, log_l, strict=True):
            matrix = dense(kernel, sites, sites, math.exp(value))
            assert np.abs(factor @ factor.T - matrix).max() < self.TOLERANCE[kernel.name]


def conditional(
    K: FloatArray, K_new: FloatArray, K_both: FloatArray, f: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Mean and covariance at new sites given values without noise."""
    gain = np.linalg.solve(K + 1e-9 * np.eye(len(K)), K_new.T).T
    return gain @ f, K_both - gain @ K_new.T


def assert_moments(draws: FloatArray, mean: FloatArray, matrix: FloatArray) -> None:
    """Mean and covariance of draws (n, S) that may have heavier tails than the normal's."""
    count = draws.shape[1]
    sd = np.sqrt(np.diag(matrix))
    np.testing.assert_array_less(np.abs(draws.mean(axis=1) - mean), Z * sd / np.sqrt(count) + 1e-6)
    scale = np.outer(sd, sd)
    # twice the normal's sampling error, for the tails
    np.testing.assert_allclose(
        np.cov(draws) / scale, matrix / scale, atol=2.0 * Z * np.sqrt(2.0 / count)
    )


class TestExact:
    @pytest.fixture
    def sites(self, rng: np.random.Generator) -> FloatArray:
        return sites_in(rng, 25, 2)

    def process(self, sites: FloatArray) -> Exact:
        return Exact.build(Kernel(), sites, 8.0, 80.0)

    def test_draws_pass_through_the_values_at_the_sites(
        self, sites: FloatArray, rng: np.random.Generator
    ) -> None:
        process = self.process(sites)
        log_l, beta = np.log([10.0, 23.0, 60.0]), rng.standard_normal((3, 25))
        fields = process.evaluate(process.features(sites), jnp.asarray(log_l), jnp.asarray(beta))
        draws = process.draws(sites, log_l, process.prepare(log_l, beta, 0), 0)
        np.testing.assert_allclose(draws, np.asarray(fields).T, atol=1e-3)

    def test_draws_follow_the_exact_conditional(
        self, sites: FloatArray, rng: np.random.Generator
    ) -> None:
        count, lengthscale = 3000, 22.0
        process, kernel = self.process(sites), Kernel()
        f = rng.multivariate_normal(np.zeros(25), dense(kernel, sites, sites, lengthscale))
        beta = np.tile(np.linalg.solve(process.root(math.log(lengthscale)), f), (count, 1))
        new = np.array([[50.0, 35.0], [52.0, 37.0], [120.0, 35.0], [400.0, 400.0]])
        log_l = np.full(count, math.log(lengthscale))
        draws = process.draws(new, log_l, process.prepare(log_l, beta, 5), 5)
        mean, matrix = conditional(
            dense(kernel, sites, sites, lengthscale),
            dense(kernel, new, sites, lengthscale),
            dense(kernel, new, new, lengthscale),
            f,
        )
        assert_moments(draws, mean, matrix)
        assert mean[3] == pytest.approx(0.0, abs=1e-6)  # far away the prior returns
        assert matrix[3, 3] == pytest.approx(1.0, abs=1e-6)

    def test_draws_do_not_depend_on_how_sites_are_grouped(
        self, sites: FloatArray, rng: np.random.Generator
    ) -> None:
        process, new = self.process(sites), sites_in(rng, 12, 2)
        log_l, beta = np.log([10.0, 23.0, 60.0]), rng.standard_normal((3, 25))
        prepared = process.prepare(log_l, beta, 5)
        whole = process.draws(new, log_l, prepared, 5)
        parts = [process.draws(part, log_l, prepared, 5) for part in np.split(new, 3)]
        np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-10)
        other = process.draws(new, log_l, process.prepare(log_l, beta, 6), 6)
        assert not np.allclose(other, whole)

    def test_fields_have_the_covariance_of_the_kernel(
        self, sites: FloatArray, rng: np.random.Generator
    ) -> None:
        process, log_l = self.process(sites), math.log(30.0)
        columns = process.evaluate(
            process.features(sites), jnp.full(25, log_l), jnp.eye(25)
        )  # (J, n): one column of the factor each
        matrix = np.asarray(columns).T @ np.asarray(columns)
        np.testing.assert_allclose(matrix, dense(Kernel(), sites, sites, 30.0), atol=1e-4)
        np.testing.assert_array_equal(process.log_sd(jnp.asarray(log_l), 25), np.zeros(25))

    def test_has_features_at_its_own_sites_only(self, sites: FloatArray) -> None:
        with pytest.raises(ValueError, match="at the training sites only"):
            self.process(sites).features(sites + 1.0)

    def test_repeated_sites_have_equal_values(self, rng: np.random.Generator) -> None:
        sites = sites_in(rng, 12, 2)
        sites = np.concatenate([sites, sites[:3]])
        process = self.process(sites)
        fields = process.evaluate(
            process.features(sites), jnp.log(jnp.asarray([20.0])), rng.standard_normal((1, 15))
        )
        np.testing.assert_allclose(fields[0, :3], fields[0, 12:], atol=1e-3)


class TestDual:
    @pytest.fixture
    def dual(self) -> Dual:
        c = chosen(Kernel(), 2, 51)
        return Dual.build(c.basis, c.sites, 0.5 * c.lengthscales[0], 2.0 * c.lengthscales[-1])

    def test_is_chosen_for_few_sites(self) -> None:
        sites = sites_in(np.random.default_rng(3), 51, 2)
        geometry = Geometry.of(sites)
        found = choose("auto", Kernel(), geometry, default_lengthscales(geometry, Kernel()))
        assert isinstance(found.representation, Dual)
        assert set(found.sizes.values()) == {51}
        assert "sampled through the values at the 51 sites" in found.note

    def test_fields_have_the_covariance_of_the_basis(self, dual: Dual) -> None:
        columns = np.asarray(
            dual.evaluate(dual.features(dual.sites), jnp.full(51, math.log(25.0)), jnp.eye(51))
        )
        exact = implied(dual.basis, dual.sites, dual.sites, 25.0)
        np.testing.assert_allclose(columns.T @ columns, exact, atol=3e-4)

    def test_lifted_coefficients_pass_through_the_values(
        self, dual: Dual, rng: np.random.Generator
    ) -> None:
        log_l, beta = np.log([15.0, 30.0, 90.0]), rng.standard_normal((3, 51))
        values = dual.evaluate(dual.features(dual.sites), jnp.asarray(log_l), jnp.asarray(beta))
        np.testing.assert_allclose(dual.values(log_l, beta), values, atol=1e-10)
        gamma = dual.prepare(log_l, beta, 3)
        assert gamma.shape == (3, dual.basis.n_coefficients)
        at_sites = dual.draws(dual.sites, log_l, gamma, seed=0)
        np.testing.assert_allclose(at_sites.T, values, atol=1e-4)

    def test_lifted_draws_follow_the_exact_conditional(
        self, dual: Dual, rng: np.random.Generator
    ) -> None:
        count, lengthscale = 3000, 25.0
        matrix = implied(dual.basis, dual.sites, dual.sites, lengthscale)
        beta = rng.standard_normal(51)
        log_l = np.full(count, math.log(lengthscale))
        f = dual.values(log_l[:1], beta[None])[0]
        gamma = dual.prepare(log_l, np.tile(beta, (count, 1)), 3)
        new = np.array([[50.0, 35.0], [53.0, 37.0], [120.0, 35.0], [-45.0, 100.0]])
        mean, spread = conditional(
            matrix,
            implied(dual.basis, new, dual.sites, lengthscale),
            implied(dual.basis, new, new, lengthscale),
            f,
        )
        assert_moments(dual.draws(new, log_l, gamma, seed=0), mean, spread)

    @pytest.mark.parametrize("lengthscale", [12.0, 40.0, 95.0])
    def test_prior_draws_have_the_prior_spread_everywhere(
        self, dual: Dual, lengthscale: float, rng: np.random.Generator
    ) -> None:
        count = 400
        log_l = np.full(count, math.log(lengthscale))
        gamma = dual.prepare(log_l, rng.standard_normal((count, 51)), 3)
        new = rng.uniform(*dual.basis.domain, (30, 2))
        variance = np.var(dual.draws(new, log_l, gamma, seed=0), axis=1)
        np.testing.assert_allclose(variance, 1.0, atol=Z * np.sqrt(2.0 / count))

    def test_coefficients_are_waves_in_order(self, dual: Dual) -> None:
        """At the middle of the range each moves the field along an axis of its own."""
        middle = float(np.mean(dual.nodes.ends))
        gram = dual.root(middle).T @ dual.root(middle)
        np.testing.assert_allclose(gram, np.diag(np.diag(gram)), atol=1e-6)
        assert np.all(np.diff(np.diag(gram)) <= 1e-9)

    def test_has_features_at_its_own_sites_only(self, dual: Dual) -> None:
        with pytest.raises(ValueError, match="at the training sites only"):
            dual.features(dual.sites + 1.0)

    def test_ends_where_its_basis_ends(self, dual: Dual) -> None:
        asked = np.array([[50.0, 35.0], [1000.0, 35.0]])
        np.testing.assert_array_equal(dual.outside(asked), [False, True])


REPRESENTATIONS: dict[str, Any] = {
    "hilbert": lambda sites: chosen(Kernel(), 2, len(sites)).basis,
    "fourier": lambda sites: Fourier.build(Kernel(), 2, 64, np.random.default_rng(1)),
    "exact": lambda sites: Exact.build(Kernel(), sites, 5.0, 150.0),
    "dual": lambda sites: Dual.build(chosen(Kernel(), 2, len(sites)).basis, sites, 5.0, 150.0),
}


@pytest.mark.parametrize("name", REPRESENTATIONS)
def test_gradients_of_fields_by_differences(name: str) -> None:
    rng = np.random.default_rng(8)
    sites = sites_in(np.random.default_rng(3), 30, 2)
    process = REPRESENTATIONS[name](sites)
    features = jnp.asarray(process.features(sites))
    beta = jnp.asarray(rng.standard_normal((1, process.n_coefficients)))
    direction = jnp.asarray(rng.standard_normal(30))

    @jax.jit
    def along(log_l: Any) -> Any:
        gamma = beta * jnp.exp(process.log_sd(log_l, process.n_coefficients))
        return process.evaluate(features, log_l[None], gamma)[0] @ direction

    h = 1e-5
    for value in (2.5, 3.3, 4.4):
        log_l = jnp.asarray(value)
        slope = (along(log_l + h) - along(log_l - h)) / (2.0 * h)
        assert float(jax.grad(along)(log_l)) == pytest.approx(float(slope), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", REPRESENTATIONS)
def test_representations_pass_through_compiled_functions(name: str) -> None:
    sites = sites_in(np.random.default_rng(3), 30, 2)
    process = REPRESENTATIONS[name](sites)
    beta = np.random.default_rng(8).standard_normal((2, process.n_coefficients))
    log_l, features = jnp.asarray([2.9, 3.7]), process.features(sites)
    compiled = jax.jit(lambda p, f, u, b: p.evaluate(f, u, b))(process, features, log_l, beta)
    np.testing.assert_allclose(
        compiled, process.evaluate(features, log_l, jnp.asarray(beta)), atol=1e-9
    )
