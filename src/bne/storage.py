"""Reading and writing tables and fits: atomically, without pickle, bit for bit.

A fit is a NetCDF-4 file with one group per part and the attributes ``format``, ``schema_version``,
``bne_version`` and ``digest`` at its root; structured attributes are JSON strings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np
import xarray as xr

from bne._files import PathLike, atomic_path, check_target, existing_file, first_line
from bne._tables import FIT_FORMAT, read_table, write_table
from bne.errors import FitFileError, InputError

__all__ = [
    "FIT_FORMAT",
    "SCHEMA_VERSION",
    "atomic_path",
    "check_target",
    "read_fit",
    "read_table",
    "write_fit",
    "write_table",
]

SCHEMA_VERSION = 2
_OLDEST_SCHEMA = 2  # before, values at the sites were kept in another basis
_RESERVED = ("format", "schema_version", "bne_version", "digest", "json_attributes")
_SLACK = 10_000_000  # bytes a file may declare beyond ten times its own size


def write_fit(path: PathLike, groups: Mapping[str, xr.Dataset], attrs: Mapping[str, Any]) -> None:
    """Write a fit, whole or not at all.

    Parameters
    ----------
    path
        File to write.
    groups
        Named parts of the fit. float64 values keep their bits.
    attrs
        Text, numbers, or anything that JSON can hold.

    Raises
    ------
    InputError
        For a place that cannot be written to, or a reserved or impossible name.
    OSError
        When writing fails; nothing is left behind, and a file that was there before still is.
    """
    path = check_target(path)
    for name in groups:
        if not name or "/" in name:
            raise InputError(f"{name!r} cannot name a part of a fit")
    header = _encode_attrs(attrs) | {
        "format": FIT_FORMAT,
        "schema_version": SCHEMA_VERSION,
        "bne_version": _package_version(),
        "digest": _digest(groups),
    }
    with atomic_path(path) as temporary:
        xr.Dataset(attrs=header).to_netcdf(temporary, mode="w", engine="h5netcdf", format="NETCDF4")
        for name, group in groups.items():
            group.to_netcdf(
                temporary, mode="a", group=name, engine="h5netcdf", encoding=_plain_encoding(group)
            )


def read_fit(path: PathLike) -> tuple[dict[str, xr.Dataset], dict[str, Any]]:
    """Read a fit into memory.

    Nothing in the file is executed, and links to other files are refused.

    Parameters
    ----------
    path
        File written by `write_fit`.

    Returns
    -------
    groups, attrs
        As they were given to `write_fit`, and ``schema_version`` and ``bne_version``.

    Raises
    ------
    FitFileError
        With a sentence, for a file that is missing, damaged, foreign, or of a newer schema.
    """
    path = existing_file(path, FitFileError)
    _inspect(path)
    try:
        groups = {name: _read_group(path, name) for name in _group_names(path)}
        with xr.open_dataset(path, engine="h5netcdf", decode_cf=False) as root:
            raw = dict(root.attrs)
        attrs = _decode_attrs(raw)
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        raise FitFileError(
            f"{path} is damaged and cannot be read ({first_line(error)}); fit again"
        ) from None
    if _digest(groups) != raw.get("digest"):
        raise FitFileError(f"{path} is damaged: its contents do not match its digest; fit again")
    return groups, attrs


def _plain_encoding(group: xr.Dataset) -> dict[Any, dict[str, Any]]:
    """No fill values: they would rewrite the bits of a NaN."""
    return {
        name: {"_FillValue": None} for name in group.variables if group[name].dtype.kind in "fiu"
    }


def _encode_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Text and numbers as they are, everything else as JSON, and a list of which is which."""
    encoded: dict[str, Any] = {}
    structured = []
    for name, value in attrs.items():
        if name in _RESERVED:
            raise InputError(f"the attribute {name!r} is reserved")
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            encoded[name] = value
        else:
            encoded[name] = json.dumps(value, default=_to_plain)
            structured.append(name)
    return encoded | {"json_attributes": json.dumps(structured)}


