"""Pipelines: the stage of each rank, and the waits due to the order of stages, not to late ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.job.collectives.collectives import Aligned, with_waiting
from meshwright.traces.job.collectives.matching import (
    MESSAGES,
    RECV,
    SEND,
    SEND_RECV,
    Matched,
    column,
    numbers_of_steps,
)
from meshwright.traces.job.collectives.ordering import Ints, packed, runs
from meshwright.traces.rank.facts import RankFacts
from meshwright.traces.reading import NONE

PIPELINE = re.compile(r"pipeline|(?:^|[_\W])pp(?:$|[_\W\d])", re.IGNORECASE)
RING = re.compile(r"context|ring|sequence|(?:^|[_\W])[cs]p(?:$|[_\W\d])", re.IGNORECASE)  # rings pass data on


@dataclass(frozen=True)
class Pipeline:
    """Pipeline stages of a job's ranks."""

    stage: tuple[int | None, ...]  # of each rank, in the order of the job; None for ranks of no pipeline
    told_by: str  # "groups", "messages", or "" without a pipeline

    @property
    def stages(self) -> int:
        """Number of stages.

        >>> Pipeline((0, 0, 1, 1), "groups").stages
        2
        """
        return max((stage + 1 for stage in self.stage if stage is not None), default=0)


def pipeline(facts: Sequence[RankFacts], matched: Matched) -> Pipeline:
    """Find the stages: from groups named as pipelines, otherwise from the order of messages in a step."""
    stage = _by_groups(matched)
    if stage:
        return Pipeline(tuple(stage.get(rank) for rank in matched.ranks), "groups")
    stage = _by_messages(facts, matched)
    return Pipeline(tuple(stage.get(rank) for rank in matched.ranks), "messages" if stage else "")


def _by_groups(matched: Matched) -> dict[int, int]:
    """Return stages from pipeline groups, which list their ranks from the first stage to the last."""
    talks = np.zeros(len(matched.groups), np.bool_)
    talks[matched.group[matched.call[MESSAGES[matched.kind]]]] = True
    stage: dict[int, int] = {}
    for group, used in sorted(zip(matched.groups, talks, strict=True), key=lambda pair: -len(pair[0].ranks)):
        if used and PIPELINE.search(group.description):
            for place, rank in enumerate(group.ranks):
                stage.setdefault(rank, place)
    return stage


def _by_messages(facts: Sequence[RankFacts], matched: Matched) -> dict[int, int]:
    """Return stages from messages: the first stage starts a step by sending, all others by receiving."""
    rings = np.array([RING.search(group.description) is not None for group in matched.groups], np.bool_)
    peer, step = column(facts, "peer"), numbers_of_steps(facts)
    sends = matched.kind == SEND
    rows = np.flatnonzero((sends | (matched.kind == RECV)) & (peer != NONE))
    rows = rows[~rings[matched.group[matched.call[rows]]]]
    if not len(rows):
        return {}
    place = matched.place[rows]
    begin = rows[runs(packed(place, step[rows]))[1]]  # the first message of each rank and step: rows are sorted by time
    votes = np.bincount(matched.place[begin], np.where(sends[begin], 1, -1), minlength=len(matched.ranks))
    talking = set(place.tolist())
    level = {here: 0 for here in talking if votes[here] > 0}
    if not level or len(level) == len(talking):
        return {}
    begin = rows[runs(packed(place, peer[rows], step[rows]))[1]]
    onward: dict[tuple[int, int], int] = {}
    for here, other, sent in zip(
        matched.place[begin].tolist(), peer[begin].tolist(), sends[begin].tolist(), strict=True
    ):
        onward[here, other] = onward.get((here, other), 0) + (1 if sent else -1)
    where = {rank: here for here, rank in enumerate(matched.ranks)}
    front = sorted(level)
    for here in front:  # the list grows while it is iterated
        for (sender, other), vote in onward.items():
            there = where.get(other)
            if sender == here and vote > 0 and there is not None and there not in level:
                level[there] = level[here] + 1
                front.append(there)
    return {matched.ranks[here]: stage for here, stage in level.items()}


def with_bubbles(facts: Sequence[RankFacts], aligned: Aligned, found: Pipeline) -> Aligned:
    """Return the calls with the part of each wait that is a pipeline bubble.

    Waiting for a message of another stage is a bubble. If a collective joins stages, waiting for the last rank of the
    own stage is none, and the rest is. Exchanges with unknown peers are compared with the fastest of the same size: the
    excess is waiting.
    """
    matched, call = aligned.matched, aligned.matched.call
    stage = np.array([-1 if one is None else one for one in found.stage], np.int64)
    mine = stage[matched.place] if len(call) else call
    lowest, highest = np.full(len(matched.group), NONE), np.full(len(matched.group), NONE)
    np.maximum.at(highest, call, mine)
    np.maximum.at(lowest, call, -mine)
    joins = (highest != -lowest) & (-lowest >= 0) & aligned.split
    waiting, guessed = _guessed(facts, aligned)
    own_last = np.full(0 if not len(call) else int(packed(call, mine).max()) + 1, NONE)
    np.maximum.at(own_last, packed(call, mine), aligned.start)
    until = np.maximum(own_last[packed(call, mine)], aligned.start) if len(call) else aligned.start
    after = np.clip(aligned.start + aligned.waiting - until, 0, aligned.waiting)
    bubble = np.where(joins[call], np.where(matched.message[call], aligned.waiting, after), 0)
    pipes = np.array([PIPELINE.search(group.description) is not None for group in matched.groups], np.bool_)
    bubble = np.where(guessed & pipes[matched.group[call]], waiting, bubble)
    return with_waiting(facts, aligned, waiting, bubble)


def _guessed(facts: Sequence[RankFacts], aligned: Aligned) -> tuple[Ints, NDArray[np.bool_]]:
    """Return waiting with the excess of exchanges with unknown peers over the fastest of equal group, kind and size."""
    matched = aligned.matched
    rows = np.flatnonzero((matched.kind == SEND_RECV) & ~aligned.split[matched.call])
    guessed = np.zeros(len(matched.call), np.bool_)
    if not len(rows):
        return aligned.waiting, guessed
    labels = [group.description or group.name for group in matched.groups]
    label = np.unique(labels, return_inverse=True)[1].reshape(-1)[matched.group[matched.call[rows]]]
    took = aligned.end[rows] - aligned.start[rows]
    key = runs(packed(label, column(facts, "bytes")[rows]))[0]
    least = np.full(int(key.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, key, took)
    waiting = aligned.waiting.copy()
    waiting[rows] = took - least[key]
    guessed[rows] = True
    return waiting, guessed
