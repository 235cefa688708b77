"""The estimators as users call them. Fits are short: what is tested is not the posterior."""

import pickle
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import bne
from bne.errors import InputError, InputWarning, SamplingWarning
from bne.prediction import PredictiveLaw

pytestmark = pytest.mark.filterwarnings("ignore::bne.errors.SamplingWarning")
QUICK = {"chains": 2, "draws": 30, "warmup": 160, "thin": 1}
BASE = ["a", "b", "c"]


def make_table(n=40, dim=2, n_models=3, seed=0):
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(rng.uniform(0, 10, (n, dim)), columns=[f"x{j}" for j in range(dim)])
    truth = 20 + 2 * np.sin(table["x0"])
    for k in range(n_models):
        table["abcdefghijkl"[k]] = truth + rng.normal(0, 0.3 * (k + 1), n) + 0.1 * k * table["x0"]
    table["y"] = truth + 1 + rng.normal(0, 0.2, n) + rng.exponential(0.2, n)
    table.index = [f"site {i}" for i in range(n)]
    return table


def make_model(cls=bne.BNE, base=BASE, coords=("x0", "x1"), **options):
    return cls(list(base), list(coords), random_state=0, **QUICK | options)


@pytest.fixture(scope="module")
def table():
    return make_table()


@pytest.fixture(scope="module")
def sites():
    return make_table(15, seed=1).drop(columns="y")


@pytest.fixture(scope="module")
def model(table):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        return make_model().fit(table, table["y"])


# ---- Predictions and their labels


def test_predict_is_a_plain_vector_in_the_units_of_y(model, table, sites):
    mean = model.predict(sites)
    assert type(mean) is np.ndarray
    assert mean.shape == (15,)
    assert np.abs(model.predict(table) - table["y"]).mean() < 1.0


def test_intervals_and_quantiles_are_labelled_and_ordered(model, sites):
    intervals = model.predict_interval(sites, coverage=[0.5, 0.95])
    assert list(intervals.columns) == [
        ("y", 0.5, "lower"),
        ("y", 0.5, "upper"),
        ("y", 0.95, "lower"),
        ("y", 0.95, "upper"),
    ]
    assert list(intervals.index) == list(sites.index)
    ordered = intervals["y"][[(0.95, "lower"), (0.5, "lower"), (0.5, "upper"), (0.95, "upper")]]
    assert (np.diff(ordered.to_numpy(), axis=1) > 0).all()
    quantiles = model.predict_quantiles(sites, alpha=[0.25, 0.75])
    assert list(quantiles.columns) == [("y", 0.25), ("y", 0.75)]
    np.testing.assert_array_equal(quantiles.to_numpy(), intervals.to_numpy()[:, :2])


def test_the_law_agrees_with_the_calls_of_the_estimator(model, sites):
    law = model.predict_proba(sites)
    np.testing.assert_array_equal(law.mean(), model.predict(sites))
    np.testing.assert_array_equal(law.var(), model.predict_var(sites))
    np.testing.assert_allclose(1 - law.cdf(21.0), model.exceedance(sites, threshold=21.0))
    assert list(law.mean().index) == list(sites.index)
    assert (law.crps(21.0) > 0).all()


def test_a_law_stays_what_it_is_when_the_model_is_fitted_again(table, sites):
    model = make_model(bne.BMA).fit(table, table["y"])
    law, before = model.predict_proba(sites), model.predict(sites)
    model.fit(table, table["y"] + 1.0)
    np.testing.assert_array_equal(law.mean(), before)
    assert not np.allclose(model.predict(sites), before)


