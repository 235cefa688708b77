"""What users pass, and the sentences they get back."""

import warnings

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from bne.checks import (
    check_training,
    drop_missing,
    read_response,
    read_sites,
    read_training,
    require_columns,
    resolve_columns,
)
from bne.errors import InputError, InputWarning


@pytest.fixture
def table():
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "lon": rng.uniform(-72, -70, 8),
            "lat": rng.uniform(41, 43, 8),
            "pred_av": rng.normal(size=8),
            "pred_gs": rng.normal(size=8),
            "aqs": rng.normal(size=8),
        },
        index=list("abcdefgh"),
    )


class Plane:
    """A fitted predictor: the sum of its inputs."""

    def __init__(self, shape=None):
        self.shape = shape
        self.seen = None

    def predict(self, X):
        self.seen = X
        total = np.asarray(X, dtype=float).sum(axis=1)
        return total if self.shape is None else np.zeros(self.shape)


def read(table, **kwargs):
    arguments = {"coords": ["lon", "lat"], "base_models": ["pred_av", "pred_gs"]} | kwargs
    return read_sites(table, **arguments)


def test_columns_are_read_by_name(table):
    sites = read(table[["aqs", "pred_gs", "lat", "lon", "pred_av"]])
    np.testing.assert_array_equal(sites.coords, table[["lon", "lat"]])
    np.testing.assert_array_equal(sites.base, table[["pred_av", "pred_gs"]])
    assert list(sites.index) == list("abcdefgh")
    assert sites.coord_names == ("lon", "lat")
    assert sites.base_names == ("pred_av", "pred_gs")
    assert sites.kept.all()
    assert len(sites) == 8


def test_mapping_dataset_and_frame_agree(table):
    expected = read(table)
    for other in (table.to_dict("list"), xr.Dataset.from_dataframe(table)):
        sites = read(other)
        np.testing.assert_array_equal(sites.coords, expected.coords)
        np.testing.assert_array_equal(sites.base, expected.base)


def test_numbers_of_other_types_become_float64():
    frame = pd.DataFrame(
        {
            "x": pd.array([1, 2, 3], dtype="Int64"),
            "text": ["1.5", " 2", "3e1"],
            "flag": [True, False, True],
            "single": np.array([0.1, 0.2, 0.3], dtype=np.float32),
        }
    )
    sites = read_sites(frame, coords="x", base_models=["text", "flag", "single"])
    assert sites.coords.dtype == sites.base.dtype == np.float64
    np.testing.assert_array_equal(sites.base[:, :2], [[1.5, 1], [2, 0], [30, 1]])


@pytest.mark.parametrize(
    ("columns", "coords", "base"),
    [(1, (0,), (0,)), (2, (0, 1), (0, 1)), (3, (0, 1), (2,)), (5, (0, 1), (2, 3, 4))],
)
def test_defaults_for_a_plain_array(columns, coords, base):
    values = np.arange(4.0 * columns).reshape(4, columns)
    sites = read_sites(values)
    assert (sites.coord_names, sites.base_names, sites.index) == (coords, base, None)
    np.testing.assert_array_equal(sites.base, values[:, base])


def test_defaults_for_a_frame_find_longitude_and_latitude_and_leave_out_y(table):
    shuffled = table[["pred_av", "lat", "pred_gs", "lon", "aqs"]]
    assert resolve_columns(shuffled, response="aqs") == (("lat", "lon"), ("pred_av", "pred_gs"))
    sites, _ = read_training(shuffled, table["aqs"])
    assert sites.base_names == ("pred_av", "pred_gs")


def test_one_name_is_a_list_of_one(table):
    sites = read_sites(table, coords="lon", base_models="pred_av")
    assert sites.coords.shape == sites.base.shape == (8, 1)


