"""The critical path of a step across ranks: from its end back to its beginning, always to the rank that was waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.job.across import Across
from meshwright.traces.job.collective_table import label
from meshwright.traces.job.collectives.matching import calls_of_rank
from meshwright.traces.job.collectives.ordering import Ints
from meshwright.traces.rank.collectives import KINDS
from meshwright.traces.rank.facts import RankFacts
from meshwright.traces.rank.kernel_classes import CLASSES

OWN = "own work"
TAIL = 1_000  # ns: times since the epoch are coarse, so work may seem to begin this long before its cause ended


@dataclass(frozen=True)
class Segment:
    """Segment of the path; times are nanoseconds on the common clock, from its origin."""

    rank: int
    start: int
    end: int
    what: str  # "own work", or the collective or message that transfers data
    computing: int  # nanoseconds of it that the rank computed; the rest of own work is copies and idle time


@dataclass(frozen=True)
class CriticalPath:
    """Segments from the step's beginning to its end, without gaps."""

    step: int
    length: int
    segments: tuple[Segment, ...]
    by_rank: tuple[tuple[int, int], ...]  # rank and nanoseconds of own work, largest first
    by_what: tuple[tuple[str, int], ...]  # classes of kernels (as in the rank's whole step), "idle", collectives


@dataclass(frozen=True, eq=False)
class _Rank:
    """Data of a rank that the walk back through it needs."""

    place: int
    number: int
    rows: Ints  # calls in which it waited, by end
    starts: Ints
    ends: Ints
    edges: Ints  # edges of its steps, on the common clock
    done: Ints  # end of the last work of each step
    at_edges: Ints  # nanoseconds of computing until each edge
    mix: NDArray[np.int64]  # [step, class]


def critical_paths(facts: Sequence[RankFacts], job: Across) -> tuple[CriticalPath, ...]:
    """Return the critical path of every step.

    >>> from meshwright.traces.job.across import across
    >>> critical_paths([], across([]))
    ()
    """
    ranks = {place: _rank(one, job, place) for place, one in enumerate(facts) if one.devices}
    computed = _computed(facts)
    paths, begun = [], dict[int, int]()
    for number in job.parts.numbers.tolist():
        here = {
            place: int(np.flatnonzero(one.devices[0].windows.numbers == number)[0])
            for place, one in enumerate(facts)
            if one.devices and number in one.devices[0].windows.numbers
        }
        paths.append(_path(job, ranks, here, begun, computed, number))
        begun = _over(job, ranks, here)
    return tuple(paths)


def _over(job: Across, ranks: dict[int, _Rank], steps: dict[int, int]) -> dict[int, int]:
    """Return for each part of the clocks when all its ranks have finished a step; only then can the next begin."""
    over: dict[int, int] = {}
    for place, step in steps.items():
        part = int(job.clocks.part[place])
        over[part] = max(over.get(part, int(ranks[place].done[step])), int(ranks[place].done[step]))
    return over