def test_a_summary_says_what_the_single_calls_say(model, sites):
    summary = model.summary(sites, alpha=[0.1, 0.5], threshold=21.0)
    np.testing.assert_allclose(summary["mean"], model.predict(sites), rtol=1e-12)
    np.testing.assert_allclose(summary["sd"] ** 2, model.predict_var(sites), rtol=1e-10)
    np.testing.assert_allclose(
        summary[["q10", "q50"]], model.predict_quantiles(sites, [0.1, 0.5]), rtol=1e-9
    )
    np.testing.assert_allclose(summary["exceedance"], model.exceedance(sites, 21.0), atol=1e-10)
    np.testing.assert_allclose(summary["weight_a"], model.weights(sites)["mean", "a"])
    np.testing.assert_allclose(summary["var_total"], model.decompose(sites)["total"])
    np.testing.assert_array_equal(summary["outside"], model.outside(sites))


def test_variance_components_sum_to_the_whole(model, sites):
    parts = model.decompose(sites)
    np.testing.assert_allclose(parts["total"], parts["aleatoric"] + parts["epistemic"])
    np.testing.assert_allclose(parts["total"], model.predict_var(sites))
    named = parts[["weights", "residual", "calibration", "covariance"]].sum(axis=1)
    np.testing.assert_allclose(parts["epistemic"], named, rtol=1e-9)
    np.testing.assert_allclose(
        parts["aleatoric"], parts["gaussian_noise"] + parts["skewed_noise"], rtol=1e-12
    )


def test_weights_sum_to_one(model, sites):
    weights = model.weights(sites)
    np.testing.assert_allclose(weights["mean"].sum(axis=1), 1, rtol=1e-12)
    assert (weights["sd"] > 0).all(axis=None)


def test_joint_draws_repeat_and_agree_with_the_analytic_variance_of_a_mean(model, sites):
    draws = model.sample(sites, n=60, noise=False)
    np.testing.assert_array_equal(draws, model.sample(sites, n=60, noise=False))
    assert draws.shape == (60, 15)
    np.testing.assert_allclose(draws.mean(axis=0), model.predict(sites), rtol=1e-10)
    law_of_all = np.var(draws, axis=0)
    np.testing.assert_allclose(law_of_all, model.decompose(sites)["epistemic"], rtol=1e-8)
    noisy = model.sample(sites, n=60, random_state=1)
    assert not np.array_equal(noisy, model.sample(sites, n=60, random_state=2))


def test_any_subset_of_sites_gets_the_same_numbers(model, sites):
    whole = model.summary(sites)
    part = model.summary(sites.iloc[3:7])
    np.testing.assert_array_equal(part, whole.iloc[3:7])


@pytest.mark.parametrize("chunk", [4, 15, 300])
def test_chunks_of_any_size_get_the_same_numbers(model, sites, chunk):
    many = pd.concat([sites] * 20)
    law = model._law(many)[0]
    other = PredictiveLaw(law.n_sites, law._fields, chunk=chunk).summary([0.1, 0.5])
    found = law.summary([0.1, 0.5])
    np.testing.assert_array_equal(other.mean, found.mean)
    np.testing.assert_array_equal(other.quantiles, found.quantiles)
    np.testing.assert_array_equal(other.weight_sd, found.weight_sd)
    np.testing.assert_array_equal(found.mean[:15], found.mean[-15:])


def test_the_posterior_is_in_arviz_form(model, table):
    posterior = model.posterior_.posterior
    assert posterior["omega"].dims == ("chain", "draw", "base_model", "site")
    assert posterior["delta"].shape == (2, 30, len(table))
    assert {"sigma", "lengthscale.residual", "weights.sigma", "log_s", "log_lambda"} <= set(
        posterior
    )
    assert "diverging" in model.posterior_.sample_stats
    np.testing.assert_allclose(posterior["omega"].sum("base_model"), 1)


# ---- Reduced forms and switches


@pytest.mark.parametrize("cls", [bne.BMA, bne.BAE])
def test_reduced_forms_lack_what_they_leave_out(cls, table, sites):
    model = make_model(cls).fit(table, table["y"])
    parts = model.decompose(sites)
    assert (parts["skewed_noise"] == 0).all()
    assert (parts["calibration"] == 0).all()
    assert (parts["residual"] == 0).all() == (cls is bne.BMA)
    assert np.ptp(parts["gaussian_noise"]) < 1e-9


