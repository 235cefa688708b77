"""Kilometres and standard units."""

import json
import pickle

import numpy as np
import pytest
from pyproj import Geod

from bne.coordinates import CoordinateMap, Standardiser
from bne.errors import InputError, InputWarning

NEW_ENGLAND = np.array([[-71.06, 42.36], [-72.93, 41.31], [-71.41, 41.82], [-70.26, 43.66]])


def distances(xy):
    return np.linalg.norm(xy[:, None] - xy[None], axis=-1)


def geodesics(degrees):
    geod = Geod(ellps="WGS84")
    lon, lat = degrees.T
    n = len(lon)
    i, j = np.meshgrid(range(n), range(n))
    return (geod.inv(lon[i], lat[i], lon[j], lat[j])[2] / 1000).T


@pytest.mark.parametrize("shift", [0.0, 251.0, 360.0])
def test_distances_are_geodesic_kilometres_anywhere(shift):
    degrees = NEW_ENGLAND + np.array([shift, 0])
    degrees[:, 0] = np.where(degrees[:, 0] > 180, degrees[:, 0] - 360, degrees[:, 0])
    xy = CoordinateMap.fit(degrees, ["lon", "lat"]).transform(degrees)
    np.testing.assert_allclose(distances(xy), geodesics(degrees), rtol=2e-4, atol=1e-9)


def test_antimeridian_is_nothing_special():
    degrees = np.array([[179.5, -17.0], [-179.5, -17.0], [179.9, -16.5], [-179.8, -17.6]])
    fitted = CoordinateMap.fit(degrees, ["lon", "lat"])
    assert abs(abs(fitted.centre[0]) - 180) < 0.5
    np.testing.assert_allclose(
        distances(fitted.transform(degrees)), geodesics(degrees), rtol=1e-4, atol=1e-9
    )
    turned = degrees + np.array([[0, 0], [360, 0], [0, 0], [360, 0]])
    np.testing.assert_allclose(fitted.transform(turned), fitted.transform(degrees), atol=1e-6)


def test_first_axis_is_east_second_is_north():
    fitted = CoordinateMap.fit(NEW_ENGLAND, ["lon", "lat"])
    x, y = fitted.transform(np.array([fitted.centre, np.add(fitted.centre, [0.1, 0.1])])).T
    np.testing.assert_allclose([x[0], y[0]], 0, atol=1e-9)
    assert 7 < x[1] < 9
    assert 11 < y[1] < 12
    assert fitted.units == "km"


@pytest.mark.parametrize(
    "names", [("lat", "lon"), ("Latitude", "LONGITUDE"), ("LAT", "lng"), ("lat", "long")]
)
def test_columns_are_recognised_in_either_order(names):
    straight = CoordinateMap.fit(NEW_ENGLAND, ["lon", "lat"]).transform(NEW_ENGLAND)
    turned = CoordinateMap.fit(NEW_ENGLAND[:, ::-1], names).transform(NEW_ENGLAND[:, ::-1])
    np.testing.assert_array_equal(turned, straight[:, ::-1])


def test_further_columns_are_kept():
    raw = np.column_stack([NEW_ENGLAND, [1.0, 2.0, 3.0, 4.0]])
    xyz = CoordinateMap.fit(raw, ["lon", "lat", "t"]).transform(raw)
    np.testing.assert_array_equal(xyz[:, 2], raw[:, 2])
    assert np.ptp(xyz[:, 0]) > 100


@pytest.mark.parametrize("names", [("x", "y"), ("easting", "northing"), None, ("lon", "height")])
def test_plane_coordinates_are_kept(names):
    fitted = CoordinateMap.fit(NEW_ENGLAND, names)
    moved = fitted.transform(NEW_ENGLAND)
    np.testing.assert_array_equal(moved, NEW_ENGLAND)
    assert moved is not NEW_ENGLAND
    assert (fitted.units, fitted.crs) == ("", None)


def test_crs_decides():
    by_crs = CoordinateMap.fit(NEW_ENGLAND, ["x", "y"], crs=4326)
    by_name = CoordinateMap.fit(NEW_ENGLAND, ["lon", "lat"])
    np.testing.assert_array_equal(by_crs.transform(NEW_ENGLAND), by_name.transform(NEW_ENGLAND))
    plane = CoordinateMap.fit(NEW_ENGLAND * 1000, ["lon", "lat"], crs="EPSG:5070")
    assert (plane.units, plane.crs) == ("", "EPSG:5070")
    np.testing.assert_array_equal(plane.transform(NEW_ENGLAND), NEW_ENGLAND)


