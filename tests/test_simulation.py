import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Matern
from sklearn.kernel_ridge import KernelRidge

from bne import scores
from bne._base_models import KERNELS, kernel_regression
from bne.simulation import lognormal_moments, simulate_1d, simulate_2d, simulate_region

Z_MAX = 4.42  # two-sided normal false-alarm rate 1e-5


def assert_zero_mean(values):
    z = np.sqrt(len(values)) * np.mean(values) / np.std(values)
    assert abs(z) < Z_MAX


def assert_standard_law(y, mean, sd):
    z = (y - mean) / sd
    assert_zero_mean(z)
    assert_zero_mean(z**2 - 1)


@pytest.mark.parametrize(("location", "scale"), [(0.0, 0.5), (-1.0, 0.2), (0.7, 0.001)])
def test_lognormal_moments_agree_with_simulation(rng, location, scale):
    y = rng.lognormal(location, scale, size=400_000)
    assert_standard_law(y, *lognormal_moments(np.array(location), np.array(scale)))


def test_1d_response_follows_the_stated_law():
    test = simulate_1d(0, n_test=50_000, random_state=1).test
    z = (np.log(test["y"]) - np.sin(test["x"])) / np.exp(np.cos(test["x"]) - 1)
    assert stats.kstest(z, "norm").pvalue > 1e-5
    assert_zero_mean(test["y"] - test["mean"])
    assert_zero_mean((test["y"] - test["mean"]) ** 2 - test["sd"] ** 2)


def test_1d_oracle_has_the_known_scores():
    """DESIGN's noise floor of the 1-D experiment: NLL -0.76, ECE 0.0001."""
    nll, ece = [], []
    for seed in range(20):
        simulation = simulate_1d(1000, random_state=seed)
        test = simulation.test
        inside = test[simulation.in_domain]
        z = (np.log(test["y"]) - np.sin(test["x"])) / np.exp(np.cos(test["x"]) - 1)
        nll.append(scores.paper_nll(inside["mean"], inside["sd"], inside["mean"]))
        ece.append(scores.paper_ece(stats.norm.cdf(z)))
    assert np.mean(nll) == pytest.approx(-0.76, abs=0.05)
    assert 5e-5 < np.mean(ece) < 2e-4


def test_2d_as_run_follows_the_stated_law():
    test = simulate_2d(0, n_test=20_000, random_state=2).test
    u, v = 1.5 * test["x1"], 1.5 * test["x2"]
    waves = np.sin(v) * np.exp((1 - np.cos(u)) ** 2) + np.cos(u) * np.exp((1 - np.sin(v)) ** 2)
    bird = (waves + (u - v) ** 2) / 100 - 1
    np.testing.assert_allclose(test["mean"], np.exp(bird / 5 + 0.001**2 / 2))
    assert stats.kstest((np.log(test["y"]) - bird / 5) / 0.001, "norm").pvalue > 1e-5
    assert_standard_law(test["y"], test["mean"], test["sd"])


def test_2d_as_printed_follows_the_stated_law():
    test = simulate_2d(0, variant="as_printed", n_test=20_000, random_state=3).test
    u, v = 4 * test["x1"], 4 * test["x2"]
    waves = np.cos(u) * np.exp((1 - np.sin(v)) ** 2) + np.sin(v) * np.exp((1 - np.cos(u)) ** 2)
    np.testing.assert_allclose(test["mean"], waves + (test["x1"] - test["x2"]) ** 2)
    assert_standard_law(test["y"], test["mean"], test["sd"])


@pytest.mark.parametrize(
    ("simulate", "n_base", "train_width", "test_width"),
    [(simulate_1d, 50, 3 * np.pi, 5 * np.pi), (simulate_2d, 250, np.pi, 1.25 * np.pi)],
)
def test_sizes_domains_and_columns(simulate, n_base, train_width, test_width):
    simulation = simulate(100, random_state=4)
    train, test = simulation.train, simulation.test
    truth = ["mean", "sd"]
    assert [*train] == [*test] == [*simulation.coords, "y", *simulation.base_models, *truth]
    assert (len(train), len(test)) == (n_base + 100, 1000)
    for table, width in ((train, train_width), (test, test_width)):
        reach = table[simulation.coords].abs().to_numpy().max()
        assert 0.95 * width < reach < width
        assert np.isfinite(table.to_numpy()).all()
    assert [*simulation.sites] == [*simulation.coords, *simulation.base_models]


@pytest.mark.parametrize("simulate", [simulate_1d, simulate_2d])
def test_more_sites_extend_the_training_set_and_change_nothing_else(simulate):
    small, large = (simulate(n, random_state=5) for n in (20, 60))
    pd.testing.assert_frame_equal(large.train.iloc[: len(small.train)], small.train)
    pd.testing.assert_frame_equal(large.test, small.test)


def test_without_base_points_the_extra_ones_remain():
    both = simulate_1d(30, random_state=6)
    alone = simulate_1d(30, random_state=6, include_base=False)
    expected = both.train.iloc[50:].reset_index(drop=True)
    pd.testing.assert_frame_equal(alone.train, expected)


def test_in_domain_is_the_bounding_box_of_the_training_sites():
    simulation = simulate_2d(0, random_state=7)
    train, test = simulation.train, simulation.test
    expected = test["x1"].between(train["x1"].min(), train["x1"].max()) & test["x2"].between(
        train["x2"].min(), train["x2"].max()
    )
    np.testing.assert_array_equal(simulation.in_domain, expected)
    assert 0.5 < simulation.in_domain.mean() < 0.75


