"""Nesting of a thread's spans: operators within operators, modules within modules."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.base.native import BuildError, packaged
from meshwright.traces.distinct import distinct
from meshwright.traces.reading import Trace

Ints = NDArray[np.int64]
ROUNDS = 8  # maximum rounds of cutting spans that cross; files have hardly any


@dataclass(frozen=True, eq=False)
class Nest:
    """Spans by thread, then start, the longer first if starts are equal; times in nanoseconds."""

    rows: Ints  # of the trace's events
    thread: Ints
    starts: Ints
    ends: Ints  # at most the end of the span around it
    parent: Ints  # index of the innermost span around it, -1 for none
    last: Ints  # one more than the index of the last span inside: those within span i are i + 1 ... last[i] - 1

    def __len__(self) -> int:
        return len(self.rows)

    def innermost(self, threads: Ints, times: Ints) -> Ints:
        """Return the index of a thread's innermost span that is open at each time, -1 for none."""
        found = np.full(len(times), -1)
        for thread in distinct(threads):
            first, stop = np.searchsorted(self.thread, [thread, thread + 1])
            mine = np.flatnonzero(threads == thread)
            found[mine] = np.searchsorted(self.starts[first:stop], times[mine], side="right") - 1 + first
            found[mine[found[mine] < first]] = -1
        left = np.flatnonzero(found >= 0)
        while len(left := left[self.ends[found[left]] <= times[left]]):
            found[left] = self.parent[found[left]]
            left = left[found[left] >= 0]
        return found

    def within(self, values: NDArray[np.float64] | Ints) -> NDArray[np.float64]:
        """Return a value's sum over each span and all that is inside."""
        whole = np.append(0, np.cumsum(values, dtype=np.float64))
        inside: NDArray[np.float64] = whole[self.last] - whole[:-1]
        return inside

    def alone(self) -> Ints:
        """Return the nanoseconds of each span outside of nested spans."""
        spans = self.ends - self.starts
        held = np.flatnonzero(self.parent >= 0)
        children = np.bincount(self.parent[held], spans[held], minlength=len(self))
        return spans - children.astype(np.int64)


def nest(trace: Trace, rows: Ints, threads: Ints | None = None) -> Nest:
    """Nest some of a trace's events. Spans that extend beyond the enclosing one are cut off at its end.

    >>> from meshwright.traces.reading import Category, read_trace
    >>> trace = read_trace("tests/data/traces/hta/triton_example.json.gz")
    >>> nest(trace, trace.complete(Category.OPERATOR)).parent.tolist()
    [-1, -1, 1]
    """
    thread = (threads_of(trace) if threads is None else threads)[trace.events.track[rows]]
    starts = trace.events.ts[rows]
    stops = starts + np.maximum(trace.events.dur[rows], 1)  # a span without length is open for a moment
    # Threads are put one after the other on one time axis: then one search serves all.
    shift = thread * int(stops.max() - starts.min()) if len(rows) else thread
    order = _in_order(starts + shift, stops)
    rows, thread, shift = rows[order], thread[order], shift[order]
    starts, stops = starts[order] + shift, stops[order] + shift
    parent, stops, last = (_portable if _library() is None else _compiled)(starts, stops)
    ends = np.minimum(stops - shift, trace.events.ts[rows] + trace.events.dur[rows])
    return Nest(rows, thread, starts - shift, ends, parent, last)


def _in_order(starts: Ints, stops: Ints) -> Ints:
    """Sort by start, the longer first, then by input order.

    A thread's spans are almost sorted in files, which makes a stable sort cheap. The few with equal starts are sorted
    again.
    """
    order = np.argsort(starts, kind="stable")
    ordered = starts[order]
    same = ordered[1:] == ordered[:-1]
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    some = order[tied]
    order[tied] = some[np.lexsort((-stops[some], ordered[tied]))]
    return order


def threads_of(trace: Trace) -> Ints:
    """Return a thread number for each track: files of 2021 write it as text in some of their events."""
    keys = [(str(track.pid), str(track.tid)) for track in trace.tracks]
    place = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([place[key] for key in keys], np.int64)


def _compiled(starts: Ints, stops: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the parent of each span, its latest end, and one more than the index of the last span inside."""
    stops = stops.copy()
    parent, last, room = (np.empty(len(starts), np.int64) for _ in range(3))
    _library().enclose(len(starts), *(column.ctypes.data for column in (starts, stops, parent, last, room)))
    return parent, stops, last


@cache
def _library() -> Any:
    """Return the library of nesting.c, or None if it cannot be built, which the reader of the trace has reported."""
    try:
        made = packaged("meshwright.traces.rank._nesting")
    except BuildError:
        return None
    if made:
        made.enclose.argtypes, made.enclose.restype = [ctypes.c_int64, *[ctypes.c_void_p] * 5], None
    return made


def _portable(starts: Ints, stops: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the result of `_compiled` without compiled code."""
    parent, stops = _parents(starts, stops)
    last = np.searchsorted(starts, stops)
    return parent, stops, np.maximum(last, np.arange(1, len(starts) + 1))


def _parents(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """Return the parent of each span, and its latest end.

    A span's depth is the number of spans that have begun before it and not ended. Its parent is the last one before it
    with a depth one less. Spans that cross are cut, and depths counted again.
    """
    place, stops = np.arange(len(starts)), stops.copy()
    for _ in range(ROUNDS):
        depth = place - np.searchsorted(np.sort(stops), starts, side="right")
        keys = depth * len(place) + place
        order = np.argsort(keys, kind="stable")
        parent = order[np.searchsorted(keys[order], keys - len(place)) - 1]
        parent[depth == 0] = -1
        crosses = (parent >= 0) & ((stops > stops[parent]) | (stops[parent] <= starts))
        if not crosses.any():
            return parent, stops
        cut = crosses & (stops[parent] > starts) & ~_inside(parent, crosses)
        stops[cut] = stops[parent[cut]]
    return _one_by_one(starts, stops)


def _inside(parent: Ints, marked: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return True if any span around each is marked."""
    found: NDArray[np.bool_] = (parent >= 0) & marked[parent]
    while ((further := found | ((parent >= 0) & found[parent])) != found).any():
        found = further
    return found


def _one_by_one(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """Return the result of `_parents` for spans that cross in long chains."""
    parent = np.full(len(starts), -1)
    open_places: list[int] = []
    for place, start in enumerate(starts.tolist()):
        while open_places and stops[open_places[-1]] <= start:
            open_places.pop()
        if open_places:
            parent[place] = open_places[-1]
            stops[place] = min(stops[place], stops[open_places[-1]])
        open_places.append(place)
    return parent, stops
