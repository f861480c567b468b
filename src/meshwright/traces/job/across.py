"""All ranks of a job side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.traces.job.collective_table import CollectiveRow, collective_table
from meshwright.traces.job.collectives.clocks import Clocks, clocks
from meshwright.traces.job.collectives.collectives import Aligned, align
from meshwright.traces.job.collectives.matching import match
from meshwright.traces.job.pipeline_bubble import Pipeline, pipeline, with_bubbles
from meshwright.traces.job.steps import StepParts, step_parts, unmarked_note
from meshwright.traces.rank.facts import RankFacts


@dataclass(frozen=True, eq=False)
class Across:
    """Result of comparing the ranks' calls. Arrays of ranks are in the order of `ranks`."""

    ranks: tuple[int, ...]
    clocks: Clocks
    pipeline: Pipeline
    aligned: Aligned
    parts: StepParts
    table: tuple[CollectiveRow, ...]


def across(facts: Sequence[RankFacts]) -> Across:
    """Match the calls of ranks, align their clocks, and separate waiting, transfer and bubbles.

    >>> across([]).ranks
    ()
    """
    matched = match(facts)
    clock = clocks(facts, matched)
    stages = pipeline(facts, matched)
    aligned = with_bubbles(facts, align(facts, matched, clock), stages)
    aligned = replace(aligned, notes=aligned.notes + unmarked_note(facts))
    return Across(matched.ranks, clock, stages, aligned, step_parts(facts, aligned), collective_table(facts, aligned))
