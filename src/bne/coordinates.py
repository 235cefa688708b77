"""From the user's coordinates to kilometres, and from the units of y to standard ones."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pyproj import CRS, Transformer
from pyproj.exceptions import CRSError

from bne.checks import LATITUDE_NAMES, LONGITUDE_NAMES
from bne.errors import InputError, InputWarning

__all__ = ["CoordinateMap", "Standardiser"]

FloatArray: TypeAlias = NDArray[np.float64]

EARTH_RADIUS_KM = 6371.0088  # mean radius
MAX_REACH_KM = 6700.0  # from the centre: a third of the globe from side to side
_WGS84 = "EPSG:4326"


@dataclass(frozen=True)
class CoordinateMap:
    """From raw coordinates to the coordinates in which the processes live.

    Longitude and latitude become kilometres east and north on an azimuthal-equidistant plane
    centred on the training sites; other coordinates are kept in the user's units. The map holds
    plain values only: it can be copied, compared, pickled and stored.

    Attributes
    ----------
    names
        Names of the columns.
    geographic
        Positions of (longitude, latitude) among the columns, or None on a plane.
    centre
        Longitude and latitude of the centre in degrees (WGS84), or None on a plane.
    reach
        Distance from the centre to the furthest training site in kilometres; 0 on a plane.
    crs
        Coordinate reference system as text, or None if unknown.
    """

    names: tuple[Hashable, ...]
    geographic: tuple[int, int] | None = None
    centre: tuple[float, float] | None = None
    reach: float = 0.0
    crs: str | None = None

    @classmethod
    def fit(
        cls, raw: FloatArray, names: Sequence[Hashable] | None = None, crs: Any = None
    ) -> CoordinateMap:
        """Choose the map from the training sites.

        Parameters
        ----------
        raw
            Coordinates, shape (n, d).
        names
            Their names. Without `crs`, a pair such as lon, lat (longitude, lng, long; latitude; any
            case, either order) marks them as geographic.
        crs
            Anything that `pyproj.CRS` accepts. A geographic one makes the first two columns
            longitude and latitude, unless their names say otherwise; a projected one leaves the
            coordinates in its own units.

        Raises
        ------
        InputError
            For an unknown CRS, coordinates out of range or swapped, or sites too wide apart for one
            plane.
        """
        raw = np.asarray(raw, dtype=np.float64)
        labels = tuple(range(raw.shape[1])) if names is None else tuple(names)
        if len(labels) != raw.shape[1]:
            raise InputError(f"{len(labels)} names for {raw.shape[1]} coordinates")
        pair, system = _find_geographic(labels, crs)
        if pair is None:
            return cls(labels, crs=system)
        if raw.shape[1] < 2:
            raise InputError("a geographic CRS needs two coordinates, longitude and latitude")
        draft = cls(labels, geographic=pair, crs=system)
        degrees = draft._degrees(raw)
        _warn_if_polar(degrees)
        centre = _spherical_mean(degrees)
        reach = float(_arc_km(degrees, centre).max())
        if reach > MAX_REACH_KM:
            raise InputError(
                f"the sites reach {reach:,.0f} km from their centre, too wide for one local plane "
                f"(limit {MAX_REACH_KM:,.0f} km); fit one region at a time"
            )
        return cls(labels, geographic=pair, centre=centre, reach=reach, crs=system)

    @property
    def units(self) -> str:
        """Units of the transformed coordinates: "km", or "" for the user's own."""
        return "km" if self.geographic is not None else ""

    def transform(self, raw: FloatArray) -> FloatArray:
        """Map raw coordinates, shape (n, d), to model coordinates of the same shape.

        Raises
        ------
        InputError
            For longitudes or latitudes that are out of range or evidently swapped.
        """
        out = np.array(raw, dtype=np.float64)
        if out.ndim != 2 or out.shape[1] != len(self.names):
            raise InputError(
                f"coordinates of shape {out.shape}, where (n, {len(self.names)}) is needed"
            )
        if self.geographic is None or self.centre is None:
            return out
        degrees = self._degrees(out)
        self._refuse_swapped(degrees)
        to_plane = _local_plane(*self.centre)
        east, north = to_plane.transform(degrees[:, 0], degrees[:, 1], errcheck=True)
        out[:, self.geographic[0]], out[:, self.geographic[1]] = east, north
        return out

    def to_dict(self) -> dict[str, Any]:
        """Return the map as plain values that JSON can hold."""
        return {
            "names": list(self.names),
            "geographic": None if self.geographic is None else list(self.geographic),
            "centre": None if self.centre is None else list(self.centre),
            "reach": self.reach,
            "crs": self.crs,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CoordinateMap:
        """Rebuild a map from `to_dict`, bit for bit."""
        geographic, centre = values["geographic"], values["centre"]
        return cls(
            names=tuple(values["names"]),
            geographic=None if geographic is None else (int(geographic[0]), int(geographic[1])),
            centre=None if centre is None else (float(centre[0]), float(centre[1])),
            reach=float(values["reach"]),
            crs=values["crs"],
        )

    def _degrees(self, raw: FloatArray) -> FloatArray:
        """Longitude and latitude in WGS84 degrees, shape (n, 2), checked."""
        assert self.geographic is not None
        degrees = raw[:, list(self.geographic)]
        lon_name, lat_name = (self.names[position] for position in self.geographic)
        if self.crs is not None and not _is_wgs84(self.crs):
            degrees = np.column_stack(_to_wgs84(self.crs).transform(degrees[:, 0], degrees[:, 1]))
        _check_range(degrees, lon_name, lat_name)
        return degrees

    def _refuse_swapped(self, degrees: FloatArray) -> None:
        """Refuse sites that all lie far away, but among the training sites once swapped."""
        assert self.centre is not None
        if len(degrees) == 0 or np.abs(degrees[:, 0]).max() > 90:
            return
        limit = 1.5 * self.reach + 10.0
        if (
            _arc_km(degrees, self.centre).min() > limit
            and _arc_km(degrees[:, ::-1], self.centre).max() < limit
        ):
            assert self.geographic is not None
            lon, lat = (self.names[position] for position in self.geographic)
            raise InputError(
                f"{lon!r} and {lat!r} seem swapped: the other way round, these sites lie "
                "among the training sites"
            )


@dataclass(frozen=True)
class Standardiser:
    """One affine map, v -> (v - centre) / scale, shared by y and the base models.

    Being shared, it leaves a convex combination of base models a convex combination.

    Attributes
    ----------
    centre
        Mean of the training y, in the units of y.
    scale
        Standard deviation of the training y (divisor n), in the units of y.
    """

    centre: float
    scale: float

    @classmethod
    def fit(cls, y: FloatArray) -> Standardiser:
        """Take centre and scale from the training response.

        Raises
        ------
        InputError
            If y does not vary, or its spread is not a finite number.
        """
        y = np.asarray(y, dtype=np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            centre, scale = float(y.mean()), float(y.std())
        if not np.isfinite(scale) or not np.isfinite(centre):
            raise InputError("y has values too large for their spread to be computed; rescale it")
        if scale == 0:
            raise InputError("y does not vary; there is nothing to fit")
        return cls(centre, scale)

    def forward(self, values: FloatArray) -> FloatArray:
        """From the units of y to standardised units."""
        return np.asarray((np.asarray(values, dtype=np.float64) - self.centre) / self.scale)

    def backward(self, values: FloatArray) -> FloatArray:
        """From standardised units to the units of y."""
        return np.asarray(np.asarray(values, dtype=np.float64) * self.scale + self.centre)

    def to_dict(self) -> dict[str, float]:
        """Return centre and scale as plain values that JSON can hold."""
        return {"centre": self.centre, "scale": self.scale}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Standardiser:
        """Rebuild from `to_dict`, bit for bit."""
        return cls(float(values["centre"]), float(values["scale"]))


def _find_geographic(
    names: Sequence[Hashable], crs: Any
) -> tuple[tuple[int, int] | None, str | None]:
    """Return the positions of longitude and latitude, if any, and the CRS as text."""
    lowered = [str(name).lower() for name in names]
    lon = [i for i, name in enumerate(lowered) if name in LONGITUDE_NAMES]
    lat = [i for i, name in enumerate(lowered) if name in LATITUDE_NAMES]
    named = (lon[0], lat[0]) if len(lon) == 1 and len(lat) == 1 else None
    if crs is None:
        return named, (_WGS84 if named else None)
    try:
        system = CRS.from_user_input(crs)
    except CRSError:
        raise InputError(
            f"crs={crs!r} is not a coordinate reference system; try 'EPSG:4326'"
        ) from None
    if system.is_geocentric:
        raise InputError(
            f"crs={crs!r} is geocentric; give longitude and latitude, or a projected system"
        )
    text = system.to_string() if system.to_authority() else system.to_wkt()
    return (named or (0, 1)) if system.is_geographic else None, text


def _check_range(degrees: FloatArray, lon_name: Hashable, lat_name: Hashable) -> None:
    lon, lat = degrees.T
    bad_lat, bad_lon = ~(np.abs(lat) <= 90), ~((lon >= -180) & (lon <= 360))
    if bad_lat.any() and (np.abs(lon) <= 90).all() and ((lat >= -180) & (lat <= 360)).all():
        raise InputError(
            f"{lon_name!r} and {lat_name!r} seem swapped: there is no latitude of "
            f"{lat[bad_lat][0]:g} degrees"
        )
    for bad, values, name, word, limits in (
        (bad_lat, lat, lat_name, "latitude", "-90 to 90"),
        (bad_lon, lon, lon_name, "longitude", "-180 to 360"),
    ):
        if bad.any():
            raise InputError(
                f"{name!r} is {values[bad][0]:g} at {int(bad.sum())} site(s), not a {word} in "
                f"degrees ({limits}); for coordinates on a plane, use other names or pass their crs"
            )


def _warn_if_polar(degrees: FloatArray) -> None:
    lon, lat = degrees.T
    if (lat < -60).all() and (np.abs(lon) <= 90).all():
        warnings.warn(
            "all sites lie south of 60 degrees South; are longitude and latitude swapped?",
            InputWarning,
            stacklevel=4,
        )


def _unit_vectors(degrees: FloatArray) -> FloatArray:
    lon, lat = np.radians(degrees).T
    return np.column_stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)])


