"""Convert between a plan and a uniform one: partly recomputed stages, and devices in Megatron's order."""

from __future__ import annotations

from dataclasses import replace as replaced
from typing import Any

import msgspec

from meshwright.frameworks.megatron.recompute import Repeated, operators_of
from meshwright.frameworks.shared.uniform_plan import Uniform, plan_of
from meshwright.models import Model
from meshwright.plans import Job, Plan
from meshwright.plans.document import Stage
from meshwright.plans.spans import device_text, layer_range, span_name
from meshwright.plans.strategy import Span


def joined(job: Job, plan: Plan) -> tuple[Plan, int | None]:
    """Return the plan with one span per stage, if spans differ only in their recompute, as Megatron expresses it.

    Also return how many blocks of each stage recompute everything, if that is the difference. Operators that some spans
    lack do not count as a difference.
    """
    if len(plan.pipelines) != 1:
        return plan, None
    (pipeline,) = plan.pipelines
    stages = [_one_span(job.model, stage) for stage in pipeline.stages]
    if not all(stages):
        return plan, None
    spans = [span for stage in pipeline.stages for span in stage.spans]
    rows = [_of_blocks(job.model, stage) for stage in pipeline.stages]
    count = _leading(rows)
    what: Any = "full" if count else _level(rows) or _same_operators(job.model, spans)
    if what is None:
        return plan, None
    made = [
        msgspec.structs.replace(stage, spans=(msgspec.structs.replace(span, recompute=what),))
        for stage, span in zip(pipeline.stages, stages, strict=True)
        if span is not None
    ]
    whole = msgspec.structs.replace(pipeline, stages=tuple(made))
    return msgspec.structs.replace(plan, pipelines=(whole,)), count


def _one_span(model: Model, stage: Stage) -> Span | None:
    first, last = stage.spans[0], stage.spans[-1]
    alike = {msgspec.structs.replace(span, layers="", recompute="none") for span in stage.spans}
    if len(alike) > 1:
        return None
    layers = range(layer_range(model, first.layers).start, layer_range(model, last.layers).stop)
    return msgspec.structs.replace(first, layers=span_name(model, layers))


def _level(rows: list[list[Any]]) -> str:
    """Return the recompute of all blocks, for any ends of the model: Megatron recomputes blocks only."""
    said = {what for row in rows for what in row}
    return next(iter(said)) if len(said) == 1 and said <= {"none", "full"} else ""


def _leading(rows: list[list[Any]]) -> int | None:
    """Return the blocks at the start of each stage that recompute everything, if the others recompute nothing."""
    if not all(set(row) <= {"none", "full"} for row in rows):
        return None
    counts = [row.index("none") if "none" in row else len(row) for row in rows]
    most = max(counts)
    fits = all(
        count == min(most, len(row)) and "full" not in row[count:] for row, count in zip(rows, counts, strict=True)
    )
    return most if fits and most > 0 and any("none" in row for row in rows) else None


def _of_blocks(model: Model, stage: Stage) -> list[Any]:
    """Return the recompute of each whole block of a stage; "mixed" if it has several."""
    found: dict[str, set[Any]] = {}
    for span in stage.spans:
        for i in layer_range(model, span.layers):
            if model.layers[i].block:
                found.setdefault(model.layers[i].block, set()).add(span.recompute)
    return [next(iter(said)) if len(said) == 1 else "mixed" for said in found.values()]


def _same_operators(model: Model, spans: list[Span]) -> Any:
    """Return one choice that fits the recompute of every span, or None."""
    said = {span.recompute for span in spans}
    if len(said) == 1:
        return spans[0].recompute
    names = {name for choice in said if not isinstance(choice, str) for name in choice}
    if any(choice in {"selective", "full"} for choice in said):
        return None
    for span in spans:
        layers = [model.layers[i] for i in layer_range(model, span.layers)]
        there = {name for layer in layers for name in layer.op_names}
        mine = set() if span.recompute == "none" else set(span.recompute)
        if mine != names & there:
            return None
    return tuple(sorted(names & operators_of(model, tuple(names))))


def meant(job: Job, uniform: Uniform, repeated: Repeated, *, mapped: bool) -> Plan:
    """Return the plan that the arguments mean."""
    what: Any = repeated.what if isinstance(repeated.what, str) else tuple(repeated.what)
    strategy = msgspec.structs.replace(uniform.strategy, recompute=what)
    plan = plan_of(job, replaced(uniform, strategy=strategy))
    (pipeline,) = plan.pipelines
    stages = pipeline.stages
    if mapped:
        devices = mapped_devices(uniform)
        stages = tuple(
            msgspec.structs.replace(stage, devices=devices[i % uniform.groups]) for i, stage in enumerate(stages)
        )
    if repeated.what == "full" and repeated.blocks is not None:
        stages = tuple(_cut_after(job.model, stage, repeated.blocks) for stage in stages)
    if stages == pipeline.stages:
        return plan
    changed = msgspec.structs.replace(pipeline, stages=stages)
    return Plan.of(msgspec.structs.replace(plan, pipelines=(changed,)).to_table())


def _cut_after(model: Model, stage: Stage, blocks: int) -> Stage:
    """Return a stage whose first blocks recompute everything, and the rest nothing."""
    (span,) = stage.spans
    layers = layer_range(model, span.layers)
    seen: list[str] = []
    for i in layers:
        block = model.layers[i].block
        if block and block not in seen:
            seen.append(block)
        if len(seen) > blocks or (seen and not block and len(seen) == blocks):
            first, rest = range(layers.start, i), range(i, layers.stop)
            full = msgspec.structs.replace(span, layers=span_name(model, first))
            none = msgspec.structs.replace(span, layers=span_name(model, rest), recompute="none")
            return msgspec.structs.replace(stage, spans=(full, none))
    return stage


def mapped_devices(uniform: Uniform) -> list[str]:
    """Return the devices of each group if pipelines lie inside replicas (`--use-tp-pp-dp-mapping`)."""
    strategy, groups = uniform.strategy, uniform.groups
    inner = strategy.tp * strategy.ulysses * strategy.ring
    return [
        device_text([d * groups * inner + g * inner + i for d in range(strategy.dp) for i in range(inner)])
        for g in range(groups)
    ]


def is_mapped(plan: Plan, uniform: Uniform, missing: list[str]) -> bool:
    """Return True if the plan has this device layout; any layout other than the two is lost."""
    (pipeline,) = plan.pipelines
    groups, size = uniform.groups, uniform.strategy.devices
    found = [pipeline.stages[g].ranks for g in range(min(groups, len(pipeline.stages)))]
    if found == [tuple(range(g * size, (g + 1) * size)) for g in range(groups)]:
        return False
    theirs = [device_text(list(ranks)) for ranks in found]
    if theirs == mapped_devices(uniform):
        return True
    missing.append(f"devices: stages lie on devices in order, {size} each, from the first")
    return False