def test_fitted_predictors_are_called_on_the_coordinates(table):
    plane = Plane()
    sites = read(table, base_models=["pred_av", ("plane", plane)])
    assert list(plane.seen.columns) == ["lon", "lat"]
    assert sites.base_names == ("pred_av", "plane")
    np.testing.assert_allclose(sites.base[:, 1], table["lon"] + table["lat"])
    read_sites(np.ones((3, 2)), coords=[0, 1], base_models=("plane", plane))
    assert isinstance(plane.seen, np.ndarray)


def test_predictor_of_another_shape_is_refused(table):
    with pytest.raises(InputError, match=r"'plane' predicted an array of shape \(8, 2\) for 8"):
        read(table, base_models=[("plane", Plane((8, 2)))])


def test_predictor_that_returns_nan_is_refused(table):
    plane = Plane()
    plane.predict = lambda X: np.full(len(X), np.nan)
    with pytest.raises(InputError, match="'plane' contains NaN in 8 rows"):
        read(table, base_models=[("plane", plane)])


def test_misspelt_column_names_the_nearest(table):
    with pytest.raises(InputError, match=r"no column 'Pred_avv'; did you mean 'pred_av' or"):
        read(table, base_models=["Pred_avv"])
    with pytest.raises(InputError, match=r"TEST has no column 'zzz'; its columns are 'lon', 'lat'"):
        read(table, base_models=["zzz"], what="TEST")


def test_column_that_is_there_twice_is_refused(table):
    doubled = pd.concat([table, table[["lon"]]], axis=1)
    with pytest.raises(InputError, match="2 columns named 'lon'"):
        read(doubled)
    with pytest.raises(InputError, match="base_models names 'pred_av' more than once"):
        read(table, base_models=["pred_av", "pred_av"])


def test_text_in_a_number_column_names_rows(table):
    table["pred_av"] = table["pred_av"].astype(object)
    table.loc[["b", "e"], "pred_av"] = ["n/a", "low"]
    with pytest.raises(
        InputError, match=r"'pred_av' has text .* such as 'n/a', in 2 rows \(b, e\)"
    ):
        read(table)


def test_nan_and_infinity_are_counted_by_column_and_row(table):
    table.loc[["b", "e"], "pred_av"] = np.nan
    table.loc["c", "lat"] = np.inf
    with pytest.raises(InputError) as caught:
        read(table)
    message = str(caught.value)
    assert "'lat' contains infinity in 1 row (c)" in message
    assert "'pred_av' contains NaN in 2 rows (b, e)" in message
    assert "--drop-missing" in message


def test_many_rows_are_abridged():
    frame = pd.DataFrame({"x": np.arange(20.0), "f": np.nan})
    with pytest.raises(InputError, match=r"20 rows \(0, 1, 2, 3, 4 and 15 more, counted from 0\)"):
        read_sites(frame, coords=["x"], base_models=["f"])


def test_missing_rows_can_be_dropped(table):
    table.loc["b", "pred_av"] = np.nan
    table.loc["c", "lat"] = -np.inf
    sites = read(table, missing="drop")
    assert list(sites.index) == list("adefgh")
    np.testing.assert_array_equal(sites.kept, [True, False, False] + [True] * 5)
    kept, dropped = drop_missing(table, ["lat", "pred_av", "lat"])
    assert (list(kept.index), dropped) == (list("adefgh"), 2)


def test_missing_response_is_dropped_with_its_row(table):
    table.loc["b", "pred_av"] = np.nan
    table.loc["c", "aqs"] = np.nan
    sites, y = read_training(
        table, table["aqs"], ["lon", "lat"], ["pred_av", "pred_gs"], missing="drop"
    )
    assert list(sites.index) == list("adefgh")
    np.testing.assert_array_equal(y, table["aqs"].drop(["b", "c"]))
    np.testing.assert_array_equal(np.flatnonzero(~sites.kept), [1, 2])
    with pytest.raises(InputError, match="'pred_av' contains NaN"):
        read_training(table, table["aqs"], ["lon", "lat"], ["pred_av"])
    with pytest.raises(InputError, match=r"'aqs' contains NaN in 1 row \(c\)"):
        read_training(table, table["aqs"], ["lon", "lat"], ["pred_gs"])


