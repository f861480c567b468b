"""Bytes per device of any plan: model states exactly, activations from the operators of `model/`.

States follow ZeRO (Rajbhandari et al., 2020): level 1 shards the optimizer's, 2 the gradients too, 3 the
parameters too, over all replicas or over groups of them. Activations are what the schedule keeps in
flight. Allocator overhead and communication buffers are not in here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from meshwright.errors import DoesNotFit
from meshwright.model import Layer, Slice, precision
from meshwright.plan import OPTIMIZERS, Job, Pipeline, Plan, Span, Stage, group_of_stage, in_flight
from meshwright.plan.estimate import StageMemory
from meshwright.plan.spans import layer_range
from meshwright.units import size


@dataclass(frozen=True)
class States:
    """Bytes of model states on one device."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0

    def __add__(self, other: States) -> States:
        return States(
            self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer
        )


def plan_memory(plan: Plan, job: Job | None = None) -> list[StageMemory]:
    """Memory of each device group, pipeline by pipeline.

    >>> table = {"model": "llama3-8b", "cluster": "8xh100", "global_batch": 8, "seq_len": 4096, "zero": 3}
    >>> memory = plan_memory(Plan.of(table))[0]
    >>> memory.parameters * 8 == memory.parameters * 8 and memory.short_by
    0
    """
    job = job or plan.resolve()
    found = []
    for pipeline in plan.pipelines:
        groups = len(pipeline.stages) // pipeline.schedule.virtual
        found += [_group_memory(job, pipeline, group, groups) for group in range(groups)]
    return found


def fits(memory: list[StageMemory]) -> None:
    """Raise `DoesNotFit`, naming the group that is shortest of memory and what fills it."""
    worst = max(memory, key=lambda m: m.short_by)
    if worst.short_by:
        parts = {
            name: getattr(worst, name) for name in ("parameters", "gradients", "optimizer", "activations", "working")
        }
        largest = max(parts, key=lambda name: parts[name])
        problem = (
            f"does not fit: devices {worst.devices} need {size(worst.total)} of {size(worst.capacity)}, "
            f"short by {size(worst.short_by)}; most of it is {largest} ({size(parts[largest])})"
        )
        raise DoesNotFit(problem, short_by_bytes=worst.short_by)


def _group_memory(job: Job, pipeline: Pipeline, group: int, groups: int) -> StageMemory:
    """All stages of one device group together: their states, and the activations of what is in flight."""
    mine = [
        s for s in range(len(pipeline.stages)) if group_of_stage(pipeline.schedule, len(pipeline.stages), s) == group
    ]
    flight = in_flight(pipeline.schedule, groups, pipeline.micro_batches, group)
    states, activations, working = States(), 0.0, 0.0
    held = {layer.name for s in mine for layer in _stage_layers(job, pipeline.stages[s])}
    for stage, in_flight_here in zip((pipeline.stages[s] for s in mine), flight, strict=True):
        for span in stage.spans:
            states += _states(job, span, held)
        activations += in_flight_here * _kept(job, pipeline, stage)
        working = max(working, _working(job, pipeline, stage))
    stage = pipeline.stages[mine[0]]
    capacity = min(device.memory for device in job.cluster.kinds(stage.ranks))
    return StageMemory(
        devices=stage.devices, capacity=capacity, parameters=round(states.parameters), gradients=round(states.gradients),
        optimizer=round(states.optimizer), activations=round(activations), working=round(working),
    )  # fmt: skip


def _span_layers(job: Job, span: Span) -> tuple[Layer, ...]:
    found = layer_range(job.model, span.layers)
    return job.model.layers[found.start : found.stop]


def _stage_layers(job: Job, stage: Stage) -> list[Layer]:
    return [layer for span in stage.spans for layer in _span_layers(job, span)]


def _states(job: Job, span: Span, held: set[str]) -> States:
    """Parameters, gradients and optimizer states of a span; a tied head far from its embedding holds a copy."""
    cut = span.slice_of(span.dp, job.seq_len, job.precision)
    p, extra = precision(job.precision), OPTIMIZERS[job.optimizer]
    dense = experts = 0
    for layer in _span_layers(job, span):
        copied = bool(layer.tied_to) and layer.tied_to not in held
        own_experts = layer.expert_parameters_on(cut)
        experts += own_experts
        dense += layer.parameters_on(cut, with_tied=copied) - own_experts
    total = States()
    for count, replicas in ((dense, span.replicas), (experts, span.expert_replicas)):
        shards = min(span.zero_group or replicas, replicas)
        total += States(
            count * p.parameter / (shards if span.zero >= 3 else 1) * (1 - span.offload.parameters),
            count * p.gradient / (shards if span.zero >= 2 else 1),
            count * (p.master + extra) / (shards if span.zero >= 1 else 1) * (1 - span.offload.optimizer),
        )
    return total


@lru_cache(maxsize=100_000)
def _layer_kept(layer: Layer, cut: Slice, recompute: str | tuple[str, ...]) -> float:
    return layer.kept_bytes(cut, recompute)


def _kept(job: Job, pipeline: Pipeline, stage: Stage) -> float:
    """Activation bytes one micro-batch leaves on a device of the stage."""
    kept, first = 0.0, True
    for span in stage.spans:
        cut = span.slice_of(pipeline.samples, job.seq_len, job.precision)
        here = 0.0
        for layer in _span_layers(job, span):
            here += _layer_kept(layer, cut, span.recompute)
            if first and span.recompute == "full" and not layer.opens_block:
                here += layer.input_bytes(cut)  # a stage that begins inside a block keeps what it received
            first = False
        away = span.offload.activations + (span.swap.activations if span.swap else 0.0)
        kept += here * max(1 - away, 0.0)
    return kept


def _working(job: Job, pipeline: Pipeline, stage: Stage) -> float:
    """The largest block while it runs: its recomputed activations, and its gathered weights under ZeRO-3."""
    largest = 0.0
    for span in stage.spans:
        cut = span.slice_of(pipeline.samples, job.seq_len, job.precision)
        for _, layers in groupby(_span_layers(job, span), key=lambda layer: layer.block or layer.name):
            block = list(layers)
            again = sum(_layer_kept(layer, cut, "none") - _layer_kept(layer, cut, span.recompute) for layer in block)
            gathered = sum(layer.parameters_on(cut) for layer in block) * precision(job.precision).parameter
            largest = max(largest, max(again, 0.0) + (2 * gathered if span.zero == 3 else 0.0))
    return largest
