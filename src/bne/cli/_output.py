"""What commands say, to people and to machines."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

__all__ = ["say", "say_json", "to_plain"]


def say(text: str) -> None:
    """Print a line for people."""
    sys.stdout.write(text + "\n")


def say_json(result: Mapping[str, Any]) -> None:
    """Print one JSON object for machines; numbers that JSON lacks become null."""
    sys.stdout.write(json.dumps(to_plain(result), indent=2, allow_nan=False) + "\n")


def to_plain(value: Any) -> Any:
    """Turn arrays, tables, paths and NaN into what strict JSON can hold."""
    if isinstance(value, pd.DataFrame):
        return to_plain(value.reset_index().to_dict("records"))
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [to_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return to_plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)