def test_nothing_left_after_dropping(table):
    table["lat"] = np.nan
    with pytest.raises(InputError, match="no row in which every"):
        read(table, missing="drop")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("train.csv", "is text, not a table"),
        (np.zeros(5), "Reshape your data"),
        (np.zeros((0, 3)), "0 sample"),
        (np.zeros((3, 0)), "0 feature"),
        (np.zeros((3, 2), dtype=complex), "Complex data not supported"),
        ({"lon": [1.0, 2.0], "lat": [1.0]}, "same length"),
        (pd.DataFrame({"lon": []}), "no rows"),
    ],
)
def test_what_is_no_table_is_refused(bad, message):
    with pytest.raises(InputError, match=message):
        read_sites(bad)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pd.date_range("2020-01-01", periods=3), "'t' holds dates"),
        (np.array([1j, 2, 3]), "Complex data not supported"),
    ],
)
def test_columns_that_are_not_real_numbers_are_refused(column, message):
    frame = pd.DataFrame({"t": column, "f": [1.0, 2.0, 3.0]})
    with pytest.raises(InputError, match=message):
        read_sites(frame, coords="t", base_models="f")


def test_empty_choices_are_refused(table):
    with pytest.raises(InputError, match="coords is empty"):
        read(table, coords=[])
    with pytest.raises(InputError, match="base_models is empty"):
        read(table, base_models=[])
    with pytest.raises(InputError, match="is not one of"):
        read(table, missing="ignore")


def test_response_is_read_from_anything_one_dimensional(table):
    for y in (table["aqs"], table["aqs"].to_numpy(), table["aqs"].tolist()):
        np.testing.assert_array_equal(read_response(y, 8), table["aqs"])


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (None, "requires y to be passed"),
        (np.zeros(7), "'y' has 7 values for 8 sites"),
        (np.zeros((8, 2)), "1d array"),
        (["a"] * 8, "'y' has text where a number is needed"),
        (pd.Series([np.inf] + [0.0] * 7, name="aqs"), "'aqs' contains infinity in 1 row"),
    ],
)
def test_bad_responses(y, message):
    with pytest.raises(InputError, match=message):
        read_response(y, 8)


def test_one_site_and_constant_response_are_refused(table):
    columns = (["lon", "lat"], ["pred_av", "pred_gs"])
    with pytest.raises(InputError, match="one site only"):
        read_training(table[:1], table["aqs"][:1], *columns)
    with pytest.raises(InputError, match="y is 3 at all 8 sites"):
        read_training(table, np.full(8, 3.0), *columns)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pred_av": 2.0}, "'pred_av' predicts 2 at every"),
        ({"copy": lambda t: t["pred_av"]}, "'pred_av' and 'copy' agree"),
        ({"copy": lambda t: t["aqs"]}, "'copy' equals y"),
    ],
)
def test_suspicious_base_models_are_warned_of(table, change, message):
    table = table.assign(**change)
    names = [c for c in table.columns if c in ("pred_av", "pred_gs", "copy")]
    with pytest.warns(InputWarning, match=message):
        read_training(table, table["aqs"], ["lon", "lat"], names)


def test_repeated_sites_are_warned_of(table):
    table.loc["f", ["lon", "lat"]] = table.loc["b", ["lon", "lat"]]
    with pytest.warns(InputWarning, match=r"same coordinates: 2 rows \(b, f\)"):
        read_training(table, table["aqs"], ["lon", "lat"], ["pred_av"])


def test_shuffled_response_is_warned_of(table):
    with pytest.warns(InputWarning, match="another order"):
        read_training(table, table["aqs"][::-1], ["lon", "lat"], ["pred_av"])


def test_clean_data_pass_in_silence(table):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sites, y = read_training(table, table["aqs"], ["lon", "lat"], ["pred_av", "pred_gs"])
        check_training(sites, y)
        require_columns(table.columns, ["lon", "aqs"])
