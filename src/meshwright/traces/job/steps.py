"""Steps of all ranks side by side, each split into parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.distinct import distinct
from meshwright.traces.job.collectives.collectives import Aligned
from meshwright.traces.job.collectives.matching import calls_of_rank
from meshwright.traces.job.collectives.ordering import Ints
from meshwright.traces.rank.collectives import Calls
from meshwright.traces.rank.facts import RankFacts
from meshwright.traces.rank.intervals import union
from meshwright.traces.reading import Note

PARTS = ("compute", "transfer", "waiting", "bubble", "copies", "host_bound", "idle")


@dataclass(frozen=True, eq=False)
class StepParts:
    """Parts of steps: [ranks, steps], nanoseconds. Those in PARTS add up to `length`; 0 if a rank has no such step."""

    numbers: Ints  # of the steps, ascending; -1 if the loop marks no steps
    length: Ints
    compute: Ints
    transfer: Ints  # exposed communication
    waiting: Ints  # for late ranks in a collective, while nothing computes
    bubble: Ints  # for other stages of a pipeline, while nothing computes
    copies: Ints  # copies and fills while no kernel runs
    host_bound: Ints  # idle, and the next work was not yet issued
    idle: Ints  # idle though the next work was issued
    hidden: Ints  # beside these: communication overlapped with computing

    @property
    def present(self) -> NDArray[np.bool_]:
        return self.length > 0


def step_numbers(facts: Sequence[RankFacts]) -> Ints:
    """Return the numbers of the steps that any rank has; -1 only if no rank has marked any."""
    found = distinct(
        np.concatenate([np.empty(0, np.int64), *(one.devices[0].windows.numbers for one in facts if one.devices)])
    )
    return found[found >= 0] if (found >= 0).any() else found


def unmarked(facts: Sequence[RankFacts]) -> tuple[int, ...]:
    """Return places of ranks that marked no step though others did: they are left out of all tables.

    >>> unmarked([])
    ()
    """
    marked = [bool(one.devices) and int(one.devices[0].windows.numbers[0]) >= 0 for one in facts]
    return tuple(place for place, one in enumerate(facts) if one.devices and any(marked) and not marked[place])


def unmarked_note(facts: Sequence[RankFacts]) -> tuple[Note, ...]:
    """Return a note that names such ranks, if there are any."""
    ranks = ", ".join(str(facts[place].rank) for place in unmarked(facts))
    return (Note(f"left out of all steps: ranks that marked none though others did: {ranks}"),) if ranks else ()


def by_step(facts: Sequence[RankFacts], values: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return per-rank values ([its steps, ...]) as one array [ranks, steps, ...], 0 if a rank has no such step."""
    numbers = step_numbers(facts)
    shape = next((one.shape[1:] for one in values), ())
    out = np.zeros((len(facts), len(numbers), *shape), np.int64)
    without = unmarked(facts)
    for place, (one, mine) in enumerate(zip(facts, values, strict=True)):
        if one.devices and place not in without:
            np.add.at(out[place], np.searchsorted(numbers, one.devices[0].windows.numbers), mine)
    return out


def step_parts(facts: Sequence[RankFacts], aligned: Aligned) -> StepParts:
    """Split each step of each rank into parts: each nanosecond belongs to one part.

    Calls on several streams may overlap: transfer counts before waiting, and waiting before a bubble.

    >>> from meshwright.traces.job.across import across
    >>> from meshwright.traces.rank.facts import digest
    >>> from meshwright.traces.reading import read_trace
    >>> parts = across([digest(read_trace("tests/data/traces/hta/a100_ddp_resnet_2rank_rank0.json.gz"))]).parts
    >>> bool((sum(getattr(parts, name) for name in PARTS) == parts.length).all())
    True
    """
    split = [_exposed(one, aligned, place) for place, one in enumerate(facts)]
    nothing = np.empty(0, np.int64)

    def of(name: str) -> Ints:
        return by_step(facts, [getattr(one.devices[0].windows, name) if one.devices else nothing for one in facts])

    transfer, waiting, bubble = (by_step(facts, [parts[which] for parts in split]) for which in range(3))
    return StepParts(
        numbers=step_numbers(facts),
        length=of("lengths"),
        compute=of("compute"),
        transfer=transfer,
        waiting=waiting,
        bubble=bubble,
        copies=of("copies"),
        host_bound=of("host_bound"),
        idle=of("waiting"),
        hidden=of("hidden"),
    )


def _exposed(facts: RankFacts, aligned: Aligned, place: int) -> tuple[Ints, Ints, Ints]:
    """Return exposed transfer, waiting and bubble of each step of one rank."""
    calls = calls_of_rank(facts)
    if calls is None:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
    mine = slice(*aligned.matched.firsts[place : place + 2].tolist())
    edges = facts.devices[0].windows.edges + facts.base_ns
    arrives = calls.start + aligned.waiting[mine]
    late = arrives - aligned.bubble[mine]
    transfer = _alone(calls, edges, union(arrives, calls.end))
    late_too = _alone(calls, edges, union(np.concatenate([arrives, calls.start]), np.concatenate([calls.end, late])))
    whole = _alone(calls, edges, union(calls.start, calls.end))
    return transfer, late_too - transfer, whole - late_too


def _alone(calls: Calls, edges: Ints, merged: tuple[Ints, Ints]) -> Ints:
    """Return how much of disjoint intervals within calls falls into each step while nothing computes."""
    starts, ends = merged
    inner = edges[1:-1]
    cut = np.searchsorted(starts, inner, side="right") - 1
    through = inner[(cut >= 0) & (ends[np.maximum(cut, 0)] > inner)] if len(starts) else inner[:0]
    begins, stops = np.sort(np.append(starts, through)), np.sort(np.append(ends, through))
    begins, stops = np.maximum(begins, edges[0]), np.minimum(stops, edges[-1])
    keep = stops > begins
    begins, stops = begins[keep], stops[keep]
    alone = stops - begins - calls.computing(begins, stops)
    step = np.searchsorted(edges, begins, side="right") - 1
    return np.bincount(step, alone, minlength=len(edges) - 1).astype(np.int64)
