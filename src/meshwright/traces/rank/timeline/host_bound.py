"""Stretches in which a device idles because its host has not issued work: slow launches, or synchronisation."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.rank.device_activity import Work
from meshwright.traces.rank.intervals import union
from meshwright.traces.rank.issued import Issued
from meshwright.traces.rank.timeline.windows import unissued
from meshwright.traces.reading import Category, Trace

Ints = NDArray[np.int64]
MOST = 20  # maximum stretches
MOST_NAMES = 3  # operators named per stretch
OUTSIDE = "outside operators"
# Calls in which the host waits until a device has finished its work.
WAITS = re.compile(
    r"(?:cuda|hip|cu|acl\w*|mu(?:sa)?|xpu|ze)\w*(?:Synchronize|StreamWaitValue)|(?:cuda|hip)Memcpy(?!Async)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Stretch:
    """Consecutive gaps in a device's work, longer than the work between them. Nanoseconds."""

    start: int
    end: int
    idle: int  # the host had not yet issued the next work
    kernels: int  # pieces of work that began in it
    median: float  # median length of these
    synchronised: int  # part of `idle` in gaps that began while the host waited for the device
    waits_in: str  # the operator, else the call, in which it waited; "" for none
    filled_by: tuple[tuple[str, int], ...]  # operators of the issuing thread, by their own time in the stretch

    @property
    def idle_share(self) -> float:
        return self.idle / max(self.end - self.start, 1)

    @property
    def kernels_per_ms(self) -> float:
        return self.kernels / max(self.end - self.start, 1) * 1e6

    @property
    def is_wait(self) -> bool:
        """Return True if the host waited for the device, rather than being slow to launch."""
        return 2 * self.synchronised > self.idle


@dataclass(frozen=True)
class Launches:
    """Waits of one device for its host; nanoseconds."""

    idle: int  # in all gaps
    synchronised: int  # part of it after waits for the device
    stretches: tuple[Stretch, ...]  # the MOST with the largest idle time, by start
    count: int  # of all stretches


def launches_of(trace: Trace, work: Work, host: Issued) -> Launches:
    """Return the stretches of one device's work.

    >>> from meshwright.traces.rank.issued import issued
    >>> from meshwright.traces.rank.device_activity import work_of
    >>> from meshwright.traces.reading import read_trace
    >>> trace = read_trace("tests/data/traces/hta/alexnet_cuda_sync.json.gz")
    >>> found = launches_of(trace, work_of(trace)[0], issued(trace))
    >>> found.idle > found.synchronised > 0
    True
    """
    if work.device == "host" or not len(work):
        return Launches(0, 0, (), 0)
    begins, ends = unissued(work, union(work.starts, work.ends), int(work.starts[0]), int(work.ends.max()))
    if not len(begins):
        return Launches(0, 0, (), 0)
    idle = ends - begins
    waited = _waited(trace, begins)
    synced = np.where(waited >= 0, idle, 0)
    # Two gaps belong to one stretch if the work between them is no longer than both together.
    between = begins[1:] - ends[:-1]
    first = np.flatnonzero(np.append(True, between > idle[1:] + idle[:-1]))
    last = np.append(first[1:], len(begins)) - 1
    total, total_synced = np.add.reduceat(idle, first), np.add.reduceat(synced, first)
    largest = np.sort(np.argsort(-total, kind="stable")[:MOST])
    stretches = tuple(
        _stretch(trace, work, host, int(begins[first[at]]), int(ends[last[at]]), int(total[at]), int(total_synced[at]),
                 waited[first[at] : last[at] + 1])
        for at in largest
    )  # fmt: skip
    return Launches(int(idle.sum()), int(synced.sum()), stretches, len(first))


def _waited(trace: Trace, times: Ints) -> Ints:
    """Return the row of the call in which the host waited for the device at each time, -1 for none."""
    events = trace.events
    rows = trace.complete(Category.RUNTIME, Category.DRIVER)
    waits = np.array([WAITS.match(text) is not None for text in trace.texts], np.bool_)
    rows = rows[waits[events.name[rows]]]
    rows = rows[np.argsort(events.ts[rows], kind="stable")]
    if not len(rows):
        return np.full(len(times), -1)
    # Calls of several threads may overlap: take the one that ends last of all that have begun.
    ends = events.ts[rows] + events.dur[rows]
    furthest = np.maximum.accumulate(ends)
    latest = np.maximum.accumulate(np.where(ends == furthest, np.arange(len(rows)), 0))
    near = np.searchsorted(events.ts[rows], times, side="right") - 1
    return np.where((near >= 0) & (furthest[near] >= times), rows[latest[near]], -1)


def _stretch(
    trace: Trace, work: Work, host: Issued, start: int, end: int, idle: int, synced: int, waited: Ints
) -> Stretch:
    inside = slice(*np.searchsorted(work.starts, [start, end]))
    threads = host.thread[np.searchsorted(host.rows, work.rows[inside.start : inside.stop + 1])]
    thread = int(np.bincount(threads + 1).argmax()) - 1  # -1: launches were not recorded
    lengths = work.ends[inside] - work.starts[inside]
    return Stretch(
        start=start + trace.base_ns,
        end=end + trace.base_ns,
        idle=idle,
        kernels=len(lengths),
        median=float(np.median(lengths)) if len(lengths) else 0.0,
        synchronised=synced,
        waits_in=_where(trace, host, waited[waited >= 0]),
        filled_by=_filled(trace, host, thread, start, end),
    )


def _where(trace: Trace, host: Issued, calls: Ints) -> str:
    """Return the operator that made most of some calls, else the call itself."""
    if not len(calls):
        return ""
    place = host.operators.innermost(host.threads[trace.events.track[calls]], trace.events.ts[calls])
    rows = np.where(place >= 0, host.operators.rows[place], calls) if len(host.operators) else calls
    return trace.texts[int(np.bincount(trace.events.name[rows]).argmax())]


def _filled(trace: Trace, host: Issued, thread: int, start: int, end: int) -> tuple[tuple[str, int], ...]:
    """Return a thread's operators by their own time between start and end."""
    spans = host.operators
    mine = slice(*np.searchsorted(spans.thread, [thread, thread + 1]))
    until = mine.start + int(np.searchsorted(spans.starts[mine], end))
    since = mine.start + int(np.searchsorted(spans.starts[mine], start))
    around = []
    place = int(spans.innermost(np.array([thread]), np.array([start]))[0])
    while place >= 0:
        around.append(place)
        place = int(spans.parent[place])
    chosen = np.array([*(place for place in around[::-1] if place < since), *range(since, until)], np.int64)
    time = np.minimum(spans.ends[chosen], end) - np.maximum(spans.starts[chosen], start)
    alone = time.astype(np.float64)
    parents = np.searchsorted(chosen, spans.parent[chosen])
    held = spans.parent[chosen] >= 0
    np.subtract.at(alone, parents[held], time[held])
    by_name = np.bincount(trace.events.name[spans.rows[chosen]], alone, minlength=len(trace.texts))
    rest = end - start - int(time[~held].sum())
    named = [(trace.texts[at], int(by_name[at])) for at in np.argsort(-by_name, kind="stable")[:MOST_NAMES]]
    every = sorted([*named, (OUTSIDE, rest)], key=lambda pair: -pair[1])
    return tuple(pair for pair in every[:MOST_NAMES] if pair[1] > 0)
