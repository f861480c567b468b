"""Sets of time as sorted, disjoint intervals [start, end)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def union(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return the union of intervals: those that overlap or touch are merged.

    >>> starts, ends = union(np.array([5, 0, 2]), np.array([6, 3, 4]))
    >>> starts.tolist(), ends.tolist()
    ([0, 5], [4, 6])
    """
    if not len(starts):
        return starts, ends
    if (starts[1:] < starts[:-1]).any():  # work is almost always sorted
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    ends = np.maximum.accumulate(ends)
    first = np.flatnonzero(np.append(True, starts[1:] > ends[:-1]))
    return starts[first], ends[np.append(first[1:], len(ends)) - 1]


def length(starts: Ints, ends: Ints) -> int:
    """Return the length of the union of intervals.

    >>> length(np.array([0, 2]), np.array([3, 4]))
    4
    """
    merged = union(starts, ends)
    return int((merged[1] - merged[0]).sum())


def before(merged: tuple[Ints, Ints], times: Ints) -> Ints:
    """Return how much of disjoint, sorted intervals lies before each time.

    >>> before((np.array([0, 5]), np.array([4, 6])), np.array([-1, 2, 4, 9])).tolist()
    [0, 2, 4, 5]
    """
    starts, ends = merged
    whole = np.append(0, np.cumsum(ends - starts))
    at = np.searchsorted(starts, times, side="right")
    inside = np.minimum(times, ends[at - 1]) - starts[at - 1] if len(starts) else np.zeros_like(times)
    return np.where(at > 0, whole[np.maximum(at - 1, 0)] + inside, 0)


def gaps(merged: tuple[Ints, Ints], start: int, end: int) -> tuple[Ints, Ints]:
    """Return the gaps between disjoint, sorted intervals in [start, end).

    >>> starts, ends = gaps((np.array([0, 5]), np.array([4, 6])), 2, 9)
    >>> starts.tolist(), ends.tolist()
    ([4, 6], [5, 9])
    """
    begins = np.maximum(np.append(start, merged[1]), start)
    stops = np.minimum(np.append(merged[0], end), end)
    keep = stops > begins
    return begins[keep], stops[keep]
