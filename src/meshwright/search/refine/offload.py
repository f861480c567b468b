"""Reduce offload to what memory requires: the smallest fractions that still fit.

The search offloads nothing or everything. In between, a device updates part of its optimizer states itself, or moves
only part of its activations, so that more of the transfer overlaps with computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil

from msgspec.structs import replace

from meshwright.cost.constants import Constants
from meshwright.cost.estimate import estimate
from meshwright.cost.memory.device_memory import plan_memory
from meshwright.cost.runtime import Runtime
from meshwright.plans import Job, Pipeline, Plan, Span, Stage
from meshwright.plans.schedule import group_of_stage
from meshwright.search.bounds.memory_fit import STEPS

Group = tuple[int, int]  # pipeline, device group
_ORDERS = (("activations", "parameters", "optimizer"), ("optimizer", "parameters", "activations"))


def trimmed(
    job: Job, plan: Plan, seconds: float, runtime: Runtime, constants: Constants, *, known: bool = False
) -> tuple[float, Plan]:
    """Return the fastest plan found with smaller offloaded fractions, and its seconds; else the plan itself.

    `known`: the optimizer states' fraction is already the least that the rest requires.
    """
    best = (seconds, plan)
    used = {name for name in _ORDERS[0] for _, span in spans_with_groups(plan) if getattr(span.offload, name) > 0}
    if known and used == {"optimizer"}:
        return best
    for order in _ORDERS[: 1 if known or len(used) == 1 else 2]:
        other = plan
        for name in order:
            other = _least(job, other, name, runtime)
        if other != plan:
            found = estimate(job, other, runtime, constants)
            if found.fits and found.step_seconds < best[0]:
                best = (found.step_seconds, other)
    return best


def _least(job: Job, plan: Plan, name: str, runtime: Runtime) -> Plan:
    """Return a plan whose device groups offload as little of one kind of tensors as fits.

    Bytes grow almost in proportion to the fraction. The line between two fractions meets the device's memory near the
    least one.
    """
    groups = list(group_numbers(plan))
    used = {group for group, span in spans_with_groups(plan) if getattr(span.offload, name) > 0}
    if not used:
        return plan

    def beyond(fractions: dict[Group, int]) -> dict[Group, float]:
        """Return the bytes that each group exceeds its memory by; positive where it does not fit."""
        rows = plan_memory(_scaled(plan, name, {g: fractions[g] / STEPS for g in used}), job, runtime)
        over = [row.host_short_by or (row.short_by or row.total - row.capacity) for row in rows]
        return dict(zip(groups, over, strict=True))

    low, high = dict.fromkeys(groups, 0), dict.fromkeys(groups, STEPS)
    short, spare = beyond(low), beyond(high)
    for g in groups:
        if short[g] <= 0:
            high[g] = 0
    while any(high[g] - low[g] > 1 for g in used):
        middle = {g: _between(low[g], high[g], short[g], spare[g]) for g in groups}
        for g, over in beyond(middle).items():
            if over > 0:
                low[g], short[g] = middle[g], over
            else:
                high[g], spare[g] = middle[g], over
    return _scaled(plan, name, {g: high[g] / STEPS for g in used})


def _between(low: int, high: int, short: float, spare: float) -> int:
    """Return the first number at which a line from `short` at one to `spare` at the other is not above zero."""
    if high - low <= 1:
        return high
    reached = ceil((high - low) * short / max(short - spare, 1.0))
    return min(max(low + reached, low + 1), high - 1)


def _scaled(plan: Plan, name: str, fractions: dict[Group, float]) -> Plan:
    def scale(span: Span, part: float) -> Span:
        return replace(span, offload=replace(span.offload, **{name: getattr(span.offload, name) * part}))

    return with_spans(plan, lambda group, _, span: scale(span, fractions[group]) if group in fractions else span)


def group_numbers(plan: Plan) -> Iterator[Group]:
    """Yield (pipeline, device group) in the order of `plan_memory`."""
    for p, pipeline in enumerate(plan.pipelines):
        for group in range(len(pipeline.stages) // pipeline.schedule.virtual):
            yield p, group


def with_spans(plan: Plan, change: Callable[[Group, int, Span], Span]) -> Plan:
    """Return a plan with changed spans; `change` gets the pipeline and device group, the stage, and the span."""

    def stage(p: int, pipeline: Pipeline, s: int, one: Stage) -> Stage:
        group = (p, group_of_stage(pipeline.schedule, len(pipeline.stages), s))
        return replace(one, spans=tuple(change(group, s, span) for span in one.spans))

    pipelines = tuple(
        replace(pipeline, stages=tuple(stage(p, pipeline, s, one) for s, one in enumerate(pipeline.stages)))
        for p, pipeline in enumerate(plan.pipelines)
    )
    return replace(plan, pipelines=pipelines)


def spans_with_groups(plan: Plan) -> Iterator[tuple[Group, Span]]:
    """Yield every span with its pipeline and device group."""
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for span in stage.spans:
                yield (p, group_of_stage(pipeline.schedule, len(pipeline.stages), s)), span
