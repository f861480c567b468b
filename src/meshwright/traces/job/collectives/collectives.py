"""Every collective with all its ranks side by side: who waited for whom, and how fast the data then moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.job.collectives.clocks import SMALLEST, Clocks
from meshwright.traces.job.collectives.matching import OTHER, SEND_RECV, SYNCHRONISING, Matched, calls_of_rank, column
from meshwright.traces.job.collectives.ordering import Ints
from meshwright.traces.rank.collectives import KINDS
from meshwright.traces.rank.facts import RankFacts
from meshwright.traces.reading import NONE, Note

# Ranks leave a collective within so many nanoseconds, or this share of its shortest duration, of each other. Only a call
# that no profiler told the group or the peers of has to prove with it that it is one.
TOGETHER, SHARE = 20_000, 0.1
UNCONNECTED = (
    "collectives and messages between ranks whose clocks nothing connects (no machine's name, no collective that all "
    "leave together, no messages both ways)"
)


@dataclass(frozen=True, eq=False)
class Aligned:
    """Rows are those of `Matched`: calls of ranks. Times are nanoseconds on the common clock, from its origin."""

    matched: Matched
    clocks: Clocks
    start: Ints
    end: Ints
    waiting: Ints  # how long the rank waited for others, at the start of its call; 0 where that cannot be told
    bubble: Ints  # the last part of `waiting` that is due to the order of a pipeline (see `pipeline_bubble.py`)
    hidden_waiting: Ints  # the part of it, and of the rest, in which this rank computed
    hidden_transfer: Ints
    split: NDArray[np.bool_]  # of each matched call: whether waiting could be told from transfer
    last: Ints  # when its last rank arrived
    late: Ints  # the place of that rank; -1 where not split
    transfer: Ints  # nanoseconds it took with all ranks there; NONE where not split
    bytes: Ints  # NONE where not told
    notes: tuple[Note, ...]


def align(facts: Sequence[RankFacts], matched: Matched, clocks: Clocks) -> Aligned:
    """The calls of a job on one clock, waiting separated from transfer."""
    call, place = matched.call, matched.place
    start = clocks.since_origin(place, column(facts, "start"))
    end = clocks.since_origin(place, column(facts, "end"))
    calls = len(matched.group)
    last, first_end, last_end = np.full(calls, NONE), np.full(calls, np.iinfo(np.int64).max), np.full(calls, NONE)
    np.maximum.at(last, call, start)
    np.minimum.at(first_end, call, end)
    np.maximum.at(last_end, call, end)
    shortest = np.full(calls, np.iinfo(np.int64).max)
    np.minimum.at(shortest, call, end - start)
    late = np.full(calls, -1)
    arrives_last = start == last[call]
    late[call[arrives_last][::-1]] = place[arrives_last][::-1]  # of those that tie, the first
    kind = np.full(calls, OTHER)
    kind[call] = matched.kind
    size, smallest = np.full(calls, NONE), np.full(calls, np.iinfo(np.int64).max)
    np.maximum.at(size, call, column(facts, "bytes"))
    np.minimum.at(smallest, call, column(facts, "bytes"))
    alike = (size == smallest) & (size != NONE)
    possible, wrong, unconnected = _possible(matched, clocks, kind, alike, last, first_end, last_end, shortest)
    waiting = np.clip(last[call] - start, 0, end - start)
    waiting[~possible[call] | (end + SMALLEST < last[call])] = 0  # who left before the last came did not wait for it
    hidden = _hidden(facts, matched, waiting)
    notes = (
        Note("collectives whose ranks were never in them together: taken as different ones", wrong),
        Note(f"{UNCONNECTED}: what of them is waiting and what is transfer cannot be told", unconnected),
    )
    return Aligned(
        matched=matched,
        clocks=clocks,
        start=start,
        end=end,
        waiting=waiting,
        bubble=np.zeros_like(waiting),
        hidden_waiting=hidden,
        hidden_transfer=column(facts, "hidden") - hidden,
        split=possible,
        last=last,
        late=np.where(possible, late, -1),
        transfer=np.where(possible, shortest, NONE),
        bytes=size,
        notes=matched.notes + tuple(note for note in notes if note.count),
    )


def _possible(
    matched: Matched,
    clocks: Clocks,
    kind: Ints,
    alike: NDArray[np.bool_],
    last: Ints,
    first_end: Ints,
    last_end: Ints,
    shortest: Ints,
) -> tuple[NDArray[np.bool_], int, int]:
    """Which calls can be split into waiting and transfer, how many look like different calls taken for one, and how many
    are between ranks whose clocks cannot be compared.
    """
    parts = clocks.part[matched.place] if len(matched.place) else matched.call
    low, high = np.full(len(kind), np.iinfo(np.int64).max), np.full(len(kind), NONE)
    np.minimum.at(low, matched.call, parts)
    np.maximum.at(high, matched.call, parts)
    known = matched.complete & (kind != OTHER)
    possible = known & (low == high)
    synchronises = np.isin(kind, [KINDS.index(word) for word in SYNCHRONISING]) | (kind == SEND_RECV)
    noise = int(clocks.noise.max(initial=0))
    apart = synchronises & (last > first_end + SMALLEST + 3 * noise)
    # Where neither a group nor equal bytes say that these calls are one, their ends must: on a host they drift apart.
    apart |= ((~matched.named & ~alike) | (kind == SEND_RECV)) & (
        last_end - first_end > np.maximum(TOGETHER + 3 * noise, SHARE * shortest)
    )
    different = int((possible & apart & (kind != SEND_RECV)).sum())
    return possible & ~apart, different, int((known & (low != high)).sum())


def _hidden(facts: Sequence[RankFacts], matched: Matched, waiting: Ints) -> Ints:
    """How much of the beginning of each call its rank computed."""
    out = np.zeros_like(waiting)
    for place, one in enumerate(facts):
        if (calls := calls_of_rank(one)) is not None:
            mine = slice(*matched.firsts[place : place + 2].tolist())
            out[mine] = calls.computing(calls.start, calls.start + waiting[mine])
    return out


def with_waiting(facts: Sequence[RankFacts], aligned: Aligned, waiting: Ints, bubble: Ints) -> Aligned:
    """The same calls where more is known about who waited, and why."""
    hidden = _hidden(facts, aligned.matched, waiting)
    rest = aligned.hidden_waiting + aligned.hidden_transfer - hidden
    return replace(aligned, waiting=waiting, bubble=bubble, hidden_waiting=hidden, hidden_transfer=rest)