def _spherical_mean(degrees: FloatArray) -> tuple[float, float]:
    """Longitude and latitude of the mean direction; the antimeridian is nothing special to it."""
    x, y, z = _unit_vectors(degrees).mean(axis=0)
    if np.sqrt(x * x + y * y + z * z) < 1e-6:
        raise InputError(
            "the sites are spread around the globe, too wide for one local plane; "
            "fit one region at a time"
        )
    return float(np.degrees(np.arctan2(y, x))), float(np.degrees(np.arctan2(z, np.hypot(x, y))))


def _arc_km(degrees: FloatArray, centre: tuple[float, float]) -> FloatArray:
    """Great-circle distances to the centre, on the sphere."""
    here, there = _unit_vectors(degrees), _unit_vectors(np.array([centre]))
    chord = np.linalg.norm(here - there, axis=1)
    return np.asarray(2 * EARTH_RADIUS_KM * np.arcsin(np.minimum(chord / 2, 1.0)))


@lru_cache(maxsize=32)
def _local_plane(lon: float, lat: float) -> Transformer:
    plane = CRS.from_dict(
        {
            "proj": "aeqd",
            "lon_0": lon,
            "lat_0": lat,
            "x_0": 0,
            "y_0": 0,
            "datum": "WGS84",
            "units": "km",
        }
    )
    return Transformer.from_crs(_WGS84, plane, always_xy=True)


@lru_cache(maxsize=32)
def _is_wgs84(crs: str) -> bool:
    return CRS.from_user_input(crs).to_authority() in {("EPSG", "4326"), ("OGC", "CRS84")}


@lru_cache(maxsize=32)
def _to_wgs84(crs: str) -> Transformer:
    return Transformer.from_crs(crs, _WGS84, always_xy=True)
