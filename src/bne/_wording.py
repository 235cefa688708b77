"""The parts that messages about tables are made of."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

__all__ = ["missing_sentence", "nearest", "rows"]

FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]

_SHOWN = 5  # rows or columns spelt out before "and ... more"


def missing_sentence(columns: Mapping[Hashable, FloatArray], index: pd.Index) -> str:
    """Say how many values are missing, in which column and rows, and how to go on."""
    parts = []
    for name, values in columns.items():
        for kind, mask in (("NaN", np.isnan(values)), ("infinity", np.isinf(values))):
            if mask.any():
                parts.append(f"{name!r} contains {kind} in {rows(mask, index)}")
    more = f"; and {len(parts) - _SHOWN} more columns" if len(parts) > _SHOWN else ""
    return (
        "; ".join(parts[:_SHOWN])
        + more
        + ". Fill these in, or leave the rows out (--drop-missing, or drop_missing in Python)"
    )


def rows(mask: BoolArray, index: pd.Index) -> str:
    """Name the rows of a mask: '3 rows (2, 5, 9)'."""
    labels = list(index[mask][:_SHOWN])
    count = int(mask.sum())
    more = f" and {count - len(labels)} more" if count > len(labels) else ""
    counted = ", counted from 0" if isinstance(index, pd.RangeIndex) and index.start == 0 else ""
    return f"{count} row{'s' * (count > 1)} ({', '.join(map(str, labels))}{more}{counted})"


def nearest(name: Hashable, columns: Sequence[Hashable]) -> str:
    """Suggest the columns whose names are nearest, or list those that exist."""
    lowered = {str(column).lower(): column for column in columns}
    close = [
        repr(lowered[match]) for match in difflib.get_close_matches(str(name).lower(), lowered, n=3)
    ]
    if close:
        return f"did you mean {' or '.join(close)}?"
    shown = ", ".join(repr(column) for column in columns[: 2 * _SHOWN])
    return f"its columns are {shown}{', ...' if len(columns) > 2 * _SHOWN else ''}"
