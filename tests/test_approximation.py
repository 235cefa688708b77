"""The choice of a representation: which one, how many functions, and what it says."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from bne.approximation import (
    MAX_FUNCTIONS,
    TRUNCATION,
    Approximation,
    Geometry,
    choose,
    default_lengthscales,
)
from bne.errors import InputError
from bne.kernels import Kernel
from bne.priors import inverse_gamma_between
from bne.processes import Fourier, Hilbert
from bne.site_processes import Dual, Exact

FloatArray = NDArray[np.float64]

PROCESSES = {"weights", "residual", "log_scale", "log_skew"}


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def sites_in(dim: int, n: int, seed: int = 2) -> FloatArray:
    rng = np.random.default_rng(seed)
    return rng.uniform(size=(n, dim)) * np.array([100.0, 70.0, 80.0])[:dim]


def chosen(sites: FloatArray, gp: str = "auto", **options: int) -> Approximation:
    geometry, kernel = Geometry.of(sites), Kernel()
    return choose(gp, kernel, geometry, default_lengthscales(geometry, kernel), **options)


def assert_usable(approximation: Approximation, sites: FloatArray) -> None:
    """Features are finite, and the prior variance of every process is about one."""
    process, log_l = approximation.representation, np.log(40.0)
    features = process.features(sites)
    assert np.isfinite(features).all()
    for size in set(approximation.sizes.values()):
        assert size <= process.n_coefficients
        sd = np.exp(np.asarray(process.log_sd(jnp.asarray(log_l), size)))
        if isinstance(process, Exact | Dual):
            root = process.columns(features, jnp.asarray(log_l), size)
            variance = np.sum(np.asarray(root) ** 2, axis=1)
        else:
            each = np.eye(size, process.n_coefficients) * sd[:, None]
            variance = np.sum(process.draws(sites, np.full(size, log_l), each, 0) ** 2, axis=1)
        np.testing.assert_allclose(variance, 1.0, atol=0.6)  # random features are coarse
        assert np.mean(variance) == pytest.approx(1.0, abs=0.2)


class TestGeometry:
    def test_default_domain_is_half_a_width_wider_on_every_side(self) -> None:
        geometry = Geometry.of(np.array([[0.0, 10.0], [100.0, 50.0], [40.0, 30.0]]))
        np.testing.assert_allclose(geometry.domain, [[-50.0, -10.0], [150.0, 70.0]])
        assert geometry.dim == 2
        assert geometry.width == 100.0

    def test_given_domain_holds_all_sites_with_a_little_slack(self) -> None:
        geometry = Geometry.of(np.array([[0.0], [10.0]]), np.array([[-5.0], [4.0]]))
        np.testing.assert_allclose(geometry.domain, [[-5.15], [10.15]])

    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_spacing_is_the_neighbour_distance_of_a_grid(self, dim: int) -> None:
        axis = np.linspace(0.0, 90.0, 10)
        sites = np.stack([g.ravel() for g in np.meshgrid(*[axis] * dim)], axis=1)
        assert Geometry.of(sites).spacing == pytest.approx(9.0)

    def test_repeated_sites_do_not_bring_neighbours_nearer(self) -> None:
        sites = sites_in(2, 40)
        repeated = np.concatenate([sites, sites, sites])
        assert Geometry.of(repeated).spacing == Geometry.of(sites).spacing


class TestLengthscales:
    @pytest.mark.parametrize(("dim", "n"), [(1, 10), (1, 60), (2, 10), (2, 51), (2, 300), (3, 40)])
    def test_lie_between_neighbour_distance_and_width(self, dim: int, n: int) -> None:
        geometry = Geometry.of(sites_in(dim, n))
        priors = default_lengthscales(geometry, Kernel())
        assert set(priors) == PROCESSES
        for name, prior in priors.items():
            low, high = prior.quantile(np.array([0.01, 0.99]))
            assert high == pytest.approx(geometry.width, rel=1e-4)
            assert low > 0.99 * min(geometry.spacing, 0.25 * geometry.width)
            if name != "residual":
                assert low >= priors["residual"].quantile(0.01) * (1 - 1e-6)

    @pytest.mark.parametrize(("dim", "n"), [(1, 60), (2, 51)])
    def test_of_the_residual_begin_at_the_neighbour_distance(self, dim: int, n: int) -> None:
        geometry = Geometry.of(sites_in(dim, n))
        low = default_lengthscales(geometry, Kernel())["residual"].quantile(0.01)
        assert low == pytest.approx(geometry.spacing, rel=1e-4)

    @pytest.mark.parametrize(("dim", "n"), [(1, 3000), (2, 3000), (3, 3000)])
    def test_are_no_shorter_than_the_basis_resolves(self, dim: int, n: int) -> None:
        geometry = Geometry.of(sites_in(dim, n))
        priors = default_lengthscales(geometry, Kernel())
        assert priors["residual"].quantile(0.01) > 1.5 * geometry.spacing
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = choose("hilbert", Kernel(), geometry, priors)
        assert found.representation.n_coefficients <= MAX_FUNCTIONS[dim]

    def test_follow_the_units_of_the_coordinates(self) -> None:
        sites = sites_in(2, 51)
        one = default_lengthscales(Geometry.of(sites), Kernel())
        other = default_lengthscales(Geometry.of(1e-4 * sites + 7.0), Kernel())
        for name in PROCESSES:
            p = np.array([0.01, 0.5, 0.99])
            np.testing.assert_allclose(other[name].quantile(p), 1e-4 * one[name].quantile(p), 1e-3)

    @pytest.mark.parametrize("sites", [np.zeros((1, 2)), np.full((4, 1), 3.0)])
    def test_cannot_be_learned_at_one_place(self, sites: FloatArray) -> None:
        with pytest.raises(InputError, match="all training sites lie at one place"):
            default_lengthscales(Geometry.of(sites), Kernel())


class TestChoice:
    @pytest.mark.parametrize(("dim", "n"), [(1, 300), (2, 400), (3, 1500)])
    def test_of_many_sites_is_a_hilbert_space(self, dim: int, n: int) -> None:
        sites = sites_in(dim, n)
        found = chosen(sites)
        assert found.kind == "hilbert"
        assert isinstance(found.representation, Hilbert)
        assert set(found.sizes) == PROCESSES
        assert max(found.sizes.values()) == found.representation.n_coefficients
        assert found.note.startswith(f"Hilbert-space basis of {max(found.sizes.values())} functi")
        assert "at most 4.0% of the variance with prior probability 0.95" in found.note
        assert_usable(found, sites[:100])

    @pytest.mark.parametrize(("dim", "n"), [(2, 10), (2, 51), (3, 60)])
    def test_of_few_sites_is_sampled_through_their_values(self, dim: int, n: int) -> None:
        sites = sites_in(dim, n)
        found = chosen(sites)
        assert found.kind == "hilbert"
        assert isinstance(found.representation, Dual)
        assert set(found.sizes.values()) == {n}
        assert set(found.sizes) == PROCESSES
        assert f"sampled through the values at the {n} sites" in found.note
        assert_usable(found, sites)

    def test_of_ten_sites_on_a_line_has_few_functions(self) -> None:
        sites = sites_in(1, 10)
        found = chosen(sites)
        basis = getattr(found.representation, "basis", found.representation)
        assert basis.n_coefficients < 50
        assert_usable(found, sites)

    @pytest.mark.parametrize("n", [2, 3])
    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_of_hardly_any_sites_works(self, dim: int, n: int) -> None:
        sites = sites_in(dim, n)
        assert_usable(chosen(sites), sites)

    def test_the_truncation_is_within_its_bound(self) -> None:
        geometry, kernel = Geometry.of(sites_in(2, 400)), Kernel()
        priors = default_lengthscales(geometry, kernel)
        found = choose("hilbert", kernel, geometry, priors)
        squared = np.asarray(found.representation.squared_frequencies)
        for name, size in found.sizes.items():
            highest = np.sqrt(squared[size - 1])
            tail = kernel.spectral_tail(highest, priors[name].quantile(0.05), 2)
            assert tail < 1.1 * TRUNCATION

    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_exact_as_asked(self, dim: int) -> None:
        sites = sites_in(dim, 30)
        found = chosen(sites, "exact")
        assert found.kind == "exact"
        assert isinstance(found.representation, Exact)
        assert found.note == "exact Gaussian processes at 30 sites"
        assert set(found.sizes.values()) == {30}
        assert_usable(found, sites)

    def test_exact_with_thousands_of_sites_is_refused(self) -> None:
        with pytest.raises(
            InputError, match=r"gp='exact' with 3000 sites would need .* GB; use gp"
        ):
            chosen(sites_in(2, 3000), "exact")

    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_random_features_as_asked(self, dim: int) -> None:
        sites = sites_in(dim, 200)
        found = chosen(sites, "rff")
        assert found.kind == "rff"
        assert isinstance(found.representation, Fourier)
        assert found.representation.n_coefficients == 128
        assert "whose spread far from data is too small" in found.note
        assert chosen(sites, "rff", n_features=50).representation.n_coefficients == 50
        assert_usable(found, sites)

    def test_random_features_follow_the_seed(self) -> None:
        sites = sites_in(2, 20)
        one, same, other = (chosen(sites, "rff", seed=s).representation for s in (1, 1, 2))
        np.testing.assert_array_equal(one.features(sites), same.features(sites))
        assert not np.allclose(one.features(sites), other.features(sites))

    def test_an_unknown_name_is_refused(self) -> None:
        with pytest.raises(InputError, match="unknown gp 'sparse'; choose one of auto, hilbert, r"):
            chosen(sites_in(2, 20), "sparse")

    def test_three_thousand_sites_are_quick_and_bounded(self) -> None:
        sites = sites_in(2, 3000)
        found = chosen(sites)
        assert isinstance(found.representation, Hilbert)
        assert 500 < found.representation.n_coefficients <= MAX_FUNCTIONS[2]
        assert found.sizes["weights"] < 0.5 * found.sizes["residual"]


class TestBoundThatCannotBeMet:
    PRIORS = dict.fromkeys(PROCESSES, inverse_gamma_between(0.5, 100.0))

    def test_is_a_warning_that_says_what_to_do(self) -> None:
        geometry = Geometry.of(sites_in(2, 500))
        with pytest.warns(
            UserWarning,
            match=r"basis functions the covariance of the \w+ process is off by up to \d+% .*"
            r"\(aim: 4%\)\. Allow more functions \(n_features\), longer length-scales, "
            r"or use gp='exact' with few sites\.",
        ):
            found = choose("hilbert", Kernel(), geometry, self.PRIORS)
        stated = float(found.note.split("at most ")[1].split("%")[0])
        assert stated > 100.0 * TRUNCATION
        assert found.representation.n_coefficients < 1.05 * MAX_FUNCTIONS[2]

    def test_takes_the_exact_process_where_sites_are_few(self) -> None:
        geometry = Geometry.of(sites_in(2, 50))
        assert choose("auto", Kernel(), geometry, self.PRIORS).kind == "exact"

    def test_is_met_by_more_functions(self) -> None:
        geometry = Geometry.of(sites_in(1, 500))
        with pytest.warns(UserWarning, match="Allow more functions"):
            few = choose("auto", Kernel(), geometry, self.PRIORS)
        many = choose("auto", Kernel(), geometry, self.PRIORS, n_features=2000)
        assert few.representation.n_coefficients < many.representation.n_coefficients < 2000

    @pytest.mark.parametrize("dim", [1, 2, 3])
    @pytest.mark.parametrize("n_features", [1, 2, 3, 5, 20])
    def test_is_told_of_a_handful_of_functions(self, dim: int, n_features: int) -> None:
        sites = sites_in(dim, 200)
        with pytest.warns(UserWarning, match="Allow more functions"):
            found = chosen(sites, "hilbert", n_features=n_features)
        assert found.representation.n_coefficients <= n_features + 6  # whole shells of frequencies
        assert_usable(found, sites)


class TestAwkwardSites:
    @pytest.mark.parametrize("gp", ["auto", "hilbert", "exact", "rff"])
    def test_repeated(self, gp: str) -> None:
        sites = sites_in(2, 40)
        sites = np.concatenate([sites, sites[:15]])
        assert_usable(chosen(sites, gp), sites)

    @pytest.mark.parametrize("gp", ["auto", "hilbert", "exact", "rff"])
    def test_on_a_line_in_the_plane(self, gp: str) -> None:
        along = sites_in(1, 40)
        for sites in (np.c_[along, np.full(40, 7.0)], np.c_[along, 2.0 * along]):
            assert_usable(chosen(sites, gp), sites)

    @pytest.mark.parametrize("n", [40, 400])
    def test_in_a_plane_in_space(self, n: int) -> None:
        sites = np.insert(sites_in(2, n), 2, 5.0, axis=1)
        assert_usable(chosen(sites), sites)

    def test_on_a_line_in_the_plane_with_a_given_domain(self) -> None:
        sites = np.c_[sites_in(1, 40), np.full(40, 7.0)]
        geometry = Geometry.of(sites, sites)
        priors = default_lengthscales(geometry, Kernel())
        found = choose("auto", Kernel(), geometry, priors)
        assert not found.representation.outside(sites).any()
        assert_usable(found, sites)

    def test_far_from_the_origin(self) -> None:
        sites = sites_in(2, 150)
        moved = chosen(sites + 1e7)
        assert moved.sizes == chosen(sites).sizes
        assert_usable(moved, sites + 1e7)

    def test_on_a_long_thin_strip(self) -> None:
        sites = sites_in(2, 150) * np.array([10.0, 0.02])
        assert_usable(chosen(sites), sites)
