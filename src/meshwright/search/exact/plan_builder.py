"""Build the plan document of a search result."""

from __future__ import annotations

from msgspec.structs import replace

from meshwright.models import Model
from meshwright.models.layer import RecomputeLevel
from meshwright.plans import Job, Pipeline, Plan, Span, Stage
from meshwright.plans.schedule import group_of_stage
from meshwright.plans.spans import device_text, span_name
from meshwright.search.bounds.memory_fit import Range
from meshwright.search.bounds.pipeline_shapes import Found
from meshwright.search.space.activation_modes import Mode
from meshwright.search.space.candidates import Choices


def plan_of(job: Job, found: Found, modes: list[Mode], start: int = 0) -> Plan:
    """Return the document of a candidate whose first device has the number `start`."""
    shape = found.shape
    stages = []
    for s in range(shape.stages):
        group = group_of_stage(shape.schedule, shape.stages, s)
        first = start + group * shape.devices
        spans = _spans(job.model, found, modes, s, group)
        devices = device_text(list(range(first, first + shape.devices)))
        stages.append(Stage(devices=devices, spans=spans))
    pipeline = Pipeline(
        batch=job.global_batch, micro_batches=shape.micro_batches, stages=tuple(stages), schedule=shape.schedule
    )
    return Plan(job=job.written(), pipelines=(pipeline,))


def _spans(model: Model, found: Found, modes: list[Mode], stage: int, group: int) -> tuple[Span, ...]:
    where = (found.cuts[stage], found.cuts[stage + 1])
    choices, row = found.table.choices, found.row
    away = found.away[group] if found.table.movable[:, row].any() else float(choices.optimizer_away[row])
    return stage_spans(model, choices, row, modes, found.modes[group], where, away)


def stage_spans(
    model: Model, choices: Choices, row: int, modes: list[Mode], chosen: tuple[int, int, int], where: Range, away: float
) -> tuple[Span, ...]:
    """Return the spans of one stage.

    A stage has one choice for all its layers, two modes (the second begins at some layer), and an offloaded part of its
    optimizer states.
    """
    low, high = where
    first, second, split = chosen
    middle = min(max(split, low), high)
    spans = []
    for start, end, mode in ((low, middle, modes[first]), (middle, high, modes[second])):
        if end > start:
            span = choices.span(row, span_name(model, range(start, end)))
            recompute = repeated(model, range(start, end), mode)
            offload = replace(span.offload, activations=mode.offload, optimizer=away)
            spans.append(replace(span, recompute=recompute, offload=offload))
    if len(spans) == 2 and replace(spans[0], layers="") == replace(spans[1], layers=""):
        return (replace(spans[0], layers=span_name(model, range(low, high))),)
    return tuple(spans)


def repeated(model: Model, layers: range, mode: Mode) -> RecomputeLevel | tuple[str, ...]:
    """Return the operators of a mode that these layers have."""
    if isinstance(mode.recompute, str):
        return mode.recompute  # type: ignore[return-value]
    have = frozenset().union(*(model.layers[i].op_names for i in layers))
    return tuple(sorted(have.intersection(mode.recompute))) or "none"