def test_a_seed_fixes_the_data_and_a_generator_moves_on():
    pd.testing.assert_frame_equal(
        simulate_1d(10, random_state=8).train, simulate_1d(10, random_state=8).train
    )
    generator = np.random.default_rng(8)
    first, second = (simulate_1d(10, random_state=generator).train for _ in range(2))
    assert not np.isin(first["y"], second["y"]).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: simulate_1d(-1, random_state=0), "n must be at least 0, not -1"),
        (lambda: simulate_1d(1, n_base=1, random_state=0), "n_base must be at least 2"),
        (lambda: simulate_1d(0, include_base=False, random_state=0), "no training site"),
        (lambda: simulate_1d(1, base="printed", random_state=0), "base must be one of as_run"),
        (lambda: simulate_2d(1, variant="x", random_state=0), "variant must be one of as_run"),
        (lambda: simulate_region(0, random_state=0), "n_monitors"),
    ],
)
def test_bad_arguments_are_answered_by_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- Base models -------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["as_run", "as_printed"])
@pytest.mark.parametrize("d", [1, 2])
def test_kernels_are_symmetric_and_positive(rng, variant, d):
    x = rng.uniform(-np.pi, np.pi, size=(60, d))
    for kernel in KERNELS[variant].values():
        K = kernel(x, x)
        np.testing.assert_allclose(K, K.T)
        values = np.linalg.eigvalsh(K)
        assert values.min() > -1e-10 * values.max()


def test_as_run_base_models_are_gp_posterior_means():
    simulation = simulate_2d(0, random_state=9)
    coords, train, test = simulation.coords, simulation.train, simulation.test
    # scikit-learn's dot-product kernel to the third power is the cubic polynomial kernel.
    kernels = {
        "matern": Matern(0.5, nu=2.5),
        "cubic": ConstantKernel(1.0) * DotProduct(1.0) ** 3,
    }
    for name, kernel in kernels.items():
        gp = GaussianProcessRegressor(kernel, alpha=1.0, optimizer=None)
        gp.fit(train[coords].to_numpy(), train["y"])
        expected = gp.predict(test[coords].to_numpy())
        np.testing.assert_allclose(test[name], expected, rtol=1e-6, atol=1e-9)


def test_kernel_regression_is_kernel_ridge(rng):
    x, sites = rng.normal(size=(40, 1)), rng.normal(size=(10, 1))
    y = np.sin(3 * x[:, 0]) + 0.1 * rng.normal(size=40)
    kernel = KERNELS["as_printed"]["exponential"]
    ridge = KernelRidge(alpha=0.3, kernel="laplacian", gamma=1.0).fit(x, y)
    ours = kernel_regression(kernel, x, y, 0.3)
    np.testing.assert_allclose(ours(sites), ridge.predict(sites))


def test_penalty_minimises_the_leave_one_out_error(rng):
    x = rng.uniform(-3, 3, size=(25, 1))
    y = np.sin(x[:, 0]) + 0.3 * rng.normal(size=25)
    kernel = KERNELS["as_printed"]["matern"]

    def error(penalty):
        others = [np.arange(25) != i for i in range(25)]
        fits = [kernel_regression(kernel, x[o], y[o], penalty) for o in others]
        return np.mean([(fit(x[i : i + 1])[0] - y[i]) ** 2 for i, fit in enumerate(fits)])

    best = min(np.geomspace(1e-3, 1e2, 26), key=error)
    sites = np.linspace(-4, 4, 9)[:, None]
    chosen, expected = (kernel_regression(kernel, x, y, p)(sites) for p in (None, best))
    np.testing.assert_allclose(chosen, expected)


# ---- The synthetic region ----------------------------------------------------------------------


def test_region_tables():
    region = simulate_region(random_state=10, n_grid=(30, 20))
    columns = ["lon", "lat", "pm25", *region.base_models, "population", "mean", "sd"]
    assert [*region.train] == [*region.test] == columns
    assert (len(region.train), len(region.test)) == (60, 600)
    assert "synthetic" in region.description
    for table in (region.train, region.test):
        assert table["lon"].between(-73.4, -70.6).all()
        assert table["lat"].between(41, 43).all()
        assert table["pm25"].between(1, 30).all()
        assert (table["population"] >= 20).all()
    lattice = region.test.pivot(index="lat", columns="lon", values="mean")
    assert lattice.shape == (20, 30)
    assert region.test["lat"].is_monotonic_increasing


def test_region_response_has_the_stated_moments_and_is_skewed():
    for seed in range(5):
        grid = simulate_region(1, random_state=seed, n_grid=(100, 100)).test
        assert_standard_law(grid["pm25"], grid["mean"], grid["sd"])
        assert stats.skew((grid["pm25"] - grid["mean"]) / grid["sd"]) > 0.1


def test_region_monitors_stand_where_people_live():
    region = simulate_region(200, random_state=11)
    assert region.train["population"].mean() > 2 * region.test["population"].mean()


def test_region_base_models_know_something_and_none_everything():
    for seed in range(5):
        region = simulate_region(random_state=seed)
        for name in region.base_models:
            error = region.test[name] - region.test["mean"]
            assert 0.4 < np.sqrt(np.mean(error**2)) < 2
