import itertools

import numpy as np
import pandas as pd
import pytest
import scoringrules
from scipy import integrate

from bne.errors import InputError
from bne.noise import EMG, emg_abs_deviation
from bne.prediction import COMPONENTS, FieldDraws, PredictiveLaw

Z_LIMIT = 4.9  # of a normal deviate, two-sided: one false alarm in 1e6

LEVELS = np.array([1e-200, 1e-12, 1e-4, 0.025, 0.3, 0.5, 0.7, 0.975, 1 - 1e-4, 1 - 1e-12])


def draws_of(rng, n=6, size=40, skew=0.5, k=3):
    """Random draws, with dependence between their parts."""
    common = rng.normal(size=(n, size))
    return FieldDraws(
        weights=rng.dirichlet(np.ones(k), size=(n, size)).transpose(2, 0, 1),
        mixture=10.0 + rng.normal(size=(n, 1)) + 0.5 * common,
        residual=rng.normal(0.0, 0.5, (n, size)) - 0.2 * common,
        scale=np.exp(rng.normal(0.0, 0.4, (n, size))),
        skew=None if skew is None else skew * np.exp(rng.normal(0.0, 0.5, (n, size))),
    )


def site(location, scale, skew=None):
    """Draws at one site."""
    location, scale = np.broadcast_arrays(np.atleast_2d(location), scale)
    zero = np.zeros(location.shape)
    skew = None if skew is None else skew + zero
    return FieldDraws(zero[None] + 1.0, location, zero, scale, skew)


def members(draws):
    return EMG(draws.location, draws.scale, 0.0 if draws.skew is None else draws.skew)


def hard_cases():
    near = np.linspace(-0.5, 0.5, 20)
    return {
        "normal": site(near, 1.0),
        "no skew": site(near, 1.0, 0.0),
        "tiny skew": site(near, 1.0, 1e-9),
        "tiny scale": site(near, 1e-4, 1.0),
        "small scale": site(near, 0.03, 1.0),
        "one draw": site([3.0], 2.0, 1.0),
        "bimodal": site(np.repeat([0.0, 12.0], 10), 1.0, 0.3),
        "apart": site(np.repeat([0.0, 1000.0], [13, 7]), 0.5),
        "an outlier": site(np.r_[near[1:], 1e6], np.r_[np.ones(19), 1e-3], 0.1),
        "all scales": site(np.zeros(20), np.logspace(-4, 4, 20), 0.5),
        "far from zero": site(1e7 + near, 1e-2, 1e-2),
        "many draws": site(np.linspace(-1, 1, 1500), np.linspace(0.5, 2, 1500), 0.4),
    }


@pytest.fixture(params=[None, 0.0, 1e-8, 0.5, 20.0], ids="skew {}".format)
def draws(request, rng):
    return draws_of(rng, skew=request.param)


# Against plain NumPy


def test_moments_are_those_of_the_mixture(draws):
    law, parts = PredictiveLaw.of(draws), members(draws)
    mean = parts.mean().mean(axis=1)
    variance = (parts.var() + (parts.mean() - mean[:, None]) ** 2).mean(axis=1)
    np.testing.assert_allclose(law.mean(), mean, rtol=1e-13)
    np.testing.assert_allclose(law.var(), variance, rtol=1e-12)
    np.testing.assert_allclose(law.std(), np.sqrt(variance), rtol=1e-12)


def test_densities_and_probabilities_are_those_of_the_mixture(draws):
    law, parts = PredictiveLaw.of(draws), members(draws)
    y = law.mean()[:, None] + law.std()[:, None] * np.linspace(-6, 6, 9)
    at = np.moveaxis(y[:, None], -1, 0)
    for found, member in [
        (law.pdf(y), parts.pdf(at)),
        (np.exp(law.log_pdf(y)), parts.pdf(at)),
        (law.cdf(y), np.exp(parts.logcdf(at))),
        (law.sf(y), parts.sf(at)),
        (law.exceedance(y), parts.sf(at)),
    ]:
        np.testing.assert_allclose(found, member.mean(axis=2).T, rtol=1e-8, atol=1e-300)


