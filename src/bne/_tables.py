"""Tables of sites as files: CSV, Parquet, NetCDF."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray
from packaging.version import Version

from bne._files import PathLike, atomic_path, check_target, existing_file, first_line
from bne.errors import InputError

__all__ = ["FIT_FORMAT", "read_table", "write_table"]

FIT_FORMAT = "bne-fit"
TABLE_SUFFIXES = (".csv", ".parquet", ".nc")
# pandas reads numbers to the last bit by itself from 3.1 on, and deprecates saying so.
_EXACT: dict[str, Any] = (
    {} if Version(pd.__version__) >= Version("3.1") else {"float_precision": "round_trip"}
)


def read_table(path: PathLike) -> pd.DataFrame:
    """Read a table of sites from .csv (UTF-8, commas), .parquet or .nc (one dimension per index).

    Parameters
    ----------
    path
        File to read; its suffix says what it is.

    Returns
    -------
    DataFrame
        At least one row. Numbers in a CSV are read back to the last bit.

    Raises
    ------
    InputError
        With a sentence, for a missing, empty, unreadable, wrongly encoded or unknown file.
    """
    path = existing_file(path, InputError)
    readers: dict[str, Callable[[Path], pd.DataFrame]] = {
        ".csv": _read_csv,
        ".parquet": _read_parquet,
        ".nc": _read_netcdf,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise InputError(
            f"{path}: a table must be one of {', '.join(TABLE_SUFFIXES)}, by its suffix"
        )
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty")
    table = reader(path)
    if len(table) == 0:
        raise InputError(f"{path} has no rows")
    return table


def write_table(
    table: pd.DataFrame,
    path: PathLike,
    *,
    draws: NDArray[np.float64] | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> None:
    """Write a table by its suffix, whole or not at all.

    Parameters
    ----------
    table
        One row per site; the row labels are not written.
    path
        File to write: .csv, .parquet or .nc (dimension ``site``).
    draws
        Joint draws, shape (draws, sites): columns draw_0, draw_1, ... or, in NetCDF, one variable
        ``draws`` with dimensions ``draw`` and ``site``.
    attrs
        Text and numbers about the table, kept in NetCDF only.

    Raises
    ------
    InputError
        For an unknown suffix or a place that cannot be written to.
    OSError
        When writing fails; nothing is left behind, and a file that was there before still is.
    """
    path = check_target(path, TABLE_SUFFIXES)
    if path.suffix.lower() == ".nc":
        dataset = _as_dataset(table, draws, attrs or {})
        with atomic_path(path) as temporary:
            dataset.to_netcdf(temporary, engine="h5netcdf", format="NETCDF4")
        return
    if draws is not None:
        columns = [f"draw_{i}" for i in range(len(draws))]
        table = pd.concat(
            [table, pd.DataFrame(draws.T, columns=columns, index=table.index)], axis=1
        )
    if path.suffix.lower() == ".parquet":
        _require_pyarrow(path)
    with atomic_path(path) as temporary:
        if path.suffix.lower() == ".parquet":
            table.to_parquet(temporary, index=False)
        else:
            table.to_csv(temporary, index=False)


def _read_csv(path: Path) -> pd.DataFrame:
    _check_header(path)
    try:
        table: pd.DataFrame = pd.read_csv(
            path, encoding="utf-8-sig", skipinitialspace=True, **_EXACT
        )
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from None
    except pd.errors.EmptyDataError:
        raise InputError(f"{path} is empty") from None
    except (pd.errors.ParserError, ValueError) as error:
        raise InputError(f"{path} is not a well-formed CSV file: {first_line(error)}") from None
    return table


def _check_header(path: Path) -> None:
    """Refuse what pandas would misread: another encoding, other separators, repeated names."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = [name.strip() for name in next(csv.reader(file), [])]
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from None
    except csv.Error as error:
        raise InputError(f"{path} is not a well-formed CSV file: {error}") from None
    if len(header) == 1 and any(mark in header[0] for mark in ";\t|"):
        raise InputError(
            f"{path} does not separate its columns by commas; save it as comma-separated CSV"
        )
    repeated = sorted({name for name in header if name and header.count(name) > 1})
    if repeated:
        raise InputError(f"{path} has several columns named {repeated[0]!r}; rename all but one")


def _not_utf8(path: Path, error: UnicodeDecodeError) -> InputError:
    byte = error.object[error.start]
    return InputError(
        f"{path} is not UTF-8 text (byte 0x{byte:02x} at {error.start}); save it as UTF-8"
    )


def _read_parquet(path: Path) -> pd.DataFrame:
    _require_pyarrow(path)
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise InputError(f"{path} is not a readable Parquet file: {first_line(error)}") from None


def _require_pyarrow(path: Path) -> None:
    if find_spec("pyarrow") is None:
        raise InputError(f"{path}: Parquet needs pyarrow; install bne[parquet], or use CSV")


def _read_netcdf(path: Path) -> pd.DataFrame:
    try:
        with xr.open_dataset(path, engine="h5netcdf") as dataset:
            if dataset.attrs.get("format") == FIT_FORMAT:
                raise InputError(f"{path} is a fit, not a table of sites")
            drop = [name for name, variable in dataset.data_vars.items() if "draw" in variable.dims]
            frame = dataset.drop_vars(drop).to_dataframe().reset_index()
            counters = [name for name in dataset.dims if name not in dataset.variables]
    except InputError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(f"{path} is not a readable NetCDF file: {first_line(error)}") from None
    return frame.drop(columns=counters, errors="ignore")


def _as_dataset(
    table: pd.DataFrame, draws: NDArray[np.float64] | None, attrs: Mapping[str, Any]
) -> xr.Dataset:
    variables: dict[str, Any] = {
        str(name).replace("/", "_"): ("site", _plain_values(table[name])) for name in table.columns
    }
    if draws is not None:
        variables["draws"] = (("draw", "site"), np.asarray(draws))
    return xr.Dataset(variables, attrs=dict(attrs))


def _plain_values(column: pd.Series) -> NDArray[Any]:
    """Values that NetCDF knows: numbers, booleans, dates, else text."""
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "biufM":
        return np.asarray(column.to_numpy())
    if pd.api.types.is_numeric_dtype(column.dtype):
        return np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan))
    return np.asarray(["" if pd.isna(value) else str(value) for value in column], dtype=object)