def test_strategies_and_prior_means_fit(table, sites):
    for options in (
        {"strategy": "joint"},
        {"strategy": "plugin"},
        {"prior_mean": "linear+gam", "skewness": False},
        {"priors": "paper", "variance": False},
    ):
        model = make_model(**options).fit(table, table["y"])
        assert np.isfinite(model.summary(sites).to_numpy(dtype=float)).all(), options
    plugin = make_model(bne.BAE, strategy="plugin").fit(table, table["y"])
    assert (plugin.decompose(sites)["weights"] < 1e-20).all()


@pytest.mark.parametrize("gp", ["hilbert", "rff", "exact"])
@pytest.mark.parametrize("kernel", ["matern12", "squared_exponential"])
def test_representations_and_kernels_fit(gp, kernel, table, sites):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "With .* basis functions")
        model = make_model(bne.BAE, gp=gp, kernel=kernel).fit(table, table["y"])
    assert np.isfinite(model.predict(sites)).all()
    assert {"hilbert": "Hilbert", "rff": "random", "exact": "exact"}[gp] in model.gp_


MANY = [pytest.param(3000, dim, 3, marks=pytest.mark.slow) for dim in (1, 2, 3)]


@pytest.mark.parametrize(
    ("n", "dim", "n_models"), [(10, 2, 3), (40, 1, 1), (60, 3, 12), (2, 1, 2), (400, 1, 2), *MANY]
)
def test_few_and_many_sites_dimensions_and_base_models(n, dim, n_models):
    table = make_table(n, dim, n_models)
    base, coords = list("abcdefghijkl"[:n_models]), [f"x{j}" for j in range(dim)]
    model = make_model(base=base, coords=coords).fit(table, table["y"])
    summary = model.summary(table)
    assert np.isfinite(summary.to_numpy(dtype=float)).all()
    np.testing.assert_allclose(summary.filter(regex="^weight_[a-l]$").sum(axis=1), 1)


def test_one_base_model_has_weight_one(table, sites):
    model = make_model(bne.BMA, base=["b"]).fit(table, table["y"])
    np.testing.assert_array_equal(model.weights(sites)["mean"], 1)
    np.testing.assert_allclose(model.predict(sites), sites["b"], rtol=1e-12)


def test_a_base_model_that_is_repeated_is_reproduced(table, sites):
    with pytest.warns(InputWarning, match="agree at every training site"):
        model = make_model(bne.BMA, base=["b", "b2", "b3"]).fit(
            table.assign(b2=table["b"], b3=table["b"]), table["y"]
        )
    predicted = model.predict(sites.assign(b2=sites["b"], b3=sites["b"]))
    np.testing.assert_allclose(predicted, sites["b"], rtol=1e-12)


# ---- Inputs


def test_arrays_are_read_by_position(table, sites):
    columns = ["x0", "x1", *BASE]
    by_name = make_model(bne.BMA).fit(table, table["y"])
    by_place = bne.BMA(random_state=0, **QUICK).fit(
        table[columns].to_numpy(), table["y"].to_numpy()
    )
    np.testing.assert_array_equal(
        by_name.predict(sites), by_place.predict(sites[columns].to_numpy())
    )


def test_fitted_predictors_are_called_on_the_coordinates(table, sites):
    line = LinearRegression().fit(table[["x0", "x1"]], table["y"])
    pair = make_model(bne.BMA, base=["a", ("line", line)]).fit(table, table["y"])
    column = make_model(bne.BMA, base=["a", "line"]).fit(
        table.assign(line=line.predict(table[["x0", "x1"]])), table["y"]
    )
    predicted = column.predict(sites.assign(line=line.predict(sites[["x0", "x1"]])))
    np.testing.assert_array_equal(pair.predict(sites), predicted)
    assert list(pair.weights(sites)["mean"]) == ["a", "line"]


