"""Offsets between the clocks of a job's machines.

A collective that synchronises ends at nearly the same true time on all its ranks, so differences between its recorded
ends are clock offsets. Where machines share no such collective, messages in both directions bound the offset from two
sides.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.job.collectives.matching import RECV, SEND, SYNCHRONISING, Matched, column
from meshwright.traces.job.collectives.ordering import Ints, packed
from meshwright.traces.rank.collectives import KINDS
from meshwright.traces.rank.facts import RankFacts

SMALLEST = 5_000  # ns: ends of a collective on devices of one machine differ by this much
ENOUGH = 20  # minimum calls to estimate a drift
NORMAL = 1.4826  # standard deviations of a normal distribution per median absolute deviation


@dataclass(frozen=True, eq=False)
class Clocks:
    """Offsets to subtract from each rank's times to get a common clock."""

    origin: int  # nanoseconds since the epoch, at which offsets hold
    offset: Ints  # [ranks], nanoseconds; 0 for the first rank of a part
    drift: NDArray[np.float64]  # [ranks], nanoseconds per nanosecond
    part: Ints  # [ranks]: times can be compared only within a part
    noise: Ints  # [ranks], nanoseconds: uncertainty of the offset

    def since_origin(self, place: NDArray[np.int32] | int, times: Ints) -> Ints:
        """Return times of ranks (given by place) on the common clock, relative to the origin."""
        passed = times - self.origin
        moved = passed - self.offset[place]
        if self.drift.any():
            moved = moved - np.rint(self.drift[place] * passed).astype(np.int64)
        return moved


@dataclass(frozen=True)
class Link:
    """Offset between two clocks: at the origin `other` is ahead of `one` by `apart`, and it gains `drift`."""

    one: int
    other: int
    apart: float
    drift: float
    noise: float

    def reversed(self) -> Link:
        return Link(self.other, self.one, -self.apart, -self.drift, self.noise)


def clocks(facts: Sequence[RankFacts], matched: Matched) -> Clocks:
    """Estimate the clocks of ranks from their matched calls. Ranks of a named machine share one.

    >>> from meshwright.traces.job.collectives.matching import match
    >>> clocks([], match([])).offset
    array([], dtype=int64)
    """
    hosts = {host: place for place, host in reversed(list(enumerate(one.host for one in facts))) if host}
    clock = np.array([hosts.get(one.host, place) for place, one in enumerate(facts)], np.int64)
    end = column(facts, "end")
    origin = int(end.min()) if len(end) else 0
    links = [*_by_collectives(matched, clock, end, origin), *_by_messages(facts, matched, clock)]
    part, apart, drift, noise = _spread(len(facts), clock, links)
    small = (np.abs(apart) < np.maximum(SMALLEST, 3 * noise)) & (drift == 0)
    apart[small] = 0
    return Clocks(origin, np.rint(apart).astype(np.int64), drift, part, np.rint(noise).astype(np.int64))


def _by_collectives(matched: Matched, clock: Ints, end: Ints, origin: int) -> list[Link]:
    rows = np.flatnonzero(np.isin(matched.kind, [KINDS.index(kind) for kind in SYNCHRONISING]))
    rows = rows[np.argsort(matched.call[rows], kind="stable")]  # grouped by call, the first rank first
    call = matched.call[rows]
    fresh = np.flatnonzero(np.append(True, call[1:] != call[:-1])) if len(call) else call
    model = np.repeat(rows[fresh], np.diff(np.append(fresh, len(rows))))
    one, other = clock[matched.place[model]], clock[matched.place[rows]]
    far = one != other
    one, other, rows, model = one[far], other[far], rows[far], model[far]
    swap = one > other
    one, other = np.where(swap, other, one), np.where(swap, one, other)
    apart = np.where(swap, -1, 1) * (end[rows] - end[model])
    return [
        _link(int(one[some[0]]), int(other[some[0]]), apart[some], end[rows[some]] - origin)
        for some in _each(packed(one, other))
    ]


def _each(keys: Ints) -> list[Ints]:
    """Return the rows of each key."""
    if not len(keys):
        return []
    order = np.argsort(keys, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)


def _link(one: int, other: int, apart: Ints, at: Ints) -> Link:
    """Return the median offset, or a line through the medians of both halves if these differ significantly."""
    middle = float(np.median(apart))
    noise = NORMAL * float(np.median(np.abs(apart - middle))) / len(apart) ** 0.5
    if len(apart) >= ENOUGH:
        halves = np.array_split(np.argsort(at, kind="stable"), 2)
        early, late = (float(np.median(apart[half])) for half in halves)
        begun, ended = (float(np.median(at[half])) for half in halves)
        slope = (late - early) / max(ended - begun, 1.0)
        rest = apart - np.rint(slope * at)
        middle_of_rest = float(np.median(rest))
        finer = NORMAL * float(np.median(np.abs(rest - middle_of_rest))) / len(apart) ** 0.5
        if abs(late - early) > max(SMALLEST, 8 * finer):
            return Link(one, other, middle_of_rest, slope, finer)
    return Link(one, other, middle, 0.0, noise)


def _by_messages(facts: Sequence[RankFacts], matched: Matched, clock: Ints) -> list[Link]:
    """Return offsets from messages, which cannot end before they were sent; the fastest each way take equal times."""
    rows = np.flatnonzero((matched.message & matched.complete)[matched.call] & np.isin(matched.kind, [SEND, RECV]))
    rows = rows[np.lexsort((matched.kind[rows] == RECV, matched.call[rows]))]
    sent, received = rows[::2], rows[1::2]
    took = column(facts, "end")[received] - column(facts, "start")[sent]
    one, other = clock[matched.place[sent]], clock[matched.place[received]]
    least: dict[tuple[int, int], int] = {}
    for some in _each(packed(one, other)):
        least[int(one[some[0]]), int(other[some[0]])] = int(took[some].min())
    return [
        Link(a, b, (there - back) / 2, 0.0, abs(there + back) / 2)
        for (a, b), there in least.items()
        if a < b and (back := least.get((b, a))) is not None
    ]


def _spread(
    ranks: int, clock: Ints, links: list[Link]
) -> tuple[Ints, NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return offsets along the tree of least uncertain links, from the first clock of each part."""
    near: dict[int, list[Link]] = {}
    for link in links:
        near.setdefault(link.one, []).append(link)
        near.setdefault(link.other, []).append(link.reversed())
    known: dict[int, tuple[int, float, float, float]] = {}  # part, apart, drift, noise
    for start in sorted(set(clock.tolist())):
        if start in known:
            continue
        reached = [(0.0, start, 0.0, 0.0, 0.0)]  # a link's noise and clock; sums of offset, drift and noise so far
        while reached:
            _, here, apart, drift, noise = heapq.heappop(reached)
            if here not in known:
                known[here] = (start, apart, drift, noise)
                for link in near.get(here, ()):
                    total = (noise**2 + link.noise**2) ** 0.5
                    heapq.heappush(reached, (link.noise, link.other, apart + link.apart, drift + link.drift, total))
    table = np.array([known[one] for one in clock.tolist()], np.float64).reshape(ranks, 4)
    return table[:, 0].astype(np.int64), table[:, 1].copy(), table[:, 2].copy(), table[:, 3].copy()
