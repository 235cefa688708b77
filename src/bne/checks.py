"""What users pass, turned into clean arrays, or into one sentence that says what to do.

A table is a DataFrame, a mapping of columns, an xarray Dataset or a plain 2-D array; coordinates
and base models are columns of it, by name (by position for an array). Everything here runs before
any fitting starts.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeGuard, runtime_checkable

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import sparse
from sklearn.utils.validation import check_array, column_or_1d

from bne._wording import missing_sentence, nearest, rows
from bne.errors import InputError, InputWarning

__all__ = [
    "BaseModel",
    "Predictor",
    "Sites",
    "as_frame",
    "check_training",
    "drop_missing",
    "read_response",
    "read_sites",
    "read_training",
    "require_columns",
    "resolve_columns",
]

FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]

LONGITUDE_NAMES = frozenset({"lon", "longitude", "lng", "long"})
LATITUDE_NAMES = frozenset({"lat", "latitude"})


@runtime_checkable
class Predictor(Protocol):
    """A fitted model of y given the coordinates, in scikit-learn's form."""

    def predict(self, X: Any, /) -> Any:
        """Predict y at the rows of X."""
        ...


BaseModel: TypeAlias = "Hashable | tuple[str, Predictor]"


@dataclass(frozen=True)
class Sites:
    """Sites as arrays: coordinates (n, d), base-model predictions (n, K), and what they are called.

    Attributes
    ----------
    coords
        Raw coordinates in the user's units, shape (n, d).
    base
        Predictions of the base models in the units of y, shape (n, K).
    index
        Row labels of the table, or None when it was a plain array.
    coord_names, base_names
        Names of the columns (positions for a plain array).
    kept
        Which rows of the table these are, shape (rows of the table,); all of them unless
        ``missing="drop"``.
    """

    coords: FloatArray
    base: FloatArray
    index: pd.Index | None
    coord_names: tuple[Hashable, ...]
    base_names: tuple[Hashable, ...]
    kept: BoolArray

    def __len__(self) -> int:
        return len(self.coords)


def read_sites(
    table: Any,
    coords: Hashable | Sequence[Hashable] | None = None,
    base_models: BaseModel | Sequence[BaseModel] | None = None,
    *,
    missing: Literal["error", "drop"] = "error",
    response: Hashable | None = None,
    what: str = "the table",
) -> Sites:
    """Read coordinates and base-model predictions from a table.

    Parameters
    ----------
    table
        DataFrame, mapping of columns, xarray Dataset, or 2-D array (whose columns are called
        0, 1, ...).
    coords
        Columns of the coordinates. None takes longitude and latitude where columns have such names,
        else the first two columns (the only one, if there is one).
    base_models
        Columns, or (name, fitted predictor) pairs whose ``predict`` is called on the coordinates.
        None takes every column that is not a coordinate or the response; if none remains, every
        column that is not the response.
    missing
        What to do with rows where a coordinate or base model is NaN or infinite: "error", or "drop"
        them.
    response
        Name of a column that must not be taken for a base model by default.
    what
        What to call the table in messages.

    Returns
    -------
    Sites
        Finite float64 arrays with their names.

    Raises
    ------
    InputError
        With a sentence, for missing columns, text, NaN, infinity, or an empty table.
    """
    if missing not in ("error", "drop"):
        raise InputError(f"missing={missing!r} is not one of 'error', 'drop'")
    frame, labelled = as_frame(table)
    if len(frame) == 0:
        raise InputError(f"{what} has no rows (0 samples)")
    coord_names, models = resolve_columns(frame, coords, base_models, response=response)
    base_names = tuple(_model_name(model) for model in models)
    _check_distinct("coords", coord_names)
    _check_distinct("base_models", base_names)
    columns = [m for m in models if not _is_pair(m)]
    require_columns(frame.columns, [*coord_names, *columns], what=what)

    numbers = {name: _numbers(frame[name], name) for name in (*coord_names, *columns)}
    kept = _finiterows(numbers, frame.index, missing, what)
    frame, numbers = frame[kept], {name: values[kept] for name, values in numbers.items()}
    base = [
        _call_predictor(model, frame, coord_names, labelled) if _is_pair(model) else numbers[model]
        for model in models
    ]
    return Sites(
        coords=np.column_stack([numbers[name] for name in coord_names]),
        base=np.column_stack(base),
        index=frame.index if labelled else None,
        coord_names=coord_names,
        base_names=base_names,
        kept=kept,
    )