def test_longitude_and_latitude_become_kilometres(table):
    degrees = table.assign(lon=-72 + table["x0"] / 10, lat=42 + table["x1"] / 10)
    model = make_model(bne.BMA, coords=["lon", "lat"]).fit(degrees, degrees["y"])
    assert model.coordinate_map_.units == "km"
    east = np.ptp(model._posterior.problem.coords[:, 0])
    assert east == pytest.approx(np.ptp(degrees["lon"]) * 82.6, rel=0.01)


def test_sites_outside_the_domain_are_refused_by_name_and_others_flagged(model, table, sites):
    far = sites.assign(x0=[*sites["x0"][:14], 40.0])
    with pytest.raises(InputError, match=r"1 site\(s\), rows site 14, lie outside the domain"):
        model.predict(far)
    near = sites.assign(x0=[*sites["x0"][:14], 12.0])
    assert list(model.outside(near)[-1:]) == [True]
    wide = make_model(bne.BAE, domain=far).fit(table, table["y"])
    assert np.isfinite(wide.predict(far)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "cat"}, "strategy='cat' is not one of 'cut', 'plugin', 'joint'"),
        ({"prior_mean": "quadratic"}, "prior_mean='quadratic' is not one of"),
        ({"chains": 0}, "chains=0 must be a whole number"),
        ({"draws": 2.5}, "draws=2.5 must be a whole number"),
        ({"target_accept": 1.5}, "target_accept=1.5 must be between 0 and 1"),
        ({"random_state": "x"}, "random_state='x' must be"),
        ({"residual": False, "prior_mean": "linear"}, "residual=False leaves out"),
        ({"gp": "spline"}, "gp='spline' is not one of"),
    ],
)
def test_bad_options_get_a_sentence(options, message, table):
    model = bne.BNE(**{"base_models": BASE, "coords": ["x0", "x1"], **QUICK} | options)
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        model.fit(table, table["y"])
    with pytest.raises(NotFittedError):
        model.predict(table)


def test_a_missing_base_model_is_named_at_prediction(model, sites):
    with pytest.raises(InputError, match="no column 'b'"):
        model.predict(sites.drop(columns="b"))


# ---- Chance


def test_the_seed_fixes_the_draws(table, sites):
    first, again = (make_model(bne.BAE).fit(table, table["y"]) for _ in range(2))
    np.testing.assert_array_equal(first.predict(sites), again.predict(sites))
    other = make_model(bne.BAE).set_params(random_state=1).fit(table, table["y"])
    assert not np.array_equal(first.predict(sites), other.predict(sites))
    fresh = make_model(bne.BMA).set_params(random_state=None).fit(table, table["y"])
    repeated = make_model(bne.BMA).set_params(random_state=fresh.seed_).fit(table, table["y"])
    np.testing.assert_array_equal(fresh.predict(sites), repeated.predict(sites))


@pytest.mark.filterwarnings("default::bne.errors.SamplingWarning")
def test_too_few_draws_are_reported(table):
    with pytest.warns(SamplingWarning, match="should not be trusted"):
        make_model(bne.BMA, chains=1, draws=8).fit(table, table["y"])


# ---- Saving


def test_a_saved_fit_predicts_the_same_bits_in_a_fresh_process(model, sites, tmp_path):
    model.save(tmp_path / "fit.nc")
    sites.to_pickle(tmp_path / "sites.pkl")
    program = (
        "import sys, bne, numpy as np, pandas as pd; m = bne.load(sys.argv[1]); "
        "s = pd.read_pickle(sys.argv[2]); np.save(sys.argv[3], m.summary(s).to_numpy(dtype=float))"
    )
    files = [str(tmp_path / name) for name in ("fit.nc", "sites.pkl", "out.npy")]
    subprocess.run([sys.executable, "-c", program, *files], check=True)
    np.testing.assert_array_equal(np.load(files[2]), model.summary(sites).to_numpy(dtype=float))


