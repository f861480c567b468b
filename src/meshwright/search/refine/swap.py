"""Device-to-device swap (MPress): activations of full devices wait on others of the same pipeline.

Early stages of a pipeline hold more micro-batches than late ones. A group may need recompute or offload although
another has memory to spare. Its activations then go there over the links between devices. The slowest group is tried
with less recompute, and the least swap that lets it fit; faster steps stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec.structs import replace

from meshwright.cost.constants import Constants
from meshwright.cost.estimate import Estimate, estimate
from meshwright.cost.memory.device_memory import plan_memory
from meshwright.cost.runtime import Runtime
from meshwright.plans import Job, Plan, Span, Swap
from meshwright.plans.schedule import group_of_stage
from meshwright.plans.stored_estimate import StageMemory
from meshwright.search.refine.offload import group_numbers, with_spans
from meshwright.search.space.limits import Limits

Group = tuple[int, int]  # pipeline, device group
Level = Literal["none", "selective"]
_STEPS = 64  # fractions are multiples of 1 / 64
_ROUNDS = 8  # groups that are relieved, one after the other
_LEVELS: tuple[Level | None, ...] = ("none", "selective", None)  # None: keep its recompute
_WORTH = 0.05  # of a device's memory and time: what a group must have to spare, and another must spend, to try it


def swapped(
    job: Job, plan: Plan, runtime: Runtime, constants: Constants, limits: Limits | None = None
) -> tuple[float, Plan]:
    """Return the fastest plan found with swaps, and its seconds; else the plan itself."""
    limits = limits or Limits()
    levels = [level for level in _LEVELS if limits.keeps("recompute", level or "") or level is None]
    found = estimate(job, plan, runtime, constants)
    best = (found.step_seconds, plan)
    if len(found.memory) < 2:
        return best
    for _ in range(_ROUNDS):
        faster = None
        for other in _candidates(job, found, runtime, levels):
            priced = estimate(job, other, runtime, constants)
            if priced.fits and priced.step_seconds < best[0] * (1 - 1e-6):
                best, faster = (priced.step_seconds, other), priced
        if faster is None:
            break
        found = faster
    return best


def _candidates(job: Job, found: Estimate, runtime: Runtime, levels: list[Level | None]) -> Iterator[Plan]:
    """Yield plans with less recompute and no offload for the slowest group, and the least swap to one with room."""
    plan, groups = found.plan, list(group_numbers(found.plan))
    rows = dict(zip(groups, found.memory, strict=True))
    slowest = max(groups, key=lambda group: _seconds(found, group))
    if _saving(found, slowest) < _WORTH * _seconds(found, slowest):
        return
    others = [group for group in groups if group[0] == slowest[0] and group != slowest]
    target = max(others, key=lambda group: _free(rows[group]), default=None)
    if target is None or _free(rows[target]) < _WORTH * rows[target].capacity:
        return
    for recompute in levels:
        part = _least(job, plan, slowest, target, recompute, runtime)
        if part is not None:
            yield part


def _saving(found: Estimate, group: Group) -> float:
    """Return the seconds of a micro-batch that a group spends to save memory."""
    stages = found.pipelines[group[0]].stages
    spent = [stages[s].spent.items() for s in {s for s, _ in _held(found.plan, group)}]
    return sum(seconds for part in spent for (_, name), seconds in part if name in ("recompute", "offload"))


def _seconds(found: Estimate, group: Group) -> float:
    """Return the seconds of one micro-batch through all stages of a group."""
    stages = found.pipelines[group[0]].stages
    return sum(stages[s].forward + stages[s].backward for s in {s for s, _ in _held(found.plan, group)})


def _free(row: StageMemory) -> int:
    return row.capacity - row.total


def _held(plan: Plan, group: Group) -> Iterator[tuple[int, Span]]:
    pipeline = plan.pipelines[group[0]]
    for s, stage in enumerate(pipeline.stages):
        if group_of_stage(pipeline.schedule, len(pipeline.stages), s) == group[1]:
            yield from ((s, span) for span in stage.spans)


def _least(job: Job, plan: Plan, group: Group, target: Group, recompute: Level | None, runtime: Runtime) -> Plan | None:
    """Return by halving the least fraction that lets a group fit, if the target fits too.

    `None` keeps its recompute.
    """
    to = min(s for s, _ in _held(plan, target))
    at = list(group_numbers(plan)).index(group)

    def with_part(part: float) -> Plan:
        def change(where: Group, _: int, span: Span) -> Span:
            if where != group:
                return span
            level = span.recompute if recompute is None else recompute
            away = replace(span.offload, activations=0.0)
            swap = Swap(to=to, activations=part) if part else None
            return replace(span, recompute=level, offload=away, swap=swap)

        return with_spans(plan, change)

    low, high = -1, _STEPS
    if plan_memory(with_part(1.0), job, runtime)[at].short_by:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if plan_memory(with_part(middle / _STEPS), job, runtime)[at].short_by:
            low = middle
        else:
            high = middle
    found = with_part(high / _STEPS)
    rows = plan_memory(found, job, runtime)
    return None if any(row.short_by or row.host_short_by for row in rows) else found