def _decode_attrs(raw: Mapping[str, Any]) -> dict[str, Any]:
    structured = set(json.loads(raw["json_attributes"]))
    attrs = {
        name: value for name, value in raw.items() if name not in ("digest", "json_attributes")
    }
    return {
        name: json.loads(value)
        if name in structured
        else value.item()
        if isinstance(value, np.generic)
        else value
        for name, value in attrs.items()
    }


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise InputError(f"a {type(value).__name__} cannot be stored in a fit")


def _digest(groups: Mapping[str, xr.Dataset]) -> str:
    """SHA-256 of names, dimensions, types and bytes of everything that a fit holds."""
    total = hashlib.sha256()
    for name in sorted(groups):
        for key in sorted(groups[name].variables, key=str):
            variable = groups[name].variables[key]
            values = np.ascontiguousarray(variable.values)
            kind = "text" if values.dtype.kind in "OUST" else values.dtype.newbyteorder("<").str
            total.update(f"{name}/{key}:{variable.dims}{values.shape}{kind}".encode())
            total.update(
                json.dumps(values.tolist()).encode() if kind == "text" else values.tobytes()
            )
    return total.hexdigest()


def _inspect(path: Path) -> None:
    """Refuse files that are not fits, before anything large is read."""
    try:
        with h5py.File(path, "r") as file:
            header = {name: file.attrs.get(name) for name in _RESERVED}
            _check_header_attrs(path, header)
            _refuse_trickery(path, file)
    except FitFileError:
        raise
    except Exception as error:
        if not h5py.is_hdf5(path):
            raise FitFileError(
                f"{path} is not a fit written by bne (not a NetCDF-4 file)"
            ) from None
        raise FitFileError(
            f"{path} is damaged and cannot be read ({first_line(error)}); fit again"
        ) from None


def _check_header_attrs(path: Path, header: Mapping[str, Any]) -> None:
    if header["format"] != FIT_FORMAT:
        raise FitFileError(f"{path} is a NetCDF or HDF5 file, but not a fit written by bne")
    schema = int(np.asarray(header["schema_version"]).item())
    if schema > SCHEMA_VERSION:
        raise FitFileError(
            f"{path} was written by bne {header['bne_version']} (schema {schema}); "
            f"this bne reads schemas up to {SCHEMA_VERSION}: upgrade it"
        )
    if schema < 1:
        raise FitFileError(f"{path} is damaged: there is no schema {schema}; fit again")
    if schema < _OLDEST_SCHEMA:
        raise FitFileError(
            f"{path} was written by an earlier bne {header['bne_version']} (schema {schema}); "
            f"this one reads fits of schema {_OLDEST_SCHEMA} or later: fit again"
        )


def _refuse_trickery(path: Path, file: Any) -> None:
    """Refuse links out of the file, and more declared data than the file could hold."""
    declared = 0
    pending = [file]
    while pending:
        group = pending.pop()
        for name in group:
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise FitFileError(
                    f"{path} links to other data ({name!r}); bne does not follow such links"
                )
            item = group[name]
            if isinstance(item, h5py.Group):
                pending.append(item)
            elif item.is_virtual or item.external:
                raise FitFileError(
                    f"{path} keeps {name!r} in other files; bne does not follow such links"
                )
            else:
                declared += item.nbytes
    if declared > 10 * path.stat().st_size + _SLACK:
        raise FitFileError(f"{path} is damaged: it declares more data than it holds; fit again")


def _group_names(path: Path) -> list[str]:
    with h5py.File(path, "r") as file:
        return [name for name in file if isinstance(file[name], h5py.Group)]


def _read_group(path: Path, name: str) -> xr.Dataset:
    with xr.open_dataset(
        path, group=name, engine="h5netcdf", mask_and_scale=False, decode_times=False
    ) as group:
        return group.load()


def _package_version() -> str:
    try:
        return metadata.version("bne")
    except metadata.PackageNotFoundError:
        return "unknown"
