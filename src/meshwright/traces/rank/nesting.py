"""Which of the spans of a thread encloses which: operators within operators, modules within modules."""

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
ROUNDS = 8  # of cutting spans that cross; files have hardly any


@dataclass(frozen=True, eq=False)
class Nest:
    """Spans by thread, then start, the longer first where two start at once; times in nanoseconds."""

    rows: Ints  # of the trace's events
    thread: Ints
    starts: Ints
    ends: Ints  # never after the end of the span around it
    parent: Ints  # the place of the innermost span around it, -1 for none
    last: Ints  # one more than the place of the last span inside: those within place i are i + 1 ... last[i] - 1

    def __len__(self) -> int:
        return len(self.rows)

    def innermost(self, threads: Ints, times: Ints) -> Ints:
        """The place of the innermost span of a thread that is open at each time, -1 for none."""
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
        """Of a value of each span: its sum over the span and all that is inside."""
        whole = np.append(0, np.cumsum(values, dtype=np.float64))
        inside: NDArray[np.float64] = whole[self.last] - whole[:-1]
        return inside

    def alone(self) -> Ints:
        """Nanoseconds of each span that are in no span inside it."""
        spans = self.ends - self.starts
        held = np.flatnonzero(self.parent >= 0)
        children = np.bincount(self.parent[held], spans[held], minlength=len(self))
        return spans - children.astype(np.int64)


def nest(trace: Trace, rows: Ints, threads: Ints | None = None) -> Nest:
    """How some of a trace's events lie in each other. What sticks out of the span around it is cut off at its end.

    >>> from meshwright.traces.reading import Category, read_trace
    >>> trace = read_trace("tests/data/traces/hta/triton_example.json.gz")
    >>> nest(trace, trace.complete(Category.OPERATOR)).parent.tolist()
    [-1, -1, 1]
    """
    thread = (threads_of(trace) if threads is None else threads)[trace.events.track[rows]]
    starts = trace.events.ts[rows]
    stops = starts + np.maximum(trace.events.dur[rows], 1)  # a span of no length is open for a moment
    # Threads one after the other on one line of time: then one search serves all.
    shift = thread * int(stops.max() - starts.min()) if len(rows) else thread
    order = _in_order(starts + shift, stops)
    rows, thread, shift = rows[order], thread[order], shift[order]
    starts, stops = starts[order] + shift, stops[order] + shift
    parent, stops, last = (_portable if _library() is None else _compiled)(starts, stops)
    ends = np.minimum(stops - shift, trace.events.ts[rows] + trace.events.dur[rows])
    return Nest(rows, thread, starts - shift, ends, parent, last)


def _in_order(starts: Ints, stops: Ints) -> Ints:
    """By start, the longer first, then as they came. Files have a thread's spans all but in order, which costs a stable
    sort nothing; those that start at once are few, and sorted once more."""
    order = np.argsort(starts, kind="stable")
    ordered = starts[order]
    same = ordered[1:] == ordered[:-1]
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    some = order[tied]
    order[tied] = some[np.lexsort((-stops[some], ordered[tied]))]
    return order


def threads_of(trace: Trace) -> Ints:
    """A number for the thread of each track: files of 2021 write a thread's number as a text in some of their events."""
    keys = [(str(track.pid), str(track.tid)) for track in trace.tracks]
    place = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([place[key] for key in keys], np.int64)


def _compiled(starts: Ints, stops: Ints) -> tuple[Ints, Ints, Ints]:
    """The parent of each span, where it ends at the latest, and one more than the place of the last span inside."""
    stops = stops.copy()
    parent, last, room = (np.empty(len(starts), np.int64) for _ in range(3))
    _library().enclose(len(starts), *(column.ctypes.data for column in (starts, stops, parent, last, room)))
    return parent, stops, last


@cache
def _library() -> Any:
    """nesting.c; None where it cannot be built, of which whoever read the trace has told."""
    try:
        made = packaged("meshwright.traces.rank._nesting")
    except BuildError:
        return None
    if made:
        made.enclose.argtypes, made.enclose.restype = [ctypes.c_int64, *[ctypes.c_void_p] * 5], None
    return made


def _portable(starts: Ints, stops: Ints) -> tuple[Ints, Ints, Ints]:
    """The same where nothing is compiled."""
    parent, stops = _parents(starts, stops)
    last = np.searchsorted(starts, stops)
    return parent, stops, np.maximum(last, np.arange(1, len(starts) + 1))


def _parents(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """The parent of each span, and where it ends at the latest.

    A span's depth is how many have begun before it and not stopped; its parent is the last before it that is one less
    deep. Spans that cross are cut, and depths counted again.
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
    """Whether any span around each is marked."""
    found: NDArray[np.bool_] = (parent >= 0) & marked[parent]
    while ((further := found | ((parent >= 0) & found[parent])) != found).any():
        found = further
    return found


def _one_by_one(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """The same for spans that cross in long chains."""
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
