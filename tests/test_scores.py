import numpy as np
import pytest
import scoringrules
from scipy import stats

from bne import scores

Y = np.array([1.0, 2.0, 4.0])
PREDICTION = np.array([2.0, 2.0, 1.0])


def test_point_scores_by_hand():
    assert scores.rmse(Y, PREDICTION) == pytest.approx(np.sqrt(10 / 3))
    assert scores.mae(Y, PREDICTION) == pytest.approx(4 / 3)
    assert scores.bias(Y, PREDICTION) == pytest.approx(-2 / 3)


def test_coverage_counts_both_ends():
    assert scores.coverage([0, 1, 2, 3], [0, 0, 0, 0], [1, 1, 2, 2]) == 0.75


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_interval_score_agrees_with_scoringrules(rng, level):
    y, lower = rng.normal(size=(2, 50))
    upper = lower + rng.exponential(size=50)
    expected = np.mean(scoringrules.interval_score(y, lower, upper, 1 - level))
    assert scores.interval_score(y, lower, upper, level=level) == pytest.approx(expected)


def test_interval_score_is_least_at_the_true_quantiles(rng):
    y = rng.normal(size=20_000)

    def score(half_width):
        ends = np.full(y.shape, half_width)
        return scores.interval_score(y, -ends, ends, level=0.8)

    best = min(np.linspace(0.5, 2.5, 41), key=score)
    assert best == pytest.approx(stats.norm.ppf(0.9), abs=0.1)


def test_log_score_is_the_mean_negative_log_density():
    assert scores.log_score(stats.norm.logpdf([0.0, 1.0])) == pytest.approx(
        0.5 * np.log(2 * np.pi) + 0.25
    )


@pytest.mark.parametrize(("fair", "estimator"), [(False, "nrg"), (True, "fair")])
def test_crps_agrees_with_scoringrules(rng, fair, estimator):
    y = rng.normal(size=30)
    draws = np.round(rng.normal(size=(41, 30)), 1)  # with ties
    expected = scoringrules.crps_ensemble(y, draws.T, estimator=estimator)
    np.testing.assert_allclose(scores.crps_per_site(y, draws, fair=fair), expected, atol=1e-12)
    assert scores.crps(y, draws, fair=fair) == pytest.approx(np.mean(expected))


def test_fair_crps_is_unbiased_and_the_other_is_not(rng):
    """Against the closed form for N(0, 1) at y = 0.3, with 5 draws; 4.42 is the 1e-5 quantile."""
    n, y = 40_000, 0.3
    exact = scoringrules.crps_normal(y, 0, 1)
    draws = rng.normal(size=(5, n))

    def z(fair):
        errors = scores.crps_per_site(np.full(n, y), draws, fair=fair) - exact
        return np.sqrt(n) * errors.mean() / errors.std()

    assert abs(z(fair=True)) < 4.42
    assert z(fair=False) > 50


def test_crps_of_one_draw_is_the_absolute_error():
    np.testing.assert_allclose(scores.crps_per_site(Y, PREDICTION[None]), np.abs(Y - PREDICTION))


# ---- The paper's metrics -----------------------------------------------------------------------


def test_paper_mse_is_one_for_the_average_of_the_truth(rng):
    truth = rng.normal(3, 2, size=100)
    assert scores.paper_mse(np.full(100, truth.mean()), truth) == pytest.approx(1)
    assert scores.paper_mse(truth + 0.1, truth) == pytest.approx(0.01 / truth.var())


def test_paper_nll_by_hand_and_as_the_sum_of_its_parts():
    mean, sd, truth = np.array([1.0, 3.0]), np.array([2.0, 0.5]), np.array([2.0, 3.5])
    assert scores.paper_calibration(mean, sd, truth) == pytest.approx((0.25 + 1) / 2)
    assert scores.paper_sharpness(sd) == pytest.approx(0)
    assert scores.paper_nll(mean, sd, truth) == pytest.approx(0.625)


def test_paper_ece_by_its_quantile_definition(rng):
    y, location = rng.gamma(2, size=200), rng.normal(size=200)
    law = stats.norm(location, 1.5)
    levels = [0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25]
    levels += [1 - q for q in reversed(levels)]
    expected = np.mean([(np.mean(y < law.ppf(q)) - q) ** 2 for q in levels])
    np.testing.assert_allclose(scores.PAPER_LEVELS, levels)
    assert scores.paper_ece(law.cdf(y)) == pytest.approx(expected)


def test_paper_ece_of_a_calibrated_law_is_sampling_noise(rng):
    """Its expectation is the mean of q (1 - q) / n over the levels."""
    levels = np.array(scores.PAPER_LEVELS)
    n, runs = 1000, 200
    values = [scores.paper_ece(rng.uniform(size=n)) for _ in range(runs)]
    z = (np.mean(values) - np.mean(levels * (1 - levels)) / n) / (np.std(values) / np.sqrt(runs))
    assert abs(z) < 4.42


def test_paper_coverage_is_coverage_of_the_central_interval(rng):
    y = rng.normal(scale=2, size=300)
    lower, upper = (np.full(300, stats.norm.ppf(q)) for q in (0.025, 0.975))
    expected = scores.coverage(y, lower, upper)
    assert scores.paper_coverage(stats.norm.cdf(y)) == pytest.approx(expected)


# ---- Bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scores.rmse([1, 2], [1]), r"equal length, got y \(2,\), prediction \(1,\)"),
        (lambda: scores.mae([[1.0]], [[1.0]]), "one-dimensional"),
        (lambda: scores.bias([], []), "nothing to score"),
        (lambda: scores.rmse([1, np.nan, np.inf], Y), "y: 2 values are not finite, .* index 1"),
        (lambda: scores.coverage(Y, Y + 1, Y), "above the upper end in 3 intervals"),
        (lambda: scores.interval_score(Y, Y, Y, level=95), "level must lie between 0 and 1"),
        (lambda: scores.crps(Y, np.zeros((3, 10))), r"\(m, 3\), but their shape is \(3, 10\)"),
        (lambda: scores.crps(Y, np.zeros((1, 3)), fair=True), "more than 1 draws"),
        (lambda: scores.crps(Y, np.full((2, 3), np.nan)), "draws: 6 values are not finite"),
        (lambda: scores.paper_mse(Y, np.ones(3)), "all equal"),
        (lambda: scores.paper_sharpness([1, 0]), "sd: 1 values are not positive"),
        (lambda: scores.paper_ece([0.1, 1.1]), "pit must hold probabilities"),
    ],
)
def test_bad_input_is_answered_by_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
