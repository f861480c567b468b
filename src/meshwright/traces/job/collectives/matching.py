"""Match calls of different ranks that are the same collective or message.

The group's sequence number of a call decides if the profiler recorded one. Otherwise the order does: the third
all-gather of a group in a step is the same one on every rank. Messages are matched by sender, receiver and order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.job.collectives.ordering import Ints, Rows, packed, runs, settled
from meshwright.traces.rank.collectives import KINDS, POINT_TO_POINT, Calls, Group
from meshwright.traces.rank.facts import RankFacts
from meshwright.traces.reading import NONE, Note

SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
MESSAGES = np.isin(KINDS, POINT_TO_POINT)
SEND, RECV, SEND_RECV, OTHER = (KINDS.index(kind) for kind in ("send", "recv", "send_recv", "other"))
UNMARKED = -1  # number of the only step of a rank whose loop marks no steps
EARLIER, LATER = -3, 1 << 40  # numbers of a step before, or after, the recorded ones


@dataclass(frozen=True, eq=False)
class Matched:
    """Matched calls: one row per call of a rank, rank after rank, and the columns that rows point to."""

    ranks: tuple[int, ...]
    firsts: Ints  # [ranks + 1]: rows of a rank are those from firsts[place] to firsts[place + 1]
    place: NDArray[np.int32]  # place of the rank in `ranks`
    kind: NDArray[np.int8]
    call: Ints  # into the columns below
    groups: tuple[Group, ...]  # of the job
    group: NDArray[np.int32]  # of each matched call, as all columns below
    found: NDArray[np.int32]  # number of ranks that recorded it
    size: NDArray[np.int32]  # number of ranks that take part in it
    message: NDArray[np.bool_]
    named: NDArray[np.bool_]  # True if the profiler recorded its group or peer
    notes: tuple[Note, ...]

    @property
    def complete(self) -> NDArray[np.bool_]:
        whole: NDArray[np.bool_] = (self.found == self.size) & (self.size > 1)
        return whole


def calls_of_rank(facts: RankFacts) -> Calls | None:
    """Return the calls of the rank's busiest device, which stands for the rank."""
    return facts.devices[0].calls if facts.devices else None


def column(facts: Sequence[RankFacts], name: str) -> Ints:
    """Return a column of the calls of all ranks, in the order of the rows of `Matched`."""
    parts = [getattr(calls, name) for calls in map(calls_of_rank, facts) if calls is not None]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def match(facts: Sequence[RankFacts]) -> Matched:
    """Match the calls of a job's ranks, whose numbers must be known and differ.

    >>> from meshwright.traces.rank.facts import digest
    >>> from meshwright.traces.reading import read_trace
    >>> names = ("worker0_step_12.1694128201545", "worker4_step_12.1694128201547")
    >>> files = [f"tests/data/traces/param/dlrm_8rank/{name}.pt.trace.json.gz" for name in names]
    >>> matched = match([digest(read_trace(file)) for file in files])
    >>> matched.ranks, matched.found.tolist(), set(matched.size.tolist())
    ((0, 4), [2, 2, 2, 2, 2, 2, 2, 2], {8})
    """
    counts = [len(calls) if calls is not None else 0 for calls in map(calls_of_rank, facts)]
    ranks = np.array([facts_of_one.rank for facts_of_one in facts], np.int64)
    firsts = np.append(0, np.cumsum(np.array(counts, np.int64)))
    place = np.repeat(np.arange(len(facts), dtype=np.int32), counts)
    groups, group = _groups(facts)
    kind, seq, peer = (column(facts, name) for name in ("kind", "seq", "peer"))
    message = MESSAGES[kind] & (peer != NONE)
    step = numbers_of_steps(facts)
    step = np.where(message, step, _comparable(step, group))
    numbered = ~message & (seq != NONE)
    own = ranks[place] if len(place) else np.empty(0, np.int64)
    pair = np.where(kind == RECV, _pair(peer, own), _pair(own, peer))
    pair = np.where(kind == SEND_RECV, _pair(np.minimum(own, peer), np.maximum(own, peer)), pair)
    what = np.where(message, np.where(kind == SEND_RECV, len(KINDS) + 1, len(KINDS)), kind)
    base = packed(group, what, np.where(message, pair, -1), np.where(numbered, seq, step), numbered)
    rows = Rows(base, place, column(facts, "end"), column(facts, "bytes"))
    turn, moved = settled(rows, ~message & ~numbered)
    call, first, found = runs(packed(base, turn))
    sizes = _sizes(facts, groups, group)
    named = np.array([bool(one.name or one.ranks) for one in groups], np.bool_)
    size = np.where(message[first], 2, np.maximum(sizes[group[first]], found))
    told = message[first] | named[group[first]]
    alone = int((found < size).sum())
    return Matched(
        ranks=tuple(ranks.tolist()),
        firsts=firsts,
        place=place,
        kind=kind.astype(np.int8),
        call=call,
        groups=groups,
        group=group[first].astype(np.int32),
        found=found.astype(np.int32),
        size=size.astype(np.int32),
        message=message[first],
        named=told,
        notes=tuple(
            Note(what, count)
            for what, count in (
                ("collectives and messages that not all who take part recorded: their waiting cannot be told", alone),
                ("series of collectives that ranks recorded different numbers of: aligned by size and time", moved),
            )
            if count
        ),
    )


