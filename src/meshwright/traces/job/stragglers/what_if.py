"""Simulate a step of a pipelined, data-parallel job as if operations had taken as long as they should.

The method is that of "Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin and others, OSDI
2025). An operation starts when those before it on its worker have ended. A collective or message transfers its data
once all its ranks have started. Everything else keeps its order. Times are seconds; arrays are [operations,
data-parallel ranks, steps].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError

Floats = NDArray[np.float64]
FORWARD, BACKWARD = "forward-compute", "backward-compute"
MESSAGES = {"forward-send": ("forward-recv", 1), "backward-send": ("backward-recv", -1)}
GATHER, SCATTER, CLIP, EMBEDDING = (
    "params-all-gather",
    "grads-reduce-scatter",
    "optimizer-clip-main-grad",
    "embedding-grads-all-reduce",
)
AFTER = ("gc", "layernorm-grads-all-reduce", EMBEDDING, SCATTER, CLIP, "optimizer")  # after all backward passes
COMPUTES = (FORWARD, BACKWARD, "gc", "optimizer")
KINDS = {*COMPUTES, *MESSAGES, *(other for other, _ in MESSAGES.values()), GATHER, *AFTER}
WRONG_ORDER = 0.01  # seconds: a transfer that ends this long before all have started was none


@dataclass(frozen=True, order=True)
class Operation:
    """Operation of a step, the same for every data-parallel rank."""

    kind: str
    turn: int  # index among its kind on its stage
    stage: int


@dataclass(frozen=True, eq=False)
class Program:
    """Operations with their dependencies, and groups that end together."""

    operations: tuple[Operation, ...]
    after: tuple[tuple[int, ...], ...]  # of each operation: those that must have ended before it starts
    nodes: tuple[tuple[int, ...], ...]  # groups of operations that end together, in topological order
    meets: NDArray[np.bool_]  # of each node: True if it moves data between workers
    joint: NDArray[np.bool_]  # of each node: True if all data-parallel ranks take part in one


def program(first: Mapping[Operation, float]) -> Program:
    """Build the program of a step from the start of each operation on one data-parallel rank."""
    strange = sorted({operation.kind for operation in first} - KINDS)
    if strange:
        raise InputError(f"unknown kind of operation {strange[0]!r}", field="optype", valid=", ".join(sorted(KINDS)))
    stages = max(operation.stage for operation in first) + 1
    for kind, stage in ((kind, stage) for kind in (FORWARD, BACKWARD) for stage in range(stages)):
        if Operation(kind, 0, stage) not in first:
            raise InputError(f"has no {kind} of stage {stage}", field="optype", valid="both on every stage")
    after: dict[Operation, set[Operation]] = {operation: set() for operation in first}
    for stage in range(stages):
        for before, then in _on_stage(first, stage):
            after[then].add(before)
    groups = _groups(first, stages)
    numbers = {operation: number for number, operation in enumerate(sorted(first))}
    nodes = _ordered(after, groups)
    moves = {operation for group in groups for operation in group}
    whole = {GATHER, SCATTER, CLIP}
    return Program(
        operations=tuple(numbers),
        after=tuple(tuple(sorted(numbers[before] for before in after[operation])) for operation in numbers),
        nodes=tuple(tuple(numbers[operation] for operation in node) for node in nodes),
        meets=np.array([node[0] in moves for node in nodes]),
        joint=np.array([node[0].kind in whole for node in nodes]),
    )


def _on_stage(first: Mapping[Operation, float], stage: int) -> Iterable[tuple[Operation, Operation]]:
    """Yield pairs of operations of a stage, of which the second must wait for the first."""
    mine = sorted((one for one in first if one.stage == stage), key=lambda one: (first[one], one.turn, one.kind))
    kinds: dict[str, list[Operation]] = {}
    for one in sorted(mine, key=lambda one: one.turn):
        kinds.setdefault(one.kind, []).append(one)
    compute = [one for one in mine if one.kind in (FORWARD, BACKWARD)]
    chains = [compute, *(kinds.get(kind, []) for pair in MESSAGES.items() for kind in (pair[0], pair[1][0]))]
    chains.append([*kinds.get(GATHER, []), *kinds.get(SCATTER, [])])
    chains.append([*compute[-1:], *(one for kind in AFTER for one in kinds.get(kind, []))])
    for chain in chains:
        yield from pairwise(chain)
    for sends, (receives, _) in MESSAGES.items():
        computing = kinds[FORWARD if sends.startswith("forward") else BACKWARD]
        yield from zip(computing, kinds.get(sends, []), strict=False)
        yield from zip(kinds.get(receives, []), computing, strict=False)
        yield from zip(computing, kinds.get(receives, [])[1:], strict=False)
    if GATHER in kinds:
        yield kinds[GATHER][-1], kinds[FORWARD][0]
    # Gradients are awaited from the second-last forward pass on: what comes before it is still to be sent.
    lead = next(place for place, one in enumerate(compute) if one.kind == BACKWARD)
    if lead >= 2:
        for kind in ("backward-recv", "backward-send"):
            yield from ((compute[lead - 2], one) for one in kinds.get(kind, [])[:1])


def _groups(first: Mapping[Operation, float], stages: int) -> list[list[Operation]]:
    """Return operations of different stages that are one message or collective, and collectives of data-parallel ranks."""
    groups = []
    for one in first:
        if one.kind in MESSAGES:
            kind, way = MESSAGES[one.kind]
            groups.append([one, Operation(kind, one.turn, one.stage + way)])
        elif one.kind in (GATHER, SCATTER):
            groups.append([one])
    for kind, members in ((EMBEDDING, sorted({0, stages - 1})), (CLIP, range(stages))):
        groups.append([Operation(kind, 0, stage) for stage in members if Operation(kind, 0, stage) in first])
    lonely = [one for group in groups for one in group if one not in first]
    if lonely:
        raise InputError(f"{lonely[0].kind} {lonely[0].turn} of stage {lonely[0].stage} is missing", field="optype")
    return [group for group in groups if group]


def _ordered(after: Mapping[Operation, set[Operation]], groups: list[list[Operation]]) -> list[tuple[Operation, ...]]:
    """Return nodes in topological order."""
    node_of = {one: tuple(group) for group in groups for one in group}
    node_of |= {one: (one,) for one in after if one not in node_of}
    waits = {node: {node_of[before] for one in node for before in after[one]} for node in node_of.values()}
    follows: dict[tuple[Operation, ...], list[tuple[Operation, ...]]] = {}
    for node, befores in waits.items():
        for before in befores:
            follows.setdefault(before, []).append(node)
    ready = sorted(node for node, befores in waits.items() if not befores)
    for node in ready:  # the list grows while it is iterated
        for later in follows.get(node, ()):
            waits[later].discard(node)
            if not waits[later]:
                ready.append(later)
    if len(ready) != len(waits):
        raise InputError("operations wait for each other in a circle", field="start_ts")
    return ready


def transfers(program: Program, starts: Floats, ends: Floats) -> Floats:
    """Return the duration of each operation once it can run: transfers count from when all ranks have started."""
    took = ends - starts
    for node, meets, joint in zip(program.nodes, program.meets, program.joint, strict=True):
        if meets:
            took[list(node)] = ends[list(node)] - _begun(starts[list(node)], bool(joint))
    took[took <= -WRONG_ORDER] = 0.0
    return took


def simulate(program: Program, took: Floats) -> Floats:
    """Return the seconds of each step, [steps], for given durations of operations."""
    ends = np.zeros_like(took)
    for node, meets, joint in zip(program.nodes, program.meets, program.joint, strict=True):
        members = list(node)
        starts = np.stack([ends[list(program.after[one])].max(axis=0, initial=0.0) for one in members])
        ends[members] = (_begun(starts, bool(joint)) if meets else starts) + took[members]
    lengths: Floats = ends.max(axis=(0, 1))
    return lengths


def _begun(starts: Floats, joint: bool) -> Floats:
    latest: Floats = starts.max(axis=0)
    return np.broadcast_to(latest.max(axis=0), latest.shape) if joint else latest


def ideal(program: Program, took: Floats) -> Floats:
    """Return ideal durations: of each kind the mean of computing, and the median of transfers."""
    out = np.empty_like(took)
    kinds = np.array([one.kind for one in program.operations])
    for kind in np.unique(kinds):
        same = kinds == kind
        out[same] = took[same].mean() if kind in COMPUTES else np.median(took[same])
    return out


@dataclass(frozen=True, eq=False)
class WhatIf:
    """Steps as recorded, ideal, and anything between."""

    program: Program
    took: Floats
    even: Floats
    now: float  # seconds of the mean step as recorded, without delays of hosts
    best: float

    def only(self, chosen: Any) -> float:
        """Return the slow-down if all but the chosen operations were ideal."""
        changed = self.even.copy()
        changed[chosen] = self.took[chosen]
        return float(simulate(self.program, changed).mean()) / self.best

    def without(self, chosen: Any) -> float:
        """Return the share of the slow-down that vanishes if the chosen operations are ideal."""
        changed = self.took.copy()
        changed[chosen] = self.even[chosen]
        gained = self.now - float(simulate(self.program, changed).mean())
        return gained / (self.now - self.best) if self.now != self.best else 0.0


def what_if(program: Program, starts: Floats, ends: Floats) -> WhatIf:
    """Return the what-if analysis of a recorded job."""
    took = transfers(program, starts, ends)
    even = ideal(program, took)
    now, best = (float(simulate(program, one).mean()) for one in (took, even))
    return WhatIf(program, took, even, now, best)