def read_response(
    y: Any, n: int, *, name: Hashable | None = None, missing: Literal["error", "keep"] = "error"
) -> FloatArray:
    """Read the response as n finite numbers.

    Parameters
    ----------
    y
        Series, array or list of n numbers (a single column is flattened, with scikit-learn's
        warning).
    n
        Number of rows of the table that y belongs to.
    name
        What to call y in messages; its own name, else "y", by default.
    missing
        "error", or "keep" to leave NaN and infinity to the caller.

    Returns
    -------
    ndarray of shape (n,)
    """
    if y is None:
        raise InputError("y is missing: a fit requires y to be passed, but the target y is None")
    if name is None:
        name = getattr(y, "name", None)
    name = "y" if name is None else name
    try:
        flat = column_or_1d(y.to_numpy() if hasattr(y, "to_numpy") else np.asarray(y), warn=True)
    except ValueError as error:
        raise InputError(str(error)) from None
    if len(flat) != n:
        raise InputError(
            f"{name!r} has {len(flat)} values for {n} sites (inconsistent numbers of samples)"
        )
    column = pd.Series(flat, index=y.index if isinstance(y, pd.Series) else None)
    values = _numbers(column, name)
    if missing == "error" and not np.isfinite(values).all():
        raise InputError(missing_sentence({name: values}, column.index))
    return values


def read_training(
    table: Any,
    y: Any,
    coords: Hashable | Sequence[Hashable] | None = None,
    base_models: BaseModel | Sequence[BaseModel] | None = None,
    *,
    missing: Literal["error", "drop"] = "error",
    what: str = "the table",
) -> tuple[Sites, FloatArray]:
    """Read and check all that a fit needs: `read_sites`, `read_response`, `check_training`.

    Parameters
    ----------
    table, coords, base_models, missing, what
        As for `read_sites`; a column of the same name as y is never a base model by default.
    y
        As for `read_response`; with ``missing="drop"``, rows without a finite y are dropped too.

    Returns
    -------
    sites, y
        Rows that are finite throughout, in the order of the table.
    """
    name = getattr(y, "name", None)
    sites = read_sites(table, coords, base_models, missing=missing, response=name, what=what)
    values = read_response(y, len(sites.kept), missing="error" if missing == "error" else "keep")
    if isinstance(y, pd.Series) and isinstance(table, pd.DataFrame):
        _warn_shuffled(y.index, table.index)
    if missing == "drop":
        finite = np.isfinite(values)
        sites, values = (
            _subset(sites, finite[sites.kept], sites.kept & finite),
            values[sites.kept & finite],
        )
    check_training(sites, values)
    return sites, values


def check_training(sites: Sites, y: FloatArray) -> None:
    """Refuse training data that cannot be fitted; warn of what is legal but suspicious.

    Parameters
    ----------
    sites
        Training sites.
    y
        Response at these sites.

    Raises
    ------
    InputError
        For one site only, or y all equal.
    """
    if len(sites) < 2:
        raise InputError("there is one site only (n_samples=1); a fit needs at least two")
    if np.ptp(y) == 0:
        raise InputError(f"y is {y[0]:g} at all {len(y)} sites; there is nothing to fit")
    _warn_base_models(sites, y)
    _warn_duplicated_sites(sites)


def drop_missing(table: pd.DataFrame, columns: Iterable[Hashable]) -> tuple[pd.DataFrame, int]:
    """Drop the rows in which one of the columns is NaN or infinite.

    Parameters
    ----------
    table
        Any DataFrame.
    columns
        Columns that must be finite; text in one of them is still an error.

    Returns
    -------
    table, dropped
        The remaining rows, with their labels, and how many were dropped.
    """
    wanted = list(dict.fromkeys(columns))
    require_columns(table.columns, wanted)
    kept = np.ones(len(table), dtype=bool)
    for name in wanted:
        kept &= np.isfinite(_numbers(table[name], name))
    return table[kept], int((~kept).sum())