def test_points_may_be_one_for_all_one_each_or_several_each(rng):
    law = PredictiveLaw.of(draws_of(rng))
    y = np.linspace(8.0, 12.0, 6)
    one, each, several = law.cdf(10.0), law.cdf(y), law.cdf(np.column_stack([y, y + 1.0]))
    assert one.shape == each.shape == (6,)
    assert several.shape == (6, 2)
    np.testing.assert_array_equal(several[:, 0], each)
    np.testing.assert_array_equal(law.cdf(np.full(6, 10.0)), one)


@pytest.mark.parametrize("skew", [None, 0.5])
@pytest.mark.parametrize("size", [40, 41])
def test_how_many_points_are_asked_for_changes_no_bit(rng, skew, size):
    law = PredictiveLaw.of(draws_of(rng, size=size, skew=skew))
    y = rng.normal(10.0, 3.0, (6, 11))
    for method in (law.cdf, law.sf, law.pdf, law.log_pdf, law.crps):
        whole = method(y)
        for m in (1, 2, 3, 9):
            np.testing.assert_array_equal(method(y[:, :m]), whole[:, :m])
    p = np.linspace(0.01, 0.99, 11)
    whole = law.ppf(p)
    for m in (1, 2, 9):
        np.testing.assert_array_equal(law.ppf(p[:m]), whole[:, :m])


@pytest.mark.parametrize("skew", [None, 0.0, 1e-6, 0.5])
def test_log_pdf_is_finite_far_in_the_tails(rng, skew):
    draws = draws_of(rng, skew=skew)
    y = np.array([-1e8, -1e4, -100.0, 100.0, 1e4, 1e8]) * np.ones((6, 1))
    found = PredictiveLaw.of(draws).log_pdf(y)
    assert np.isfinite(found).all()
    parts = members(draws).logpdf(np.moveaxis(y[:, None], -1, 0))
    expected = np.logaddexp.reduce(parts, axis=2).T - np.log(parts.shape[2])
    np.testing.assert_allclose(found, expected, rtol=1e-10)


# Quantiles


@pytest.mark.parametrize("name", hard_cases())
def test_ppf_inverts_the_cdf(name):
    law = PredictiveLaw.of(hard_cases()[name])
    q = law.ppf(LEVELS)
    assert (np.diff(q) > 0).all()
    lower = LEVELS <= 0.5
    # What rounding of q does to the probability is not the search's fault.
    noise = law.pdf(q) * np.spacing(np.abs(q))
    found = np.where(lower, law.cdf(q), law.sf(q))
    expected = np.where(lower, LEVELS, 1.0 - LEVELS)
    assert (np.abs(found - expected) <= 1e-8 * expected + 4.0 * noise).all()


def test_ppf_of_a_normal_is_exact():
    law = PredictiveLaw.of(site([3.0], 2.0))
    q = law.ppf([0.025, 0.5, 0.975])
    np.testing.assert_allclose(q, [[3 - 3.919927969080108, 3, 3 + 3.919927969080108]], rtol=1e-12)


def test_ppf_of_many_draws_agrees_with_that_of_the_fine_search_alone(rng, monkeypatch):
    law = PredictiveLaw.of(draws_of(rng, size=1500))
    found = law.ppf(LEVELS)
    monkeypatch.setattr("bne._quantiles._approach", lambda tile, search: None)
    np.testing.assert_allclose(found, law.ppf(LEVELS), rtol=1e-11)


def test_ppf_at_the_ends_and_its_shapes(rng):
    law = PredictiveLaw.of(draws_of(rng))
    np.testing.assert_array_equal(law.ppf([0.0, 1.0]), [[-np.inf, np.inf]] * 6)
    assert law.ppf(0.3).shape == (6,)
    assert law.ppf([0.3]).shape == (6, 1)
    np.testing.assert_array_equal(law.ppf([0.9, 0.0, 0.3])[:, 2], law.ppf(0.3))


# CRPS


