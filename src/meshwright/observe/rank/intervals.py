"""Sets of time as sorted, disjoint intervals [start, end): what was busy, and for how long."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def union(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Intervals merged where they overlap or touch.

    >>> starts, ends = union(np.array([5, 0, 2]), np.array([6, 3, 4]))
    >>> starts.tolist(), ends.tolist()
    ([0, 5], [4, 6])
    """
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.append(True, starts[1:] > ends[:-1]))
    return starts[first], ends[np.append(first[1:], len(ends)) - 1]


def length(starts: Ints, ends: Ints) -> int:
    """How long the union of intervals is.

    >>> length(np.array([0, 2]), np.array([3, 4]))
    4
    """
    merged = union(starts, ends)
    return int((merged[1] - merged[0]).sum())
