"""The model's density against the equations written out with SciPy, one site at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import special, stats

from bne.kernels import Kernel
from bne.model import (
    NEVER,
    Centring,
    ModelData,
    Process,
    Structure,
    coefficients,
    evaluate_fields,
    helmert,
    log_density,
    log_prior_sd,
    mixture_of,
    sample_prior,
    softmax_weights,
)
from bne.priors import Prior, half_normal, inverse_gamma, log_normal
from bne.processes import Hilbert

FloatArray = NDArray[np.float64]

N_SITES, N_MODELS, N_TREND = 7, 3, 2
SIZES = {"weights": 5, "residual": 9, "log_scale": 5, "log_skew": 3}
PRIORS: dict[str, Prior] = {
    "sigma": half_normal(1.3),
    "amplitude.weights": half_normal(2.0),
    "amplitude.residual": half_normal(0.7),
    "amplitude.log_scale": log_normal(0.4, 0.5),
    "amplitude.log_skew": half_normal(1.0),
    "lengthscale.weights": inverse_gamma(4.0, 90.0),
    "lengthscale.residual": inverse_gamma(3.0, 40.0),
    "lengthscale.log_scale": inverse_gamma(5.0, 150.0),
    "lengthscale.log_skew": inverse_gamma(2.0, 60.0),
}
LAWS: dict[str, Any] = {
    "sigma": stats.halfnorm(scale=1.3),
    "amplitude.weights": stats.halfnorm(scale=2.0),
    "amplitude.residual": stats.halfnorm(scale=0.7),
    "amplitude.log_scale": stats.lognorm(0.5, scale=0.4),
    "amplitude.log_skew": stats.halfnorm(scale=1.0),
    "lengthscale.weights": stats.invgamma(4.0, scale=90.0),
    "lengthscale.residual": stats.invgamma(3.0, scale=40.0),
    "lengthscale.log_scale": stats.invgamma(5.0, scale=150.0),
    "lengthscale.log_skew": stats.invgamma(2.0, scale=60.0),
}
STRUCTURES = {
    "weights": ("weights",),
    "residual": ("residual",),
    "residual, scale": ("residual", "log_scale"),
    "residual, skew": ("residual", "log_skew"),
    "residual, scale, skew": ("residual", "log_scale", "log_skew"),
    "joint": ("weights", "residual", "log_scale", "log_skew"),
    "weights, skew": ("weights", "log_skew"),
    "noise only": (),
}


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def structure_of(names: tuple[str, ...], n_trend: int = 0, learned: bool = True) -> Structure:
    return Structure(
        tuple(
            Process(name, N_MODELS - 1 if name == "weights" else 1, SIZES[name], learned)
            for name in names
        ),
        N_MODELS,
        n_trend,
    )


class Case(NamedTuple):
    """Data of a small fit, the basis in plain numbers, and a mixture that is given."""

    data: ModelData
    sites: FloatArray
    periods: float
    mixture: FloatArray


@cache
def case() -> Case:
    rng = np.random.default_rng(77)
    sites = np.sort(rng.uniform(0.0, 100.0, (N_SITES, 1)), axis=0)
    domain, period = np.array([[-20.0], [120.0]]), 180.0
    basis = Hilbert.build(
        Kernel("matern32"), domain, np.array([period]), 4.5 * 2 * math.pi / period
    )
    assert basis.n_coefficients == 9
    base = rng.normal(8.0, 2.0, (N_SITES, N_MODELS))
    data = ModelData(
        response=base[:, 0] + rng.normal(size=N_SITES),
        base=base,
        trend=rng.standard_normal((N_SITES, N_TREND)),
        features=basis.features(sites),
        representation=basis,
        priors=PRIORS,
    )
    return Case(data, sites, period, base @ np.array([0.2, 0.5, 0.3]))


def data_for(structure: Structure) -> ModelData:
    return case().data.non_centred(structure)


def plain_field(name: str, z: FloatArray, amplitude: float, lengthscale: float) -> FloatArray:
    """Field of one process: cosines and sines with the Matern-3/2 spectrum, unit variance."""
    sites, period = case().sites[:, 0] + 20.0, case().periods
    spectrum, waves = [1.0], [np.ones(N_SITES)]
    for j in range(1, (SIZES[name] - 1) // 2 + 1):
        omega = 2.0 * math.pi * j / period
        density = (1.0 + (lengthscale * omega) ** 2 / 3.0) ** -2.0
        spectrum += [2.0 * density, 2.0 * density]
        waves += [np.cos(omega * sites), np.sin(omega * sites)]
    variance = np.array(spectrum)
    total = 1.0 + 0.5 * variance[1:].sum()  # cos^2 + sin^2 share the variance of a pair
    return amplitude * (np.sqrt(variance / total) * z) @ np.array(waves)


def transcription(structure: Structure, position: FloatArray, learned: bool = True) -> float:
    """The posterior, with every prior and the likelihood from SciPy."""
    data, numbers = case().data, iter(position)
    log_p = 0.0

    def hyper(name: str) -> float:
        nonlocal log_p
        u = float(next(numbers))
        log_p += LAWS[name].logpdf(math.exp(u)) + u
        return math.exp(u)

    sigma = hyper("sigma")
    names = structure.names
    scales = {}
    for name in names:
        amplitude = hyper(f"amplitude.{name}") if learned else 1.0
        scales[name] = (amplitude, hyper(f"lengthscale.{name}"))
    beta = np.array([next(numbers) for _ in range(structure.n_trend)])
    log_p += stats.norm.logpdf(beta).sum()
    fields = {}
    for name in names:
        copies = N_MODELS - 1 if name == "weights" else 1
        z = np.array([[next(numbers) for _ in range(SIZES[name])] for _ in range(copies)])
        log_p += stats.norm.logpdf(z).sum()
        fields[name] = np.array([plain_field(name, row, *scales[name]) for row in z])
    assert next(numbers, None) is None
    mean = case().mixture.copy()
    if "weights" in names:
        v1, v2 = fields["weights"]
        w = np.array(
            [
                v1 / math.sqrt(2.0) + v2 / math.sqrt(6.0),
                -v1 / math.sqrt(2.0) + v2 / math.sqrt(6.0),
                -2.0 * v2 / math.sqrt(6.0),
            ]
        )
        mean = np.sum(special.softmax(w, axis=0) * data.base.T, axis=0)
    if structure.n_trend:
        mean = mean + data.trend @ beta
    if "residual" in names:
        mean = mean + fields["residual"][0]
    scale = sigma * np.exp(fields["log_scale"][0]) if "log_scale" in names else np.full(7, sigma)
    if "log_skew" in names:
        skew = np.exp(-3.0 + fields["log_skew"][0])
        return log_p + stats.exponnorm.logpdf(data.response, skew / scale, mean, scale).sum()
    return log_p + stats.norm.logpdf(data.response, mean, scale).sum()


def positions(structure: Structure, count: int = 6, seed: int = 5) -> FloatArray:
    rng = np.random.default_rng(seed)
    found = 0.7 * rng.standard_normal((count, structure.dimension))
    for i, name in enumerate(structure.hyperparameters):
        if "lengthscale" in name:
            found[:, i] += math.log(30.0)
    return found


def density(structure: Structure, data: ModelData) -> Callable[[Any], Any]:
    return jax.jit(lambda q: log_density(structure, q, data, case().mixture))


class TestLogDensity:
    @pytest.mark.parametrize("n_trend", [0, N_TREND])
    @pytest.mark.parametrize("names", STRUCTURES.values(), ids=STRUCTURES)
    def test_against_the_equations(self, names: tuple[str, ...], n_trend: int) -> None:
        structure = structure_of(names, n_trend)
        points = positions(structure)
        function = density(structure, data_for(structure))
        mine = np.array([float(function(q)) for q in points])
        exact = np.array([transcription(structure, q) for q in points])
        assert np.ptp(exact) > 1.0
        np.testing.assert_allclose(mine - mine[0], exact - exact[0], rtol=1e-8, atol=1e-7)

    def test_with_amplitudes_fixed_at_one(self) -> None:
        structure = structure_of(STRUCTURES["joint"], learned=False)
        assert not any("amplitude" in name for name in structure.hyperparameters)
        points = positions(structure)
        function = density(structure, data_for(structure))
        mine = np.array([float(function(q)) for q in points])
        exact = np.array([transcription(structure, q, learned=False) for q in points])
        np.testing.assert_allclose(mine - mine[0], exact - exact[0], rtol=1e-8, atol=1e-7)

    @pytest.mark.parametrize("names", STRUCTURES.values(), ids=STRUCTURES)
    def test_gradient_by_differences(self, names: tuple[str, ...]) -> None:
        structure = structure_of(names, N_TREND)
        function = density(structure, data_for(structure))
        gradient, h = jax.jit(jax.grad(function)), 1e-5
        for q in positions(structure, 2):
            steps = h * np.eye(structure.dimension)
            slope = [float(function(q + e) - function(q - e)) / (2.0 * h) for e in steps]
            np.testing.assert_allclose(gradient(q), slope, rtol=1e-5, atol=1e-5)

    def test_single_precision_agrees(self) -> None:
        structure = structure_of(STRUCTURES["joint"], N_TREND)
        data = data_for(structure)
        for q in positions(structure, 2):
            exact = float(density(structure, data)(q))
            with jax.enable_x64(False):
                mine = density(structure, data)(q)
            assert mine.dtype == jnp.float32
            assert float(mine) == pytest.approx(exact, rel=1e-4, abs=1e-2)

    def test_the_mean_of_the_log_skewness_is_an_argument(self) -> None:
        structure = structure_of(("log_skew",))
        data = data_for(structure)
        low = replace(data, log_skew_mean=-60.0)
        plain = structure_of(())
        for q in positions(structure, 3):  # without skewness only the prior is left beside it
            extra = (
                PRIORS["amplitude.log_skew"].log_density(q[1])
                + PRIORS["lengthscale.log_skew"].log_density(q[2])
                - 0.5 * np.sum(q[3:] ** 2)
            )
            mine = log_density(structure, jnp.asarray(q), low, case().mixture)
            normal = log_density(plain, jnp.asarray(q[:1]), data_for(plain), case().mixture)
            assert float(mine) == pytest.approx(float(normal + extra), rel=1e-9)


TURNS = {"weights": -1.0, "residual": -4.0, "log_scale": -2.0, "log_skew": 100.0}


def centred(structure: Structure) -> ModelData:
    """Data with each process centred in its own way, unevenly over its coefficients."""
    rng = np.random.default_rng(9)
    return replace(
        case().data,
        centring={
            p.name: Centring(rng.normal(TURNS[p.name], 0.5, p.size)) for p in structure.processes
        },
    )


class TestCentring:
    def test_changes_the_density_by_its_jacobian_alone(self) -> None:
        structure = structure_of(STRUCTURES["joint"], N_TREND)
        plain, moved = data_for(structure), centred(structure)
        f_plain, f_moved = density(structure, plain), density(structure, moved)
        for q in positions(structure):
            other, log_jacobian = q.copy(), 0.0
            for p in structure.processes:
                u = (
                    np.asarray(log_prior_sd(structure, q, plain, p))
                    - moved.centring[p.name].log_turn
                )
                log_spread = np.log(np.hypot(1.0, np.exp(u)))
                other[structure.blocks()[p.name]] *= np.tile(np.exp(log_spread), p.copies)
                log_jacobian -= p.copies * log_spread.sum()
                gamma, _ = coefficients(structure, q, plain, p)
                same, _ = coefficients(structure, other, moved, p)
                np.testing.assert_allclose(same, gamma, rtol=1e-10)
            assert float(f_moved(other)) == pytest.approx(float(f_plain(q)) + log_jacobian)

    def test_follows_the_prior_above_the_turn_and_levels_off_below(self) -> None:
        spread = Centring(np.array([0.0, 5.0, NEVER])).log_spread
        np.testing.assert_allclose(spread(20.0, np), [20.0, 15.0, 0.0], atol=1e-10)
        np.testing.assert_allclose(spread(-20.0, np), 0.0, atol=1e-10)

    def test_leaves_z_as_uncertain_whatever_the_amplitude(self) -> None:
        """Given data of precision tau^-2, gamma has precision sd^-2 + tau^-2; z has sd one."""
        log_sd, log_turn = np.linspace(-3.0, 3.0, 7), 0.4
        sd_gamma = (np.exp(-2.0 * log_sd) + np.exp(-2.0 * log_turn)) ** -0.5
        rho = np.exp(Centring(np.asarray(log_turn)).log_spread(log_sd, np))
        np.testing.assert_allclose(sd_gamma * rho / np.exp(log_sd), 1.0, rtol=1e-12)

    def test_leaves_the_law_of_the_coefficients(self) -> None:
        structure = structure_of(("residual",))
        (process,) = structure.processes
        for data in (data_for(structure), centred(structure)):
            draws = sample_prior(structure, data, np.random.default_rng(3), 300)
            standard = []
            for q in draws:
                gamma, _ = coefficients(structure, q, data, process)
                standard.append(gamma[0] / np.exp(log_prior_sd(structure, q, data, process)))
            assert stats.kstest(np.ravel(standard), stats.norm.cdf).pvalue > 1e-5

    def test_gradient_by_differences(self) -> None:
        structure = structure_of(STRUCTURES["joint"], N_TREND)
        function = density(structure, centred(structure))
        gradient, h = jax.jit(jax.grad(function)), 1e-5
        (q,) = positions(structure, 1)
        steps = h * np.eye(structure.dimension)
        slope = [float(function(q + e) - function(q - e)) / (2.0 * h) for e in steps]
        np.testing.assert_allclose(gradient(q), slope, rtol=1e-5, atol=1e-5)


class TestWeights:
    @pytest.mark.parametrize("n", [1, 2, 3, 7])
    def test_contrasts_are_orthonormal_and_sum_to_zero(self, n: int) -> None:
        basis = helmert(n)
        assert basis.shape == (n, n - 1)
        np.testing.assert_allclose(basis.T @ basis, np.eye(n - 1), atol=1e-12)
        np.testing.assert_allclose(basis.sum(axis=0), 0.0, atol=1e-12)

    @pytest.mark.parametrize("n", [2, 3, 7])
    def test_contrasts_give_the_prior_law_of_the_weights(self, n: int) -> None:
        """Only differences of scores matter: their covariance is that of independent scores."""
        differences = np.eye(n)[:-1] - np.eye(n)[1:]
        scores = helmert(n) @ helmert(n).T  # covariance of B v with v ~ N(0, I)
        np.testing.assert_allclose(
            differences @ scores @ differences.T, differences @ differences.T, atol=1e-12
        )

    @pytest.mark.parametrize("n", [2, 3, 7])
    @pytest.mark.parametrize("xp", [np, jnp])
    def test_sum_to_one(self, n: int, xp: Any, rng: np.random.Generator) -> None:
        contrasts = xp.asarray(30.0 * rng.standard_normal((n - 1, 40)))
        omega = np.asarray(softmax_weights(contrasts, n, xp))
        np.testing.assert_allclose(omega.sum(axis=0), 1.0, rtol=1e-12)
        assert (omega >= 0.0).all()
        exact = special.softmax(helmert(n) @ np.asarray(contrasts), axis=0)
        np.testing.assert_allclose(omega, exact, rtol=1e-10, atol=1e-300)

    def test_are_finite_for_extreme_contrasts(self) -> None:
        omega = softmax_weights(jnp.asarray([[1e5, -1e5], [3e4, 2e5]]), 3)
        np.testing.assert_allclose(np.asarray(omega).sum(axis=0), 1.0)

    def test_follow_a_permutation_of_the_scores(self, rng: np.random.Generator) -> None:
        scores = rng.standard_normal((4, 10))
        basis = helmert(4)
        omega = softmax_weights(jnp.asarray(basis.T @ scores), 4)
        for order in itertools.permutations(range(4)):
            permuted = softmax_weights(jnp.asarray(basis.T @ scores[list(order)]), 4)
            np.testing.assert_allclose(permuted, np.asarray(omega)[list(order)], rtol=1e-10)

    @pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1)])
    def test_posterior_follows_a_permutation_of_the_base_models(
        self, order: tuple[int, ...]
    ) -> None:
        structure = structure_of(("weights",))
        data = data_for(structure)
        permuted = replace(data, base=data.base[:, list(order)])
        turn = helmert(3).T @ np.eye(3)[list(order)] @ helmert(3)
        block = structure.blocks()["weights"]
        for q in positions(structure, 3):
            other = q.copy()
            other[block] = (turn @ q[block].reshape(2, -1)).ravel()
            mine = float(log_density(structure, jnp.asarray(q), data, None))
            assert float(log_density(structure, jnp.asarray(other), permuted, None)) == (
                pytest.approx(mine, rel=1e-12)
            )

    def test_one_base_model_has_weight_one(self) -> None:
        for xp in (np, jnp):
            omega = softmax_weights(xp.zeros((0, 5)), 1, xp)
            np.testing.assert_array_equal(omega, np.ones((1, 5)))

    @pytest.mark.parametrize("count", [2, 5])
    def test_reproduce_a_base_model_that_is_repeated(
        self, count: int, rng: np.random.Generator
    ) -> None:
        structure = Structure((Process("weights", count - 1, 9),), count)
        base = np.repeat(case().data.base[:, :1], count, axis=1)
        data = replace(case().data, base=base).non_centred(structure)
        q = jnp.asarray(rng.standard_normal(structure.dimension) + 1.0)
        fields, _ = evaluate_fields(structure, q, data)
        np.testing.assert_allclose(
            mixture_of(structure, fields, data, None), base[:, 0], rtol=1e-13
        )

    def test_a_given_mixture_is_used_as_it_is(self) -> None:
        structure = structure_of(("residual",))
        given = case().mixture
        assert mixture_of(structure, {}, data_for(structure), given) is given


class TestStructure:
    @pytest.mark.parametrize("learned", [True, False])
    @pytest.mark.parametrize("n_trend", [0, 3])
    @pytest.mark.parametrize("names", STRUCTURES.values(), ids=STRUCTURES)
    def test_every_place_of_a_position_is_used_once(
        self, names: tuple[str, ...], n_trend: int, learned: bool
    ) -> None:
        structure = structure_of(names, n_trend, learned)
        places = np.arange(structure.dimension)
        used = [structure.log_sigma(places), *structure.trend(places)]
        for p in structure.processes:
            used += list(structure.standardised(places, p).ravel())
            used.append(structure.log_lengthscale(places, p.name))
            if p.learned_amplitude:
                used.append(structure.log_amplitude(places, p.name))
        np.testing.assert_array_equal(np.sort(used), places)
        blocks = structure.blocks().values()
        covered = [i for block in blocks for i in range(block.start, block.stop)]
        start = structure.n_hyper + structure.n_trend
        np.testing.assert_array_equal(covered, np.arange(start, structure.dimension))

    def test_reads_many_positions_at_once(self, rng: np.random.Generator) -> None:
        structure = structure_of(STRUCTURES["joint"], 2)
        many = rng.standard_normal((4, 5, structure.dimension))
        assert structure.log_lengthscale(many, "residual").shape == (4, 5)
        assert structure.trend(many).shape == (4, 5, 2)
        weights = structure.processes[0]
        found = structure.standardised(many, weights)
        assert found.shape == (4, 5, 2, 5)
        np.testing.assert_array_equal(found[2, 3], structure.standardised(many[2, 3], weights))

    def test_a_fixed_amplitude_is_one(self, rng: np.random.Generator) -> None:
        structure = structure_of(("residual",), learned=False)
        many = rng.standard_normal((4, structure.dimension))
        np.testing.assert_array_equal(structure.log_amplitude(many, "residual"), np.zeros(4))

    def test_knows_its_processes(self) -> None:
        structure = structure_of(("residual", "log_scale"))
        assert "residual" in structure
        assert "weights" not in structure
        assert structure.hyperparameters == (
            "log_sigma",
            "log_amplitude.residual",
            "log_lengthscale.residual",
            "log_amplitude.log_scale",
            "log_lengthscale.log_scale",
        )


@pytest.fixture(scope="module")
def draws() -> FloatArray:
    structure = structure_of(STRUCTURES["joint"], N_TREND)
    with jax.enable_x64(True):
        return sample_prior(structure, data_for(structure), np.random.default_rng(4), 400)


class TestPriorDraws:
    def test_hyperparameters_follow_their_laws(self, draws: FloatArray) -> None:
        structure = structure_of(STRUCTURES["joint"], N_TREND)
        for i, name in enumerate(structure.hyperparameters):
            law = LAWS[name.removeprefix("log_")]
            assert stats.kstest(np.exp(draws[:, i]), law.cdf).pvalue > 1e-6

    def test_all_else_is_standard_normal(self, draws: FloatArray) -> None:
        rest = draws[:, structure_of(STRUCTURES["joint"]).n_hyper :]
        assert stats.kstest(rest.ravel(), stats.norm.cdf).pvalue > 1e-5
        matrix = np.cov(rest.T)
        z = float(stats.norm.isf(1e-8))  # some 400 entries
        error = z * np.sqrt(2.0 / len(draws))
        np.testing.assert_allclose(matrix, np.eye(len(matrix)), atol=error * 1.2)

    def test_fields_have_the_variance_of_their_amplitude(self, draws: FloatArray) -> None:
        structure = structure_of(STRUCTURES["joint"], N_TREND)
        data = data_for(structure)
        fields = jax.jit(jax.vmap(lambda q: evaluate_fields(structure, q, data)[0]))(draws)
        for p in structure.processes:
            amplitude = np.exp(structure.log_amplitude(draws, p.name))
            values = np.asarray(fields[p.name]) / amplitude[:, None, None]
            assert values.shape == (len(draws), p.copies, N_SITES)
            error = float(stats.norm.isf(1e-7)) * np.sqrt(2.0 / len(draws))
            np.testing.assert_allclose(values.var(axis=0), 1.0, atol=1.2 * error)

    def test_repeat_with_their_seed(self) -> None:
        structure = structure_of(("residual",))
        sample = partial(sample_prior, structure, data_for(structure), size=3)
        np.testing.assert_array_equal(
            sample(np.random.default_rng(1)), sample(np.random.default_rng(1))
        )