def _rank(facts: RankFacts, job: Across, place: int) -> _Rank:
    calls = calls_of_rank(facts)
    assert calls is not None
    first = int(job.aligned.matched.firsts[place])
    nearly = np.maximum(calls.end - TAIL, (calls.start + calls.end) // 2)
    alone = calls.computing(np.maximum(nearly - TAIL, calls.start), nearly) == 0  # a rank that computes does not wait
    rows = first + np.flatnonzero(alone)
    rows = rows[np.argsort(job.aligned.end[rows], kind="stable")]
    device = facts.devices[0]
    edges = job.clocks.since_origin(place, device.windows.edges + facts.base_ns)
    until = np.append(0, np.cumsum(device.windows.compute))
    after = np.searchsorted(edges, job.aligned.end[first : first + len(calls)])
    inside = after < len(edges)
    # Computing before the first step is not counted there, so the calls' own counts are the minimum.
    before = int((calls.computed + calls.hidden - until[np.minimum(after, len(until) - 1)])[inside].max(initial=0))
    at_edges = before + until
    mine = slice(first, first + len(calls))
    done = _done(job.aligned.start[mine], job.aligned.end[mine], calls.computed + calls.hidden, edges, at_edges)
    starts, ends = job.aligned.start[rows], job.aligned.end[rows]
    return _Rank(place, job.ranks[place], rows, starts, ends, edges, done, at_edges, device.by_class)


def _done(starts: Ints, ends: Ints, computed: Ints, edges: Ints, at_edges: Ints) -> Ints:
    """Return when the last work of each step ends: its last call, or the next step's edge if something computes after.

    `computed` is the computing until each call ends. If something computes after the last call, it is unknown whether
    idle time came before or after.
    """
    done = edges[1:].copy()
    bounds = np.searchsorted(starts, edges).tolist()
    for step, (low, high) in enumerate(pairwise(bounds)):
        if low < high:
            last = low + int(np.argmax(ends[low:high]))
            if at_edges[step + 1] - computed[last] <= TAIL:
                done[step] = min(done[step], ends[last])
    return done


def _computed(facts: Sequence[RankFacts]) -> tuple[Ints, Ints]:
    """Return the computing on its rank until each call starts, and until it ends."""
    every = [calls for calls in map(calls_of_rank, facts) if calls is not None]
    nothing = [np.empty(0, np.int64)]
    starts = np.concatenate(nothing + [calls.computed for calls in every])
    return starts, starts + np.concatenate(nothing + [calls.hidden for calls in every])


def _path(
    job: Across,
    ranks: dict[int, _Rank],
    steps: dict[int, int],
    begun: dict[int, int],
    computed: tuple[Ints, Ints],
    number: int,
) -> CriticalPath:
    """Walk back: own work until the call that was waited for, its transfer, then the rank that was last to join it.

    A rank that starts its step after the previous one was over everywhere (`begun`) was idle until then, which is on
    the path too.
    """
    aligned, matched = job.aligned, job.aligned.matched
    place = max(steps, key=lambda one: int(ranks[one].done[steps[one]]))
    time = int(ranks[place].done[steps[place]])
    busy = int(ranks[place].at_edges[steps[place] + 1])  # the rank's computing until then
    back: list[Segment] = []
    seen: set[int] = set()
    while True:
        rank = ranks[place]
        begin = int(rank.edges[steps[place]])
        if steps[place]:
            begin = min(begin, begun.get(int(job.clocks.part[place]), begin))
        row = _waited_for(rank, time, begin, matched.call, seen)
        stop = min(begin if row is None else int(aligned.end[row]), time)
        done = int(rank.at_edges[steps[place]] if row is None else computed[1][row])
        back.append(Segment(rank.number, stop, time, OWN, min(max(busy - done, 0), time - stop)))
        if row is None:
            break
        call = int(matched.call[row])
        seen.add(call)
        what = f"{KINDS[matched.kind[row]]} of {label(matched.groups[matched.group[call]], int(matched.size[call]))}"
        last = int(aligned.late[call])
        if last not in steps or aligned.last[call] < ranks[last].edges[steps[last]]:
            last = place
        arrives = row if last == place else int(_row_of(job, call, last))
        came = int(aligned.start[arrives])
        hidden = int(aligned.hidden_transfer[row])
        back.append(Segment(rank.number, min(came, stop), stop, what, min(hidden, max(stop - came, 0))))
        place, time, busy = last, min(came, stop), int(computed[0][arrives])
    segments = tuple(one for one in reversed(back) if one.end > one.start)
    length = sum(one.end - one.start for one in segments)
    return CriticalPath(number, length, segments, _by_rank(segments), _by_what(segments, ranks, steps))


def _waited_for(rank: _Rank, time: int, begin: int, call: Ints, seen: set[int]) -> int | None:
    """Return the last call in which this rank waited, before some time of its step."""
    at = int(np.searchsorted(rank.ends, time + TAIL, side="right")) - 1
    while at >= 0 and rank.ends[at] > begin + TAIL:
        if rank.starts[at] < time and int(call[rank.rows[at]]) not in seen:
            return int(rank.rows[at])
        at -= 1
    return None


def _row_of(job: Across, call: int, place: int) -> int:
    first, last = (int(edge) for edge in job.aligned.matched.firsts[place : place + 2])
    return first + int(np.flatnonzero(job.aligned.matched.call[first:last] == call)[0])


def _by_rank(segments: tuple[Segment, ...]) -> tuple[tuple[int, int], ...]:
    spent: dict[int, int] = {}
    for one in segments:
        if one.what == OWN:
            spent[one.rank] = spent.get(one.rank, 0) + one.end - one.start
    return tuple(sorted(spent.items(), key=lambda pair: (-pair[1], pair[0])))


def _by_what(
    segments: tuple[Segment, ...], ranks: dict[int, _Rank], steps: dict[int, int]
) -> tuple[tuple[str, int], ...]:
    """Split own work by the rank's proportions of classes in the step; the rest of it is idle time or copies."""
    mixes = {ranks[place].number: ranks[place].mix[step] for place, step in steps.items()}
    spent: dict[str, float] = {}
    for one in segments:
        if one.what != OWN:
            spent[one.what] = spent.get(one.what, 0.0) + one.end - one.start
            continue
        spent["idle"] = spent.get("idle", 0.0) + one.end - one.start - one.computing
        mix = mixes[one.rank]
        for place in np.flatnonzero(mix).tolist():
            spent[CLASSES[place]] = spent.get(CLASSES[place], 0.0) + one.computing * float(mix[place] / mix.sum())
    return tuple(sorted(((what, round(ns)) for what, ns in spent.items() if ns >= 0.5), key=lambda pair: -pair[1]))