def crps_by_integration(parts, y):
    """Integral of (F - 1{t >= y})^2 on many panels between far quantiles of the members."""
    edges = np.sort(np.r_[y, np.ravel(parts.ppf(1e-17)), np.ravel(parts.ppf(1 - 1e-16))])
    edges = np.sort(np.r_[y, np.linspace(edges[0], edges[-1], 400)])

    def integrand(t, upper):
        tail = parts.sf(t[:, None]) if upper else parts.cdf(t[:, None])
        return np.mean(tail, axis=1) ** 2

    pairs = itertools.pairwise(edges)
    return sum(
        integrate.fixed_quad(lambda t, up=a >= y: integrand(t, up), a, b, n=12)[0] for a, b in pairs
    )


@pytest.mark.parametrize("skew", [None, 0.5, 3.0])
def test_crps_agrees_with_numerical_integration(rng, skew):
    draws = draws_of(rng, n=2, skew=skew)
    y = np.array([9.5, 16.0])
    found = PredictiveLaw.of(draws).crps(y)
    for i in range(2):
        own = draws.sites(slice(i, i + 1))
        parts = EMG(own.location[0], own.scale[0], 0.0 if skew is None else own.skew[0])
        assert found[i] == pytest.approx(crps_by_integration(parts, y[i]), rel=1e-9)


@pytest.mark.parametrize("name", ["bimodal", "small scale", "apart", "many draws"])
def test_crps_of_hard_mixtures_agrees_with_pairs(name):
    """E|Y - Y'| over all pairs of draws, as in `bne.noise.emg_abs_deviation`."""
    draws = hard_cases()[name]
    parts = members(draws)
    location, scale = parts.loc[0], parts.scale[0]
    skew = np.broadcast_to(parts.skew, parts.shape)[0]
    pair = np.subtract.outer(location, location), np.hypot.outer(scale, scale)
    share = np.full(pair[0].shape, 0.5)
    if draws.skew is not None:
        share = skew[:, None] / np.add.outer(skew, skew)
    one = emg_abs_deviation(0.0, pair[0], pair[1], skew[:, None])
    two = emg_abs_deviation(0.0, -pair[0], pair[1], skew[None, :])
    spread = 0.5 * np.mean(share * one + (1.0 - share) * two)
    expected = np.mean(emg_abs_deviation(0.7, location, scale, skew)) - spread
    assert PredictiveLaw.of(draws).crps(0.7)[0] == pytest.approx(expected, rel=1e-8)


def test_crps_of_one_normal_agrees_with_scoringrules(rng):
    location, scale = rng.normal(size=(20, 1)), rng.uniform(0.1, 3.0, (20, 1))
    y = rng.normal(size=20)
    law = PredictiveLaw.of(site(location, scale))
    expected = scoringrules.crps_normal(y, location[:, 0], scale[:, 0])
    np.testing.assert_allclose(law.crps(y), expected, rtol=1e-9)


# Parts of the variance, weights, summary


def test_parts_of_the_variance_add_up(draws):
    law = PredictiveLaw.of(draws)
    parts = law.decompose()
    assert tuple(parts.columns) == COMPONENTS
    epistemic = parts[["weights", "residual", "calibration", "covariance"]].sum(axis=1)
    aleatoric = parts["gaussian_noise"] + parts["skewed_noise"]
    np.testing.assert_allclose(parts["epistemic"], epistemic, rtol=1e-10)
    np.testing.assert_allclose(parts["aleatoric"], aleatoric, rtol=1e-10)
    np.testing.assert_allclose(parts["total"], aleatoric + epistemic, rtol=1e-10)
    np.testing.assert_allclose(parts["total"], law.var(), rtol=1e-10)
    np.testing.assert_allclose(parts["weights"], draws.mixture.var(axis=1), rtol=1e-10)
    np.testing.assert_allclose(parts["residual"], draws.residual.var(axis=1), rtol=1e-10)


def test_equal_draws_have_no_epistemic_variance_whatever_their_offset():
    law = PredictiveLaw.of(site(np.full(7, 1e8 + 0.1), 0.3, 0.7))
    assert law.decompose()["epistemic"].item() == 0.0
    mean, sd = law.weights()
    assert (mean.item(), sd.item()) == (1.0, 0.0)