def require_columns(
    columns: Iterable[Hashable], wanted: Iterable[Hashable], *, what: str = "the table"
) -> None:
    """Check that all wanted columns are there once; the error names the nearest ones.

    Parameters
    ----------
    columns
        Columns that exist.
    wanted
        Columns that are needed.
    what
        What to call the table in the message.
    """
    there = list(columns)
    for name in wanted:
        if there.count(name) > 1:
            raise InputError(
                f"{what} has {there.count(name)} columns named {name!r}; rename all but one"
            )
        if name not in there:
            raise InputError(f"{what} has no column {name!r}; {nearest(name, there)}")


def resolve_columns(
    table: Any,
    coords: Hashable | Sequence[Hashable] | None = None,
    base_models: BaseModel | Sequence[BaseModel] | None = None,
    *,
    response: Hashable | None = None,
) -> tuple[tuple[Hashable, ...], tuple[BaseModel, ...]]:
    """Fill in the columns that the user left to the defaults of `read_sites`.

    Parameters
    ----------
    table, coords, base_models, response
        As for `read_sites`.

    Returns
    -------
    coords, base_models
        Explicit names (positions for a plain array), base models still possibly pairs.
    """
    frame, _ = as_frame(table)
    there = [column for column in frame.columns if response is None or column != response]
    if coords is None:
        chosen = _geographic_columns(there) or tuple(there[: min(2, len(there))])
    else:
        chosen = tuple(_as_list(coords))
    if base_models is None:
        models = [column for column in there if column not in chosen] or there
    else:
        models = _as_list(base_models)
    if not chosen:
        raise InputError("coords is empty; name at least one coordinate column")
    if not models:
        raise InputError("base_models is empty; name at least one base model")
    return chosen, tuple(models)


def as_frame(table: Any) -> tuple[pd.DataFrame, bool]:
    """Return the table as a DataFrame, and whether it has labels of its own.

    Raises
    ------
    InputError
        With a sentence, for what is no table of numbers.
    """
    if isinstance(table, pd.DataFrame):
        return table, True
    if sparse.issparse(table):
        raise InputError("sparse matrices are not supported; pass a dense table (X.toarray())")
    if isinstance(table, str | bytes):
        raise InputError(
            f"{table!r} is text, not a table; read the file first (bne.storage.read_table)"
        )
    try:
        if hasattr(table, "data_vars") and hasattr(table, "to_dataframe"):  # an xarray Dataset
            return table.to_dataframe().reset_index(), True
        if isinstance(table, Mapping):
            return pd.DataFrame(dict(table)), True
        if hasattr(table, "to_pandas"):
            return pd.DataFrame(table.to_pandas()), True
        # NaN and infinity are reported later, by row.
        return pd.DataFrame(check_array(table, dtype=np.float64, ensure_all_finite=False)), False
    except ValueError as error:
        raise InputError(str(error)) from None


def _as_list(names: Any) -> list[Any]:
    if isinstance(names, str) or _is_pair(names) or not isinstance(names, Iterable):
        return [names]
    return list(names)


def _is_pair(model: Any) -> TypeGuard[tuple[str, Predictor]]:
    return isinstance(model, tuple) and len(model) == 2 and isinstance(model[1], Predictor)


def _model_name(model: Any) -> Hashable:
    name: Hashable = model[0] if _is_pair(model) else model
    return name


def _check_distinct(parameter: str, names: Sequence[Hashable]) -> None:
    repeated = sorted({repr(name) for name in names if list(names).count(name) > 1})
    if repeated:
        raise InputError(f"{parameter} names {', '.join(repeated)} more than once")


def _geographic_columns(columns: Sequence[Hashable]) -> tuple[Hashable, ...]:
    """Return the longitude and latitude columns, in the table's order, if there are both."""
    found = [c for c in columns if str(c).lower() in LONGITUDE_NAMES | LATITUDE_NAMES]
    kinds = {str(c).lower() in LONGITUDE_NAMES for c in found}
    return tuple(found) if len(found) == 2 and len(kinds) == 2 else ()


