"""The command line, from bad input to the end.

Most tests run against a stand-in for the estimators, so that they test the command line and are
quick; those at the end run the real ones.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import bne
from bne.cli import main
from bne.cli._output import to_plain
from bne.cli._parser import MODELS, build_parser
from bne.errors import InputError, SamplingWarning
from bne.storage import read_fit, write_fit

BASE = ["pred_av", "pred_gs"]


class StandIn:
    """Answers the calls of an estimator with the first base model and unit variance."""

    def __init__(self, **parameters):
        self.parameters = parameters
        self.coords, self.base_models = parameters["coords"], parameters["base_models"]

    @property
    def inference_(self):
        fast = self.parameters.get("inference") == "fast"
        return "a fast approximation" if fast else "Markov chains"

    def fit(self, table, y, progress=False, checkpoint=None):
        self.fitted = (len(table), y.name, progress, checkpoint)
        return self

    def predict(self, sites):
        return sites[self.base_models[0]].to_numpy(dtype=float)

    def predict_quantiles(self, sites, alpha):
        return pd.DataFrame({a: self.predict(sites) + a for a in alpha})

    def summary(self, sites, alpha, threshold=None):
        mean = self.predict(sites)
        table = {"mean": mean, "sd": 1.0} | {f"q{100 * a:.10g}": mean + a for a in alpha}
        if threshold is not None:
            table["exceedance"] = (mean > threshold).astype(float)
        share = 1 / len(self.base_models)
        table |= {f"weight_{name}": share for name in self.base_models}
        table |= {"var_aleatoric": 0.6, "var_epistemic": 0.4, "var_total": 1.0}
        return pd.DataFrame(table | {"outside": self.outside(sites)}, index=sites.index)

    def sample(self, sites, n, random_state=None):
        return np.tile(self.predict(sites), (n, 1)) + np.arange(n)[:, None]

    def outside(self, sites):
        return sites[self.coords[0]].to_numpy() > 0

    def diagnose(self):
        table = pd.DataFrame({"r_hat": [1.004], "ess_bulk": [512.0]}, index=["delta"])
        return types.SimpleNamespace(
            ok=True,
            verdict="The draws can be trusted.",
            table=table,
            to_dict=lambda: {"ok": True, "table": table},
        )

    def save(self, path):
        write_fit(path, {}, {"coords": self.coords, "base_models": self.base_models})


@pytest.fixture
def built(monkeypatch):
    """Replace the estimators; returns the list of those that a command builds."""
    made = []

    def build(**parameters):
        made.append(StandIn(**parameters))
        return made[-1]

    def load(path):
        _, attrs = read_fit(path)
        return StandIn(coords=attrs["coords"], base_models=attrs["base_models"])

    for name in ("BNE", "BAE", "BMA"):
        monkeypatch.setattr(bne, name, build, raising=False)
    monkeypatch.setattr(bne, "load", load, raising=False)
    return made


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with train.csv and sites.csv, which is the current one."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "lon": rng.uniform(-72, -70, 12),
            "lat": rng.uniform(41, 43, 12),
            "pred_av": rng.normal(9, 1, 12),
            "pred_gs": rng.normal(9, 1, 12),
        }
    )
    table["aqs"] = table["pred_av"] + rng.normal(size=12)
    table.to_csv(tmp_path / "train.csv", index=False)
    table.drop(columns="aqs").to_csv(tmp_path / "sites.csv", index=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fit_command(*more, train="train.csv", y="aqs", coords="lon,lat", base="pred_av,pred_gs"):
    options = ["--y", y, "--coords", coords, "--base-models", base, "-o", "fit.nc"]
    return ["fit", train, *options, *more]


def run(capsys, *argv):
    """Exit status, standard output and standard error of a command."""
    try:
        status = main([str(argument) for argument in argv])
    except SystemExit as exit_:
        status = exit_.code
    out, err = capsys.readouterr()
    return status, out, err


def refused(capsys, *argv):
    """The one line that a refused command leaves, and nothing else."""
    before = set(Path.cwd().iterdir())
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err
    assert set(Path.cwd().iterdir()) == before
    return err


def change(name, edit):
    table = pd.read_csv(name)
    pd.DataFrame(edit(table)).to_csv(name, index=False)


@pytest.mark.parametrize("command", [None, "demo", "fit", "predict", "diagnose"])
def test_every_command_has_help_with_an_example(capsys, command):
    status, out, err = run(capsys, *([command] if command else []), "--help")
    assert (status, err) == (0, "")
    assert f"example:\n  bne {command or 'demo'}" in out
    assert command is None or "--json" in out


def test_version(capsys):
    status, out, _ = run(capsys, "--version")
    assert status == 0
    assert out.startswith("bne ")


def test_help_imports_nothing_slow():
    program = (
        "import sys; from bne.cli._parser import build_parser; build_parser().format_help(); "
        "sys.exit(bool({'jax', 'pandas', 'xarray', 'scipy', 'sklearn'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "COMMAND"),
        (["fiit"], "invalid choice: 'fiit'"),
        (["fit"], "required: TRAIN, --y"),
        (fit_command("--model", "gam"), "invalid choice: 'gam'"),
        (fit_command("--chains", "0"), "'0' is not a positive whole number"),
        (fit_command("--draws", "many"), "'many' is not a whole number"),
        (fit_command("--seed", "-1"), "'-1' is not a whole number from 0"),
        (fit_command("--pri", "paper"), "unrecognized arguments: --pri"),
        (fit_command(coords="lon,"), "'lon,' is not a list of column names"),
        (fit_command(base="a,b,a"), "names 'a' more than once"),
        (["predict", "f.nc", "s.csv", "-o", "o.csv", "--quantiles", "0.5,x"], "list of levels"),
        (["predict", "f.nc", "s.csv", "-o", "o.csv", "--quantiles", "50"], "not between 0 and 1"),
        (["predict", "f.nc", "s.csv", "-o", "o.csv", "--threshold", "nan"], "finite number"),
        (["predict", "f.nc", "s.csv"], "required: -o/--output"),
    ],
)
def test_arguments_are_refused_in_one_line(folder, capsys, argv, message):
    assert message in refused(capsys, *argv)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.rename(columns={"pred_av": "pred_avg"}), "did you mean 'pred_avg'"),
        (lambda t: t.assign(pred_av=["low", *t["pred_av"][1:]]), "'pred_av' has text"),
        (lambda t: t.assign(aqs=[np.nan, np.inf, *t["aqs"][2:]]), "'aqs' contains NaN in 1 row (0"),
        (lambda t: t.assign(pred_gs=[np.nan] * 2 + [1.0] * 10), "--drop-missing"),
        (lambda t: t.assign(aqs=7.5), "y is 7.5 at all 12 sites"),
        (lambda t: t[:1], "one site only"),
        (lambda t: t[:0], "has no rows"),
        (lambda t: t.assign(lat=t["lon"] - 40, lon=t["lat"]), "seem swapped"),
        (lambda t: t.assign(lat=t["lat"] * 1000), "not a latitude in degrees"),
        (lambda t: t.assign(lon=range(-180, 180, 30), lat=0.0), "too wide"),
    ],
)
def test_bad_training_tables_are_refused_before_the_fit(folder, capsys, edit, message):
    change("train.csv", edit)
    assert message in refused(capsys, *fit_command())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": "none.csv"}, "there is no file none.csv"),
        ({"train": "."}, "is a directory"),
        ({"train": "empty.csv"}, "empty.csv is empty"),
        ({"train": "latin.csv"}, "not UTF-8"),
        ({"y": "aqz"}, "train.csv has no column 'aqz'; did you mean 'aqs'?"),
        ({"y": "pred_av"}, "it cannot be a base model too"),
        ({"coords": "lon,lat,pred_av,aqs", "base": "pred_gs"}, "at most three"),
    ],
)
def test_bad_files_and_columns_are_refused(folder, capsys, arguments, message):
    Path("empty.csv").touch()
    Path("latin.csv").write_bytes("lon,é\n1,2\n".encode("latin-1"))
    assert message in refused(capsys, *fit_command(**arguments))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["-o", "out.csv"], "must end in one of .nc"),
        (["-o", "none/fit.nc"], "does not exist; create it first"),
        (["--crs", "EPSG:0"], "is not a coordinate reference system"),
        (["--domain", "train.csv", "--coords", "lon,lat", "--y", "none"], "no column 'none'"),
        (["--domain", "far.csv"], "far.csv has no column 'lon'"),
        (["--checkpoint", "none/run.ckpt"], "does not exist"),
    ],
)
def test_bad_targets_and_options_are_refused_before_the_fit(folder, capsys, more, message):
    pd.DataFrame({"x": [1.0]}).to_csv("far.csv", index=False)
    assert message in refused(capsys, *fit_command(*more))


@pytest.mark.parametrize(
    "content", [None, b"", b"lon,lat\n1,2\n", b"\x89HDF\r\n\x1a\n" + b"\0" * 99]
)
@pytest.mark.parametrize("command", ["diagnose", "predict"])
def test_foreign_fits_are_refused(folder, capsys, command, content):
    if content is not None:
        Path("fit.nc").write_bytes(content)
    more = ["sites.csv", "-o", "out.csv"] if command == "predict" else []
    err = refused(capsys, command, "fit.nc", *more)
    assert "no file fit.nc" in err or "not a fit" in err or "damaged" in err


def test_fit_passes_its_options_on(folder, capsys, built):
    options = "--prior-mean linear --priors paper --gp rff --strategy joint --inference fast "
    options += "--target-accept 0.9 "
    options += (
        "--chains 2 --draws 30 --seed 7 --crs EPSG:4326 --domain sites.csv --checkpoint run.ckpt"
    )
    status, out, err = run(capsys, *fit_command(*options.split()))
    assert (status, err) == (0, "")
    assert "fit.nc: bne of aqs at 12 sites" in out
    assert "fast approximation" in out
    assert "The draws can be trusted." in out
    (model,) = built
    assert model.fitted == (12, "aqs", False, "run.ckpt")
    domain = model.parameters.pop("domain")
    assert list(domain.columns) == ["lon", "lat"]
    assert model.parameters == {
        "base_models": BASE,
        "coords": ["lon", "lat"],
        "prior_mean": "linear",
        "priors": "paper",
        "kernel": "matern32",
        "gp": "rff",
        "strategy": "joint",
        "inference": "fast",
        "chains": 2,
        "draws": 30,
        "target_accept": 0.9,
        "crs": "EPSG:4326",
        "random_state": 7,
    }


def test_models_are_switches_of_one(folder, capsys, built):
    assert list(MODELS) == ["bne", "bne-variance", "bae", "bma"]
    run(capsys, *fit_command("--model", "bne-variance"))
    assert built[-1].parameters["skewness"] is False


def test_fit_speaks_json(folder, capsys, built):
    change("train.csv", lambda t: t.assign(aqs=[np.nan, *t["aqs"][1:]]))
    status, out, err = run(capsys, *fit_command("--json", "--drop-missing"))
    result = json.loads(out)
    assert (status, err) == (0, "")
    assert (result["sites"], result["dropped"], result["model"]) == (11, 1, "bne")
    assert result["diagnosis"]["ok"] is True


@pytest.mark.parametrize("name", ["out.csv", "out.nc"])
def test_predict_writes_one_row_per_site(folder, capsys, built, name):
    run(capsys, *fit_command())
    options = ["--quantiles", "0.5,0.025", "--threshold", "9", "--draws", "3"]
    status, out, err = run(capsys, "predict", "fit.nc", "sites.csv", "-o", name, *options)
    assert (status, err) == (0, "")
    assert out == f"{name}: predictions at 12 sites, by Markov chains\n"
    labels = ["lon", "lat", "mean", "sd", "q2.5", "q50", "exceedance", "weight_pred_av"]
    labels += ["weight_pred_gs", "var_aleatoric", "var_epistemic", "var_total", "outside"]
    sites = pd.read_csv("sites.csv")
    if name.endswith(".csv"):
        table = pd.read_csv(name)
        assert list(table.columns) == [*labels, "draw_0", "draw_1", "draw_2"]
        draws = table[["draw_0", "draw_1", "draw_2"]].to_numpy().T
    else:
        with xr.open_dataset(name, engine="h5netcdf") as dataset:
            table, draws = dataset.load(), dataset["draws"].to_numpy()
        assert list(table.data_vars) == [*labels, "draws"]
        assert table.attrs["threshold"] == 9
    np.testing.assert_array_equal(table["mean"], sites["pred_av"])
    np.testing.assert_array_equal(table["lon"], sites["lon"])
    np.testing.assert_array_equal(table["exceedance"], sites["pred_av"] > 9)
    np.testing.assert_array_equal(draws[2], sites["pred_av"] + 2)
    assert not np.any(table["outside"])


def test_predict_says_what_it_left_out_and_what_lies_outside(folder, capsys, built):
    run(capsys, *fit_command())
    change("sites.csv", lambda t: t.assign(lon=[np.nan, 5.0, *t["lon"][2:]]))
    assert "'lon' contains NaN" in refused_by_stand_in(capsys)
    argv = ["predict", "fit.nc", "sites.csv", "-o", "out.csv", "--drop-missing"]
    _, out, _ = run(capsys, *argv)
    assert out.startswith(
        "out.csv: predictions at 11 sites (1 left out), by Markov chains\n1 of them lie outside"
    )
    _, out, _ = run(capsys, *argv, "--json")
    result = json.loads(out)
    assert (result["sites"], result["dropped"], result["outside"]) == (11, 1, 1)
    assert result["columns"][:4] == ["lon", "lat", "mean", "sd"]


def refused_by_stand_in(capsys):
    return refused(capsys, "predict", "fit.nc", "sites.csv", "-o", "out.csv")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.drop(columns="pred_gs"), "sites.csv has no column 'pred_gs'"),
        (lambda t: t.assign(pred_av="x"), "'pred_av' has text"),
        (lambda t: t[:0], "has no rows"),
    ],
)
def test_bad_sites_are_refused(folder, capsys, built, edit, message):
    run(capsys, *fit_command())
    change("sites.csv", edit)
    assert message in refused_by_stand_in(capsys)


def test_predict_refuses_targets_first(folder, capsys):
    assert "must end in one of" in refused(capsys, "predict", "no.nc", "no.csv", "-o", "out.xlsx")


def test_diagnose_prints_verdict_and_table(folder, capsys, built):
    run(capsys, *fit_command())
    status, out, _ = run(capsys, "diagnose", "fit.nc")
    assert status == 0
    assert out.startswith("The draws can be trusted.\n")
    assert "delta" in out
    _, out, _ = run(capsys, "diagnose", "fit.nc", "--json")
    assert json.loads(out) == {
        "ok": True,
        "table": [{"index": "delta", "r_hat": 1.004, "ess_bulk": 512.0}],
    }


def test_demo_tells_its_story(folder, capsys, built):
    status, out, err = run(capsys, "demo", "-o", "deep/demo", "--draws", "5")
    assert (status, err) == (0, "")
    files = {path.name for path in Path("deep/demo").iterdir()}
    assert files >= {"train.csv", "held_out.csv", "grid.csv", "fit.nc", "predictions.csv"}
    report = Path("deep/demo/report.html").read_text()
    assert "The draws can be trusted." in report
    assert ("data:image/png;base64," in report) == ("maps.png" in files)
    assert "rmse_grid" in out
    assert "bne fit deep/demo/train.csv" in out
    _, out, _ = run(capsys, "demo", "-o", "deep/demo", "--json")
    result = json.loads(out)
    assert result["scores"]["model_a"]["coverage_95"] is None
    assert result["scores"]["BNE"]["rmse"] == result["scores"]["model_a"]["rmse"]


def test_demo_goes_without_matplotlib(folder, capsys, built, monkeypatch):
    monkeypatch.setattr("bne.cli._report.find_spec", lambda name: None)
    assert run(capsys, "demo")[0] == 0
    assert not Path("demo/maps.png").exists()
    assert "matplotlib is not installed" in Path("demo/report.html").read_text()


def test_demo_refuses_a_file(folder, capsys):
    assert "is a file; name a directory" in refused(capsys, "demo", "-o", "train.csv")


class Failing(StandIn):
    error: BaseException = RuntimeError("solver\nlost")

    def fit(self, *arguments, **options):
        raise self.error


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InputError("a sentence"), 2, "bne: a sentence"),
        (OSError(28, "No space left on device", "fit.nc"), 2, "No space left on device: fit.nc"),
        (OSError("could not write"), 2, "could not write"),
        (KeyboardInterrupt(), 130, "run the same command again to resume from run.ckpt"),
        (RuntimeError("solver\nlost"), 1, "RuntimeError: solver lost - a defect of bne"),
    ],
)
def test_failures_are_one_line(folder, capsys, monkeypatch, error, status, message):
    monkeypatch.setattr(Failing, "error", error)
    monkeypatch.setattr(bne, "BNE", Failing, raising=False)
    got, out, err = run(capsys, *fit_command("--checkpoint", "run.ckpt"))
    assert (got, out) == (status, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_defect_shows_its_trace_on_request(folder, monkeypatch):
    monkeypatch.setattr(bne, "BNE", Failing, raising=False)
    monkeypatch.setenv("BNE_DEBUG", "1")
    with pytest.raises(RuntimeError, match="solver"):
        main(fit_command())


def test_warnings_are_one_line_each_and_not_repeated(folder, capsys, monkeypatch, built):
    import warnings

    class Doubtful(StandIn):
        def fit(self, *arguments, **options):
            for _ in range(2):
                warnings.warn("chains\n disagree", SamplingWarning, stacklevel=1)
            warnings.warn("for developers", FutureWarning, stacklevel=1)
            return self

    monkeypatch.setattr(bne, "BNE", Doubtful)
    change("train.csv", lambda t: t.assign(pred_gs=t["pred_av"]))
    status, _, err = run(capsys, *fit_command())
    assert status == 0
    first, second = err.splitlines()
    assert first.startswith("bne: warning: base models 'pred_av' and 'pred_gs' agree")
    assert second == "bne: warning: chains disagree"


def test_termination_is_an_interrupt(folder, capsys, monkeypatch):
    class Slow(StandIn):
        def fit(self, *arguments, **options):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(bne, "BNE", Slow, raising=False)
    before = signal.getsignal(signal.SIGTERM)
    assert run(capsys, *fit_command())[0] == 130
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_reader_that_closes_the_pipe_is_no_error(folder):
    program = f"{sys.executable} -m bne.cli fit --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_plain_values():
    value = {1: np.float64(np.nan), "a": (np.arange(2), Path("x"), np.True_, None)}
    assert to_plain(value) == {"1": None, "a": [[0, 1], "x", True, None]}


def test_parser_is_built_afresh():
    assert isinstance(build_parser(), argparse.ArgumentParser)


# From here on the real estimators.

QUICK = ["--chains", "2", "--draws", "20"]


@pytest.fixture
def estimators():
    pytest.importorskip("bne.estimators")


@pytest.mark.usefixtures("estimators")
def test_fit_predict_diagnose_for_real(folder, capsys):
    status, out, err = run(capsys, *fit_command(*QUICK, "--json"))
    assert status == 0, err
    assert json.loads(out)["sites"] == 12
    argv = ["predict", "fit.nc", "sites.csv", "-o", "out.csv", "--threshold", "9", "--draws", "4"]
    status, _, err = run(capsys, *argv)
    assert status == 0, err
    table = pd.read_csv("out.csv")
    assert len(table) == 12
    assert np.isfinite(table.select_dtypes("number")).all(axis=None)
    assert (table["q2.5"] < table["q50"]).all()
    assert (table["q50"] < table["q97.5"]).all()
    np.testing.assert_allclose(table["weight_pred_av"] + table["weight_pred_gs"], 1)
    np.testing.assert_allclose(table["sd"] ** 2, table["var_total"])
    assert not table["outside"].any()
    status, out, err = run(capsys, "diagnose", "fit.nc", "--json")
    assert status == 0, err
    assert isinstance(json.loads(out), dict)


@pytest.mark.usefixtures("estimators")
@pytest.mark.parametrize("model", ["bma", "bae", "bne-variance"])
def test_reduced_models_for_real(folder, capsys, model):
    status, _, err = run(capsys, *fit_command(*QUICK, "--model", model))
    assert status == 0, err
    status, _, err = run(capsys, "predict", "fit.nc", "sites.csv", "-o", "out.csv")
    assert status == 0, err


@pytest.mark.usefixtures("estimators")
def test_the_same_seed_gives_the_same_bytes_in_a_fresh_process(folder, capsys):
    argv = ["predict", "fit.nc", "sites.csv", "--draws", "3", "-o"]
    assert run(capsys, *fit_command(*QUICK))[0] == 0
    assert run(capsys, *argv, "one.csv")[0] == 0
    subprocess.run([sys.executable, "-m", "bne.cli", *argv, "two.csv"], check=True)
    assert Path("one.csv").read_bytes() == Path("two.csv").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("estimators")
def test_demo_for_real(folder, capsys):
    status, out, err = run(capsys, "demo", *QUICK)
    assert status == 0, err
    assert "BNE" in out
    assert Path("demo/report.html").exists()