@pytest.mark.parametrize("options", [{"gp": "exact"}, {"gp": "rff"}, {"strategy": "joint"}])
def test_every_representation_is_saved(options, table, sites, tmp_path):
    model = make_model(prior_mean="gam", **options).fit(table, table["y"])
    model.save(tmp_path / "fit.nc")
    again = bne.load(tmp_path / "fit.nc")
    np.testing.assert_array_equal(model.summary(sites), again.summary(sites))
    assert again.diagnose().verdict == model.diagnose().verdict
    assert type(again) is bne.BNE
    assert again.get_params()["gp"] == model.gp


def test_a_loaded_fit_can_be_fitted_again(model, table, sites, tmp_path):
    model.save(tmp_path / "fit.nc")
    again = clone(bne.load(tmp_path / "fit.nc")).fit(table, table["y"])
    np.testing.assert_array_equal(model.predict(sites), again.predict(sites))


# ---- Interrupts


class KilledError(Exception):
    pass


@pytest.mark.parametrize("blocks", [3, 14, 23])
def test_a_killed_fit_resumes_to_the_same_draws(blocks, table, sites, tmp_path, monkeypatch):
    file = tmp_path / "fit.ckpt"
    monkeypatch.setattr("bne.checkpoint._SECONDS", 0.0)
    whole = make_model(skewness=False).fit(table, table["y"])
    count = 0

    def stop(step, done, total):
        nonlocal count
        count += 1
        if count > blocks:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr("bne.ensemble.Progress.__call__", lambda self, *a: stop(*a))
        with pytest.raises(KilledError):
            make_model(skewness=False).fit(table, table["y"], checkpoint=file)
    assert file.exists()
    resumed = make_model(skewness=False).fit(table, table["y"], checkpoint=file)
    np.testing.assert_array_equal(whole.predict(sites), resumed.predict(sites))
    for step, draws in whole._posterior.steps.items():
        np.testing.assert_array_equal(draws.hyper, resumed._posterior.steps[step].hyper)
    assert not file.exists()


def test_a_checkpoint_of_something_else_is_refused_by_name(table, tmp_path, monkeypatch):
    file = tmp_path / "fit.ckpt"
    monkeypatch.setattr("bne.checkpoint._SECONDS", 0.0)
    monkeypatch.setattr("bne.checkpoint.Checkpoint.remove", lambda self: None)
    make_model(bne.BMA).fit(table, table["y"], checkpoint=file)
    for change, what in (
        ({"y": table["y"] + 1e-9}, "data"),
        ({"kernel": "matern52"}, "model"),
        ({"draws": 31}, "settings of the sampler"),
        ({"random_state": 1}, "seed"),
    ):
        y = change.pop("y", table["y"])
        with pytest.raises(InputError, match=f"another fit .*{what}"):
            make_model(bne.BMA).set_params(**change).fit(table, y, checkpoint=file)
    file.write_bytes(b"not a checkpoint")
    with pytest.raises(InputError, match="not a checkpoint"):
        make_model(bne.BMA).fit(table, table["y"], checkpoint=file)


# ---- scikit-learn


def test_predictions_survive_pickling_and_do_not_depend_on_the_order_of_sites(model, sites):
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(sites), model.predict(sites))
    backwards = model.predict_quantiles(sites[::-1], 0.9)[::-1]
    np.testing.assert_allclose(backwards, model.predict_quantiles(sites, 0.9), rtol=1e-10)


def test_the_estimator_works_in_a_pipeline_and_in_cross_validation(table):
    columns = ["x0", "x1", *BASE]
    pipeline = make_pipeline(FunctionTransformer(), make_model(bne.BMA))
    held_out = cross_val_predict(pipeline, table[columns], table["y"], cv=2)
    assert np.isfinite(held_out).all()