def _pair(sender: Ints, receiver: Ints) -> Ints:
    return sender * (1 << 24) + receiver


def _groups(facts: Sequence[RankFacts]) -> tuple[tuple[Group, ...], Ints]:
    """Return the groups of a job, and each row's group. A group is its name and its members.

    Some ranks may have shortened member lists: a name that has one full list elsewhere is that group.
    """
    every = [(one.rank, calls) for one in facts if (calls := calls_of_rank(one)) is not None]
    known: dict[str, set[Group]] = {}
    for _, calls in every:
        for group in calls.groups:
            if group.ranks:
                known.setdefault(group.name, set()).add(group)

    def full(rank: int | None, group: Group) -> Group:
        listed = [other for other in known.get(group.name, ()) if rank in other.ranks]
        return listed[0] if not group.ranks and group.name and len(listed) == 1 else group

    places: dict[Group, int] = {}
    columns = [np.empty(0, np.int64)]
    for rank, calls in every:
        here = [places.setdefault(full(rank, group), len(places)) for group in calls.groups]
        columns.append(np.array(here, np.int64)[calls.group])
    return tuple(places), np.concatenate(columns)


def numbers_of_steps(facts: Sequence[RankFacts]) -> Ints:
    """Return the step number of each row; calls launched by no step are before or after the recorded ones."""
    columns = [np.empty(0, np.int64)]
    for one in facts:
        if (calls := calls_of_rank(one)) is not None:
            windows = one.devices[0].windows
            outside = np.where(calls.start < windows.edges[0] + one.base_ns, EARLIER, LATER)
            columns.append(np.where(calls.step >= 0, windows.numbers[calls.step], outside))
    return np.concatenate(columns)


def _comparable(step: Ints, group: Ints) -> Ints:
    """Return the step numbers, but one constant for groups in which only some ranks marked their steps."""
    without = np.zeros(int(group.max(initial=-1)) + 1, np.bool_)
    without[group[step == UNMARKED]] = True
    return np.where(without[group] & bool((step >= 0).any()), UNMARKED, step)


def _sizes(facts: Sequence[RankFacts], groups: tuple[Group, ...], group: Ints) -> Ints:
    """Return the size of each group: as listed, from its calls, or the whole job if unknown."""
    told = np.full(len(groups), NONE)
    np.maximum.at(told, group, column(facts, "size"))
    world = max([len(facts), *(one.world_size or 0 for one in facts)])
    listed = np.array([len(one.ranks) for one in groups], np.int64)
    return np.where(listed > 0, listed, np.where(told != NONE, told, world))