def _finiterows(
    numbers: Mapping[Hashable, FloatArray], index: pd.Index, missing: str, what: str
) -> BoolArray:
    kept = np.asarray(np.isfinite(np.column_stack(list(numbers.values()))).all(axis=1))
    if missing == "error" and not kept.all():
        raise InputError(missing_sentence(numbers, index))
    if not kept.any():
        raise InputError(f"{what} has no row in which every coordinate and base model is a number")
    return kept


def _numbers(column: pd.Series, name: Hashable) -> FloatArray:
    """Return the column as float64, NaN where missing; text is an error naming the rows."""
    if pd.api.types.is_complex_dtype(column.dtype):
        raise InputError(f"column {name!r} is complex. Complex data not supported")
    if pd.api.types.is_datetime64_any_dtype(column.dtype) or pd.api.types.is_timedelta64_dtype(
        column.dtype
    ):
        raise InputError(f"column {name!r} holds dates; turn them into a number, such as days")
    if pd.api.types.is_numeric_dtype(column.dtype):
        return np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan))
    numbers = pd.to_numeric(column.astype(object), errors="coerce")
    text = (numbers.isna() & column.notna()).to_numpy()
    if text.any():
        example = column[text].iloc[0]
        raise InputError(
            f"column {name!r} has text where a number is needed, such as {example!r}, "
            f"in {rows(text, column.index)}"
        )
    return np.asarray(numbers.to_numpy(dtype=np.float64, na_value=np.nan))


def _call_predictor(
    model: tuple[str, Predictor], frame: pd.DataFrame, coords: Sequence[Hashable], labelled: bool
) -> FloatArray:
    name, predictor = model
    inputs = frame[list(coords)]
    raw = np.asarray(predictor.predict(inputs if labelled else inputs.to_numpy(dtype=np.float64)))
    if raw.shape == (len(frame), 1):
        raw = raw[:, 0]
    if raw.shape != (len(frame),):
        raise InputError(
            f"base model {name!r} predicted an array of shape {raw.shape} for {len(frame)} sites"
        )
    values = _numbers(pd.Series(raw, index=frame.index), name)
    if not np.isfinite(values).all():
        raise InputError(missing_sentence({name: values}, frame.index))
    return values


def _subset(sites: Sites, chosen: BoolArray, kept: BoolArray) -> Sites:
    index = None if sites.index is None else sites.index[chosen]
    return Sites(
        sites.coords[chosen], sites.base[chosen], index, sites.coord_names, sites.base_names, kept
    )


def _warn_base_models(sites: Sites, y: FloatArray) -> None:
    first: dict[bytes, Hashable] = {}
    for name, column in zip(sites.base_names, sites.base.T, strict=True):
        if np.ptp(column) == 0:
            _warn(f"base model {name!r} predicts {column[0]:g} at every training site")
        if np.array_equal(column, y):
            _warn(f"base model {name!r} equals y at every training site; is it y itself?")
        twin = first.setdefault(column.tobytes(), name)
        if twin != name:
            _warn(
                f"base models {twin!r} and {name!r} agree at every training site; "
                "the data cannot tell them apart"
            )


def _warn_duplicated_sites(sites: Sites) -> None:
    labels = pd.RangeIndex(len(sites)) if sites.index is None else sites.index
    repeated = pd.DataFrame(sites.coords).duplicated(keep=False).to_numpy()
    if repeated.any():
        _warn(
            f"several rows have the same coordinates: {rows(repeated, labels)}; "
            "they are taken as repeated readings"
        )


def _warn_shuffled(response: pd.Index, table: pd.Index) -> None:
    if len(response) == len(table) and not response.equals(table) and set(response) == set(table):
        _warn(
            "y and the table have the same row labels in another order; "
            "rows are matched by position, not by label"
        )


def _warn(message: str) -> None:
    warnings.warn(message, InputWarning, stacklevel=4)
