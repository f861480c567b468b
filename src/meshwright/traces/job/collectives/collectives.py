"""Every collective over all its ranks: waiting times, and the bandwidth after all ranks have arrived."""

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

# Ranks leave a collective within this many nanoseconds, or this share of its shortest duration, of each other. It is
# only checked for calls whose group or peers the profiler did not record.
TOGETHER, SHARE = 20_000, 0.1
UNCONNECTED = (
    "collectives and messages between ranks whose clocks nothing connects (no machine's name, no collective that all "
    "leave together, no messages both ways)"
)


@dataclass(frozen=True, eq=False)
class Aligned:
    """Aligned calls. Rows are those of `Matched`. Times are nanoseconds on the common clock, from its origin."""

    matched: Matched
    clocks: Clocks
    start: Ints
    end: Ints
    waiting: Ints  # time that the rank waited for others, at the start of its call; 0 if unknown
    bubble: Ints  # the last part of `waiting`, due to the pipeline's order (see `pipeline_bubble.py`)
    hidden_waiting: Ints  # the overlapped part of it, and of the rest: this rank computed
    hidden_transfer: Ints
    split: NDArray[np.bool_]  # of each matched call: True if waiting and transfer are known separately
    last: Ints  # time at which its last rank arrived
    late: Ints  # place of that rank; -1 if not split
    transfer: Ints  # nanoseconds with all ranks there; NONE if not split
    bytes: Ints  # NONE if unknown
    notes: tuple[Note, ...]


def align(facts: Sequence[RankFacts], matched: Matched, clocks: Clocks) -> Aligned:
    """Align the calls of a job to one clock, and separate waiting from transfer."""
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
    late[call[arrives_last][::-1]] = place[arrives_last][::-1]  # of ties, the first
    kind = np.full(calls, OTHER)
    kind[call] = matched.kind
    size, smallest = np.full(calls, NONE), np.full(calls, np.iinfo(np.int64).max)
    np.maximum.at(size, call, column(facts, "bytes"))
    np.minimum.at(smallest, call, column(facts, "bytes"))
    alike = (size == smallest) & (size != NONE)
    possible, wrong, unconnected = _possible(matched, clocks, kind, alike, last, first_end, last_end, shortest)
    waiting = np.clip(last[call] - start, 0, end - start)
    waiting[~possible[call] | (end + SMALLEST < last[call])] = 0  # a rank that left earlier did not wait for it
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
    """Find the calls that can be split into waiting and transfer.

    Return also the number of calls that look like different ones matched by mistake, and the number between ranks whose
    clocks cannot be compared.
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
    # If neither groups nor equal bytes confirm a match, the ends must: different calls on hosts drift apart.
    apart |= ((~matched.named & ~alike) | (kind == SEND_RECV)) & (
        last_end - first_end > np.maximum(TOGETHER + 3 * noise, SHARE * shortest)
    )
    different = int((possible & apart & (kind != SEND_RECV)).sum())
    return possible & ~apart, different, int((known & (low != high)).sum())


def _hidden(facts: Sequence[RankFacts], matched: Matched, waiting: Ints) -> Ints:
    """Return how much of the beginning of each call its rank computed."""
    out = np.zeros_like(waiting)
    for place, one in enumerate(facts):
        if (calls := calls_of_rank(one)) is not None:
            mine = slice(*matched.firsts[place : place + 2].tolist())
            out[mine] = calls.computing(calls.start, calls.start + waiting[mine])
    return out


def with_waiting(facts: Sequence[RankFacts], aligned: Aligned, waiting: Ints, bubble: Ints) -> Aligned:
    """Return the calls with updated waiting times and bubbles."""
    hidden = _hidden(facts, aligned.matched, waiting)
    rest = aligned.hidden_waiting + aligned.hidden_transfer - hidden
    return replace(aligned, waiting=waiting, bubble=bubble, hidden_waiting=hidden, hidden_transfer=rest)