def test_other_geographic_systems_are_converted():
    nad27 = CoordinateMap.fit(NEW_ENGLAND, ["lon", "lat"], crs="EPSG:4267")
    wgs84 = CoordinateMap.fit(NEW_ENGLAND, ["lon", "lat"])
    np.testing.assert_allclose(
        distances(nad27.transform(NEW_ENGLAND)), distances(wgs84.transform(NEW_ENGLAND)), rtol=1e-3
    )


@pytest.mark.parametrize("crs", ["EPSG:4326", "EPSG:4267", None])
def test_round_trip_through_json_keeps_every_bit(crs):
    fitted = CoordinateMap.fit(NEW_ENGLAND, ["lon", "lat"], crs=crs)
    again = CoordinateMap.from_dict(json.loads(json.dumps(fitted.to_dict())))
    assert again == fitted == pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.transform(NEW_ENGLAND), fitted.transform(NEW_ENGLAND))
    plane = CoordinateMap.fit(NEW_ENGLAND)
    assert CoordinateMap.from_dict(json.loads(json.dumps(plane.to_dict()))) == plane


def test_any_chunking_gives_the_same_bits():
    fitted = CoordinateMap.fit(NEW_ENGLAND, ["lon", "lat"])
    many = np.random.default_rng(0).uniform([-73, 41], [-70, 44], size=(500, 2))
    whole = fitted.transform(many)
    parts = [fitted.transform(part) for part in np.array_split(many, 7)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert fitted.transform(np.empty((0, 2))).shape == (0, 2)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ([[42.4, -101.1], [41.3, -102.9]], "'lon' and 'lat' seem swapped: there is no latitude"),
        ([[-71.0, 95.0], [-171.0, 41.0]], "'lat' is 95 at 1 site"),
        ([[-371.0, 42.0], [-72.0, 41.0]], "'lon' is -371 at 1 site.* use other names"),
        ([[0.0, 0.0], [180.0, 0.0]], "too wide"),
        ([[0.0, 0.0], [90.0, 0.0], [45.0, 20.0], [170.0, 3.0]], "too wide for one local plane"),
    ],
)
def test_impossible_places_are_refused(degrees, message):
    with pytest.raises(InputError, match=message):
        CoordinateMap.fit(np.array(degrees), ["lon", "lat"])


def test_sites_swapped_at_prediction_are_refused():
    fitted = CoordinateMap.fit(NEW_ENGLAND, ["lon", "lat"])
    with pytest.raises(InputError, match="seem swapped: the other way round"):
        fitted.transform(NEW_ENGLAND[:, ::-1])
    fitted.transform(np.array([[2.35, 48.86]]))  # far away is not swapped


def test_sites_that_could_be_antarctic_are_warned_of():
    with pytest.warns(InputWarning, match="swapped"):
        CoordinateMap.fit(NEW_ENGLAND[:, ::-1], ["lon", "lat"])


@pytest.mark.parametrize(
    ("crs", "message"),
    [("EPSG:0", "is not a coordinate reference system"), ("EPSG:4978", "geocentric")],
)
def test_unknown_systems_are_refused(crs, message):
    with pytest.raises(InputError, match=message):
        CoordinateMap.fit(NEW_ENGLAND, crs=crs)


def test_shapes_are_checked():
    with pytest.raises(InputError, match="3 names for 2"):
        CoordinateMap.fit(NEW_ENGLAND, ["a", "b", "c"])
    with pytest.raises(InputError, match="two coordinates"):
        CoordinateMap.fit(NEW_ENGLAND[:, :1], crs=4326)
    with pytest.raises(InputError, match=r"\(n, 2\) is needed"):
        CoordinateMap.fit(NEW_ENGLAND).transform(np.zeros((3, 1)))


def test_standardiser_keeps_convex_combinations_convex():
    rng = np.random.default_rng(1)
    y, base, weights = rng.normal(9, 3, 40), rng.normal(8, 2, (40, 3)), [0.2, 0.5, 0.3]
    unit = Standardiser.fit(y)
    np.testing.assert_allclose([unit.forward(y).mean(), unit.forward(y).std()], [0, 1], atol=1e-12)
    np.testing.assert_allclose(unit.forward(base) @ weights, unit.forward(base @ weights))
    np.testing.assert_allclose(unit.backward(unit.forward(y)), y)
    assert Standardiser.from_dict(json.loads(json.dumps(unit.to_dict()))) == unit


@pytest.mark.parametrize(
    ("y", "message"), [([2.0, 2.0], "does not vary"), ([1e308, -1e308], "too large")]
)
def test_standardiser_refuses_what_has_no_scale(y, message):
    with pytest.raises(InputError, match=message):
        Standardiser.fit(np.array(y))