def test_weights_are_moments_of_their_draws(rng):
    draws = draws_of(rng)
    mean, sd = PredictiveLaw.of(draws).weights()
    np.testing.assert_allclose(mean, draws.weights.mean(axis=2), rtol=1e-13)
    np.testing.assert_allclose(sd, draws.weights.std(axis=2), rtol=1e-12)


def test_summary_says_what_the_methods_say(rng):
    law = PredictiveLaw.of(draws_of(rng))
    found = law.summary([0.1, 0.9], threshold=11.0)
    np.testing.assert_array_equal(found.mean, law.mean())
    np.testing.assert_array_equal(found.sd, law.std())
    np.testing.assert_array_equal(found.quantiles, law.ppf([0.1, 0.9]))
    np.testing.assert_array_equal(found.exceedance, law.exceedance(11.0))
    np.testing.assert_array_equal((found.weight_mean, found.weight_sd), law.weights())
    np.testing.assert_array_equal(pd.DataFrame(found.variance), law.decompose())
    assert law.summary([0.5]).exceedance is None


# Chunks


def everything(law):
    y = np.linspace(5.0, 15.0, law.n_sites)
    summary = law.summary([1e-6, 0.5, 0.9], threshold=11.0)
    return [
        summary.mean,
        summary.sd,
        summary.quantiles,
        summary.exceedance,
        summary.weight_mean,
        summary.weight_sd,
        *summary.variance.values(),
        law.log_pdf(y),
        law.crps(y),
        law.sample(3, 0),
        law.sample(3, noise=False),
    ]


def test_no_chunking_and_no_number_of_threads_changes_a_bit(rng, monkeypatch):
    draws = draws_of(rng, n=523)
    whole = everything(PredictiveLaw(523, draws.sites, chunk=10_000))
    for chunk, threads in [(None, 3), (300, 1), (101, 2), (58, 2), (522, 2)]:
        monkeypatch.setattr("os.cpu_count", lambda threads=threads: threads)
        for one, other in zip(
            everything(PredictiveLaw(523, draws.sites, chunk=chunk)), whole, strict=True
        ):
            np.testing.assert_array_equal(one, other)


def test_memory_of_draws_is_bounded_by_the_chunk(rng):
    draws, asked = draws_of(rng, n=50), []

    def fields(rows):
        asked.append(rows.stop - rows.start)
        return draws.sites(rows)

    PredictiveLaw(50, fields, chunk=20).mean()
    assert sorted(asked) == [10, 20, 20]


# Draws of y


@pytest.mark.parametrize("skew", [None, 0.5])
def test_sample_has_the_moments_of_the_law(rng, skew):
    """z-tests of mean and variance at six sites; false alarms: below 1e-5 for them all."""
    law, n = PredictiveLaw.of(draws_of(rng, skew=skew)), 40_000
    y = law.sample(n, 1)
    error = y - law.mean()
    z_mean = error.mean(axis=0) / (law.std() / np.sqrt(n))
    squares = error**2
    z_variance = (squares.mean(axis=0) - law.var()) / (squares.std(axis=0) / np.sqrt(n))
    assert np.abs(z_mean).max() < Z_LIMIT
    assert np.abs(z_variance).max() < Z_LIMIT


def test_sample_takes_the_same_posterior_draw_at_all_sites(rng):
    """Mean surfaces are columns of the draws; noise is independent between sites."""
    draws = draws_of(rng)
    law = PredictiveLaw.of(draws)
    np.testing.assert_array_equal(law.sample(40, noise=False), draws.mean_draws.T)
    np.testing.assert_array_equal(law.sample(4, noise=False), draws.mean_draws.T[[5, 15, 25, 35]])
    np.testing.assert_array_equal(law.sample(41, noise=False)[40], draws.mean_draws[:, 0])
    n = 40_000
    error = law.sample(n, 2) - law.sample(n, noise=False)
    products = np.corrcoef(error.T)[np.triu_indices(6, 1)]
    assert np.abs(products).max() * np.sqrt(n) < Z_LIMIT + 0.5  # 15 of them: 2e-6 in all


