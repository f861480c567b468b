"""Facts as plain values for JSON: times stay whole nanoseconds, unknown values are null."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np

from meshwright.traces.reading import NONE


def plain(value: Any) -> Any:
    """Return a value without dataclasses and arrays.

    >>> plain({"at": np.array([1, NONE]), "rate": float("nan")})
    {'at': [1, None], 'rate': None}
    """
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return value.value
    return None if value == NONE and isinstance(value, int) else value
