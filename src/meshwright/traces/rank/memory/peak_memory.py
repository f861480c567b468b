"""Holders of a device's memory at its peak: live allocations by the code that made them."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.distinct import distinct
from meshwright.traces.rank.issued import Issued
from meshwright.traces.rank.memory.memory import ON_HOST
from meshwright.traces.rank.modules.modules import kind_of, scopes_of
from meshwright.traces.reading import NONE, Trace

Ints = NDArray[np.int64]
MOST = 20  # maximum number of holders
POINTS = 500  # of the timeline
MAKES_ROOM = re.compile(r"aten::(?:empty|new_empty|resize|zeros|new_zeros|ones|full)")


@dataclass(frozen=True)
class Holder:
    """Live allocations of one operator in one part of the model."""

    operator: str  # "" if none was open
    part: str  # modules, annotations or functions, as a path without instance numbers; "" if none was open
    bytes: int
    blocks: int


@dataclass(frozen=True, eq=False)
class Held:
    """Peak of the device with the highest peak, in the recorded window. Bytes, and nanoseconds since the epoch."""

    device: int
    time: int
    allocated: int  # in use then; the sum of the window's own events if the trace has no totals
    reserved: int  # by the allocator then, -1 if unknown
    before: int  # part of `allocated` from before the window, of unknown origin; -1 if blocks cannot be followed
    holders: tuple[Holder, ...]  # of the rest, the largest MOST
    times: Ints  # timeline: the peak of each of at most POINTS parts of the window
    in_use: Ints  # bytes at these times


def held_at_peak(trace: Trace, work: Issued) -> Held | None:
    """Return the holders at the peak, or None if device allocations were not recorded."""
    memory = trace.memory
    mine = np.flatnonzero((memory.device_type != ON_HOST) & (memory.bytes != NONE))
    if not len(mine):
        return None
    mine = mine[np.argsort(trace.events.ts[memory.row[mine]], kind="stable")]
    found = [_fullest(trace, work, mine[memory.device[mine] == device]) for device in distinct(memory.device[mine])]
    return max(found, key=lambda held: held.allocated)


def _fullest(trace: Trace, work: Issued, mine: Ints) -> Held:
    memory = trace.memory
    times = trace.events.ts[memory.row[mine]]
    in_use = memory.allocated[mine]
    told = bool((in_use > 0).any())  # files of 2021 have no totals, or -1
    if not told:
        in_use = np.cumsum(memory.bytes[mine])
    peak = int(in_use.argmax())
    followed = bool((memory.address[mine] != NONE).all())
    live = mine[_live(memory.address[mine], memory.bytes[mine], peak)] if followed else mine[:0]
    known = int(memory.bytes[live].sum())
    chosen = _thinned(in_use)
    return Held(
        device=int(memory.device[mine[0]]),
        time=int(times[peak]) + trace.base_ns,
        allocated=max(int(in_use[peak]), 0),
        reserved=max(int(memory.reserved[mine[peak]]), -1),
        before=max(int(in_use[peak]) - known, 0) if followed and told else -1,
        holders=_holders(trace, work, live),
        times=times[chosen] + trace.base_ns,
        in_use=in_use[chosen],
    )


def _live(address: Ints, size: Ints, peak: int) -> Ints:
    """Return indices of allocations up to `peak` whose block was not freed by then; all in order of time."""
    order = np.argsort(address[: peak + 1], kind="stable")
    last = np.append(address[order[1:]] != address[order[:-1]], True) if len(order) else order.astype(np.bool_)
    ends = order[last]  # the last event of each block
    return np.sort(ends[size[ends] > 0])


def _holders(trace: Trace, work: Issued, live: Ints) -> tuple[Holder, ...]:
    rows = trace.memory.row[live]
    threads, times = work.threads[trace.events.track[rows]], trace.events.ts[rows]
    operator = _makers(trace, work, work.operators.innermost(threads, times))
    _, scopes, words = scopes_of(trace, work.threads)
    scope = scopes.innermost(threads, times)
    paths = {-1: ""}
    for place in distinct(scope[scope >= 0]).tolist():
        around = int(scopes.parent[place])
        path = [kind_of(words[place])]
        while around >= 0:
            path.append(kind_of(words[around]))
            around = int(scopes.parent[around])
        paths[place] = "/".join(reversed(path))
    found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for op, part, size in zip(operator.tolist(), scope.tolist(), trace.memory.bytes[live].tolist(), strict=True):
        name = trace.texts[trace.events.name[work.operators.rows[op]]] if op >= 0 else ""
        entry = found[name, paths[part]]
        entry[0] += size
        entry[1] += 1
    every = [Holder(*key, *entry) for key, entry in found.items()]
    return tuple(sorted(every, key=lambda holder: (-holder.bytes, holder.operator, holder.part))[:MOST])


def _makers(trace: Trace, work: Issued, place: Ints) -> Ints:
    """Return the operator of each allocation: operators that only allocate are replaced by their caller."""
    spans = work.operators
    silent = np.array([MAKES_ROOM.match(text) is not None for text in trace.texts], np.bool_)[
        trace.events.name[spans.rows]
    ]
    left = np.flatnonzero(place >= 0)
    while len(left := left[silent[place[left]] & (spans.parent[place[left]] >= 0)]):
        place[left] = spans.parent[place[left]]
    return place


def _thinned(values: Ints) -> Ints:
    """Return the index of the largest value in each of at most POINTS equal parts."""
    if len(values) <= POINTS:
        return np.arange(len(values))
    part = np.arange(len(values)) * POINTS // len(values)
    order = np.lexsort((-values, part))
    return np.sort(order[np.append(True, part[order[1:]] != part[order[:-1]])])