def test_sample_follows_its_seed(rng):
    law = PredictiveLaw.of(draws_of(rng))
    seed, generator = np.random.SeedSequence(5), np.random.default_rng(5)
    one = law.sample(3, 5)
    np.testing.assert_array_equal(one, law.sample(3, 5))
    np.testing.assert_array_equal(one, law.sample(3, seed))
    np.testing.assert_array_equal(one, law.sample(3, seed))  # which it leaves alone
    assert (law.sample(3, 6) != one).all()
    assert (law.sample(3) != law.sample(3)).all()
    assert (law.sample(3, generator) != law.sample(3, generator)).all()


# Labels and sentences


def test_results_carry_the_labels_of_the_sites(rng):
    index = pd.Index(list("abcdef"), name="site")
    draws = draws_of(rng)
    law, bare = PredictiveLaw.of(draws, index), PredictiveLaw.of(draws)
    for found, values in [(law.mean(), bare.mean()), (law.crps(9.0), bare.crps(9.0))]:
        pd.testing.assert_series_equal(found, pd.Series(values, index))
    pd.testing.assert_series_equal(law.ppf(0.5), pd.Series(bare.ppf(0.5), index))
    table = law.ppf([0.1, 0.9])
    pd.testing.assert_frame_equal(
        table, pd.DataFrame(bare.ppf([0.1, 0.9]), index, columns=[0.1, 0.9])
    )
    assert law.cdf(np.zeros((6, 2))).index.equals(index)
    assert law.sample(2, 0).columns.equals(index)
    assert law.decompose().index.equals(index)
    assert law.weights()[1].columns.equals(index)
    summary = law.summary([0.1], threshold=9.0)
    assert summary.quantiles.index.equals(index)
    assert summary.exceedance.index.equals(index)
    assert summary.variance["total"].index.equals(index)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda law: law.cdf([1.0, np.nan, 1, 1, 1, np.nan]), r"y must be finite; 2 .* \[1\]"),
        (lambda law: law.pdf(np.inf), "y must be finite"),
        (lambda law: law.crps([1.0, 2.0]), r"shape \(2,\); give a number, one .* of the 6 sites"),
        (lambda law: law.log_pdf("high"), "y must be a number or an array of numbers"),
        (lambda law: law.exceedance(np.nan), "threshold must be finite"),
        (lambda law: law.summary(threshold=np.nan), "threshold must be finite"),
        (lambda law: law.ppf(1.5), "p must lie between 0 and 1; found 1.5"),
        (lambda law: law.ppf([]), "p must be a level or a list of levels"),
        (lambda law: law.summary([0.5, np.nan]), "alpha must lie between 0 and 1; found nan"),
        (lambda law: law.sample(0), "n must be at least one draw, not 0"),
        (lambda law: law.sample(1, -1), "random_state must be a non-negative integer"),
    ],
)
def test_bad_arguments_get_a_sentence(rng, call, sentence):
    with pytest.raises(InputError, match=sentence):
        call(PredictiveLaw.of(draws_of(rng)))


def test_bad_laws_get_a_sentence(rng):
    draws = draws_of(rng)
    with pytest.raises(InputError, match="index has 2 labels, but there are 6 sites"):
        PredictiveLaw.of(draws, pd.Index([1, 2]))
    with pytest.raises(InputError, match="at least one site, not 0"):
        PredictiveLaw(0, draws.sites)
    with pytest.raises(InputError, match="chunk must be at least one site"):
        PredictiveLaw(6, draws.sites, chunk=0)
    with pytest.raises(InputError, match="fields gave draws at 6 sites where 5 were asked for"):
        PredictiveLaw(5, lambda rows: draws).mean()
    with pytest.raises(InputError, match=r"residual \(6, 1\)"):
        FieldDraws(draws.weights, draws.mixture, draws.residual[:, :1], draws.scale)


@pytest.mark.parametrize(("part", "value"), [("mixture", np.nan), ("scale", 0.0), ("skew", -1.0)])
def test_draws_that_are_no_law_get_a_sentence_with_their_site(rng, part, value):
    draws = draws_of(rng)
    getattr(draws, part)[4, 7] = value
    law = PredictiveLaw(6, draws.sites, index=pd.Index(list("abcdef")), chunk=2)
    with pytest.raises(InputError, match="posterior draws at site e are not finite, or have"):
        law.mean()
