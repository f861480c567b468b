"""Number rows of millions of calls by several columns at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.reading import NONE

Ints = NDArray[np.int64]


def packed(*columns: NDArray[np.generic]) -> Ints:
    """Return one number per row that differs if any column differs, and orders rows as the columns do.

    >>> packed(np.array([1, 0, 1]), np.array([5, 9, 7])).tolist()
    [5, 4, 7]
    """
    out = np.zeros(len(columns[0]), np.int64)
    span = 1
    for values in columns:
        if not len(values):
            return out
        whole = values.astype(np.int64)
        low, high = int(whole.min()), int(whole.max())
        if span * (high - low + 1) >= 1 << 62:  # too wide: number the distinct values instead
            whole = np.unique(whole, return_inverse=True)[1]
            low, high = 0, int(whole.max())
        if span * (high - low + 1) >= 1 << 62:
            out = np.unique(out, return_inverse=True)[1]
        out = out * (high - low + 1) + (whole - low)
        span = int(out.max()) + 1
    return out


def runs(keys: Ints) -> tuple[Ints, Ints, Ints]:
    """Return each row's key index in sorted order, a row of each key, and the number of rows of each key."""
    if not len(keys):
        return keys, keys, keys
    _, first, inverse, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    return inverse.reshape(-1), first, counts


@dataclass(frozen=True, eq=False)
class Rows:
    """Calls, rank after rank and by time within each."""

    base: Ints  # equal for rows of one series: a group, a kind, a step
    place: NDArray[np.int32]  # place of the rank
    end: Ints
    bytes: Ints


def settled(rows: Rows, movable: NDArray[np.bool_]) -> tuple[Ints, int]:
    """Return the position of each row in its rank's series, and the number of series with different lengths.

    Such series are shifted if `movable` allows it: a recording may begin or end within a step.
    """
    order = np.argsort(rows.base, kind="stable")  # sorted by series: rank by rank, each by time
    base, place = rows.base[order], rows.place[order]
    fresh = np.ones(len(order), np.bool_)
    fresh[1:] = (base[1:] != base[:-1]) | (place[1:] != place[:-1])
    starts = np.flatnonzero(fresh)
    lengths = np.diff(np.append(starts, len(order)))
    turn = np.empty(len(order), np.int64)
    turn[order] = np.arange(len(order)) - np.repeat(starts, lengths)
    series = np.flatnonzero(np.append(True, base[starts][1:] != base[starts][:-1])) if len(starts) else starts
    until = np.append(series[1:], len(starts))
    shortest, longest = (
        (np.minimum.reduceat(lengths, series), np.maximum.reduceat(lengths, series))
        if len(series)
        else (series, series)
    )
    uneven = np.flatnonzero((shortest != longest) & movable[order[starts[series]]]) if len(series) else series
    for which in uneven.tolist():
        parts = range(int(series[which]), int(until[which]))
        _move(rows, [order[starts[part] : starts[part] + lengths[part]] for part in parts], turn)
    return turn, len(uneven)


def _move(rows: Rows, parts: list[Ints], turn: Ints) -> None:
    """Shift the positions of ranks whose series is not as long as most are."""
    lengths = np.array([len(part) for part in parts])
    values, counts = np.unique(lengths, return_counts=True)
    usual = int(values[np.argmax(counts)])
    model = parts[int(np.flatnonzero(lengths == usual)[0])]
    for part in parts:
        spare = len(part) - usual
        shifts = range(-spare, 1) if spare > 0 else range(-spare + 1)
        if spare:
            turn[part] += max(shifts, key=lambda shift: _likeness(rows, model, part, shift))


def _likeness(rows: Rows, model: Ints, part: Ints, shift: int) -> tuple[int, float, int]:
    """Return how well a series matches another one at a shift: by sizes, then by how constant their offset in time is."""
    begin, stop = max(shift, 0), min(len(model), len(part) + shift)
    mine, other = part[begin - shift : stop - shift], model[begin:stop]
    same = (rows.bytes[mine] == rows.bytes[other]) & (rows.bytes[mine] != NONE)
    apart = (rows.end[mine] - rows.end[other]).astype(np.float64)
    return int(same.sum()), -float(np.std(apart)) if len(apart) else 0.0, -abs(shift)
