"""Table of collectives by group, kind and size: count, time, waiting and bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.distinct import distinct
from meshwright.traces.job.collectives.collectives import Aligned
from meshwright.traces.job.collectives.matching import Matched, calls_of_rank
from meshwright.traces.job.collectives.ordering import Ints, packed, runs
from meshwright.traces.job.steps import unmarked
from meshwright.traces.rank.collectives import KINDS, Calls, Group
from meshwright.traces.rank.facts import RankFacts
from meshwright.traces.reading import NONE

# Exposed time of each call within a step: moments at which several calls are exposed are shared between them.


Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Exposed:
    """Exposed nanoseconds of each call of a rank within its steps; together they are those of the steps."""

    transfer: Floats
    waiting: Floats
    bubble: Floats


def exposed(calls: Calls, edges: Ints, waiting: Ints, bubble: Ints) -> Exposed:
    """Attribute each moment between the first and the last edge to calls, in equal shares.

    Calls that move data come first, then those that wait for late ranks, then those in a bubble.
    """
    arrives = calls.start + waiting
    late = arrives - bubble
    spans = [
        (np.clip(starts, edges[0], edges[-1]), np.clip(ends, edges[0], edges[-1]))
        for starts, ends in ((arrives, calls.end), (calls.start, late), (late, arrives))
    ]
    cuts = distinct(np.concatenate([side for span in spans for side in span]))
    if len(cuts) < 2:
        nothing = np.zeros(len(calls))
        return Exposed(nothing, nothing, nothing)
    left = (np.diff(cuts) - calls.computing(cuts[:-1], cuts[1:])).astype(np.float64)  # not yet attributed
    parts = []
    for starts, ends in spans:
        first, last = np.searchsorted(cuts, starts), np.searchsorted(cuts, ends)
        many = np.cumsum(np.bincount(first, minlength=len(cuts)) - np.bincount(last, minlength=len(cuts)))[:-1]
        until = np.append(0.0, np.cumsum(np.where(many > 0, left / np.maximum(many, 1), 0.0)))
        parts.append(until[last] - until[first])
        left[many > 0] = 0.0
    return Exposed(*parts)


SIZES = (0, 64 << 10, 1 << 20, 16 << 20, 256 << 20)  # bytes: lower bounds of size classes
WHOLE, TWICE = ("all_gather", "reduce_scatter", "all_to_all"), ("all_reduce",)
SAYS_NOTHING = ("", "undefined")


@dataclass(frozen=True)
class CollectiveRow:
    """Row of the table. Times are nanoseconds, summed over calls and ranks; total = waiting + transfer + unsplit."""

    group: str  # name of groups of this purpose, or their number of ranks
    kind: str
    at_least: int | None  # bytes of a call; None if unknown
    below: int | None  # None for the largest class
    calls: int
    partial: int  # calls whose waiting is unknown: not every rank was recorded
    ranks: int  # in the largest group
    total: int
    waiting: int
    transfer: int
    unsplit: int
    # Exposed time within steps. Moments of several calls are shared, so rows add up to the parts of the steps.
    exposed_waiting: int  # for late ranks
    exposed_bubble: int  # for other stages of a pipeline
    exposed_transfer: int  # with the exposed part of unsplit
    algbw: float | None  # GB/s of the median call; None if bytes or waiting are unknown
    busbw: float | None
    best_busbw: float | None
    crosses_nodes: bool | None  # None if machines are not named


def bus_factor(kind: str, ranks: int) -> float:
    """Return the bytes that a link moves per byte of the buffer, as NCCL's tests count it.

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("send", 2)
    (1.75, 0.875, 1.0)
    """
    share = (ranks - 1) / ranks
    return 2 * share if kind in TWICE else share if kind in WHOLE else 1.0


def collective_table(facts: Sequence[RankFacts], aligned: Aligned) -> tuple[CollectiveRow, ...]:
    """Return the rows, longest first.

    >>> from meshwright.traces.job.across import across
    >>> across([]).table
    ()
    """
    matched = aligned.matched
    if not len(matched.call):
        return ()
    labels = [label(group, int(size)) for group, size in zip(matched.groups, _group_sizes(matched), strict=True)]
    words = np.unique(labels, return_inverse=True)[1].reshape(-1)[matched.group]
    large = np.where(aligned.bytes == NONE, -1, np.searchsorted(SIZES, aligned.bytes, side="right") - 1)
    # By the row's own kind: a send on one rank is a receive on another.
    key, first, _ = runs(packed(words[matched.call], matched.kind, large[matched.call]))
    sums = _sums(facts, aligned, key)
    crosses = _crossing(facts, matched)
    rows = []
    for number, some in enumerate(np.split(np.argsort(key, kind="stable"), np.cumsum(np.bincount(key))[:-1])):
        calls = distinct(matched.call[some])
        one = int(matched.call[first[number]])
        word, size = KINDS[matched.kind[first[number]]], int(large[one])
        speeds, factors = _speeds(aligned, calls, word)
        bus = speeds * factors
        across = crosses[calls]
        rows.append(
            CollectiveRow(
                group=labels[int(matched.group[one])],
                kind=word,
                at_least=None if size < 0 else SIZES[size],
                below=None if size < 0 or size + 1 == len(SIZES) else SIZES[size + 1],
                calls=len(calls),
                partial=int((~aligned.split[calls]).sum()),
                ranks=int(matched.size[calls].max()),
                algbw=float(np.median(speeds)) if len(speeds) else None,
                busbw=float(np.median(bus)) if len(bus) else None,
                best_busbw=float(bus.max()) if len(bus) else None,
                crosses_nodes=None if (across < 0).any() else bool(across.any()),
                **{name: int(values[number]) for name, values in sums.items()},
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.total))


def label(group: Group, size: int) -> str:
    """Return the name of a group in reports; groups of equal purpose on different ranks share it.

    >>> label(Group("17", "mesh_dp", ()), 8), label(Group("0", "undefined", ()), 8)
    ('mesh_dp', '8 ranks')
    """
    return group.description if group.description.lower() not in SAYS_NOTHING else f"{size} ranks"


def _group_sizes(matched: Matched) -> Ints:
    sizes = np.zeros(len(matched.groups), np.int64)
    np.maximum.at(sizes, matched.group, matched.size)
    return sizes


def _sums(facts: Sequence[RankFacts], aligned: Aligned, key: Ints) -> dict[str, Ints]:
    """Return times of rows, summed by their key."""
    split = aligned.split[aligned.matched.call] | (aligned.waiting > 0)
    total = aligned.end - aligned.start
    rest = total - aligned.waiting
    values = {
        "total": total,
        "waiting": aligned.waiting,
        "transfer": np.where(split, rest, 0),
        "unsplit": np.where(split, 0, rest),
    } | _exposed(facts, aligned)
    return {name: np.rint(np.bincount(key, each)).astype(np.int64) for name, each in values.items()}


def _exposed(facts: Sequence[RankFacts], aligned: Aligned) -> dict[str, NDArray[np.float64]]:
    """Return the exposed time of each row, in the order of ranks."""
    every, without = [], unmarked(facts)
    for place, one in enumerate(facts):
        if (calls := calls_of_rank(one)) is not None:
            mine = slice(*aligned.matched.firsts[place : place + 2].tolist())
            edges = one.devices[0].windows.edges + one.base_ns
            edges = edges[:1] if place in without else edges
            every.append(exposed(calls, edges, aligned.waiting[mine], aligned.bubble[mine]))
    names = ("waiting", "bubble", "transfer")
    return {f"exposed_{name}": np.concatenate([getattr(one, name) for one in every]) for name in names}


def _speeds(aligned: Aligned, calls: Ints, kind: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return bytes per nanosecond (= GB/s) of the calls with known bytes, and their bus factors."""
    known = calls[aligned.split[calls] & (aligned.bytes[calls] > 0) & (aligned.transfer[calls] > 0)]
    sizes = aligned.matched.size[known]
    factors = {size: bus_factor(kind, size) for size in distinct(sizes).tolist()}
    return aligned.bytes[known] / aligned.transfer[known], np.array([factors[size] for size in sizes.tolist()])


def _crossing(facts: Sequence[RankFacts], matched: Matched) -> Ints:
    """Return for each matched call 1 if its ranks are on several machines, 0 if on one, -1 if unknown."""
    hosts = np.unique([one.host for one in facts], return_inverse=True)[1].reshape(-1)
    unknown = np.array([not one.host for one in facts], np.bool_)
    low, high = np.full(len(matched.group), len(facts)), np.full(len(matched.group), -1)
    np.minimum.at(low, matched.call, hosts[matched.place])
    np.maximum.at(high, matched.call, hosts[matched.place])
    found = (low != high).astype(np.int64)
    some_unknown = np.zeros(len(matched.group), np.bool_)
    np.logical_or.at(some_unknown, matched.call, unknown[matched.place])
    return np.where(some_unknown | ((found == 0) & (matched.found < matched.size)), -1, found)
