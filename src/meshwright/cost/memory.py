"""Bytes per device of any plan: model states exactly, activations from the operators of `model/`.

States follow ZeRO (Rajbhandari et al., 2020): level 1 shards the optimizer's, 2 the gradients too, 3 the
parameters too, over all replicas or over groups of them. Activations are what the schedule keeps in
flight. Allocator overhead and communication buffers are not in here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from meshwright.errors import DoesNotFit
from meshwright.model import Layer, Slice, precision
from meshwright.plan import OPTIMIZERS, Job, Pipeline, Plan, Span, Stage, group_of_stage, in_flight
from meshwright.plan.estimate import StageMemory
from meshwright.plan.spans import layers_of
from meshwright.units import size


def plan_memory(plan: Plan, job: Job | None = None) -> list[StageMemory]:
    """Memory of each device group, pipeline by pipeline.

    >>> table = {"model": "llama3-8b", "cluster": "8xh100", "global_batch": 8, "seq_len": 4096, "zero": 3}
    >>> memory = plan_memory(Plan.of(table))[0]
    >>> memory.parameters == 2 * 8030261248 // 8, memory.short_by
    (True, 0)
    """
    job = job or plan.resolve()
    found = []
    for pipeline in plan.pipelines:
        groups = len(pipeline.stages) // pipeline.schedule.virtual
        found += [_fullest_device(job, pipeline, group, groups) for group in range(groups)]
    return found


def fits(memory: list[StageMemory]) -> None:
    """Raise `DoesNotFit`, naming the group that is shortest of memory and what fills it."""
    worst = max(memory, key=lambda m: max(m.short_by, m.host_short_by))
    if worst.host_short_by > worst.short_by:
        needs = f"{size(worst.host)} of host memory, their part is {size(worst.host_capacity)}"
        problem = f"does not fit: devices {worst.devices} offload {needs}, short by {size(worst.host_short_by)} each"
        raise DoesNotFit(problem, short_by_bytes=worst.host_short_by)
    if worst.short_by:
        names = ("parameters", "gradients", "optimizer", "activations", "swapped_in", "working")
        largest = max(names, key=lambda name: int(getattr(worst, name)))
        problem = (
            f"does not fit: devices {worst.devices} need {size(worst.total)} of {size(worst.capacity)}, "
            f"short by {size(worst.short_by)}; most of it is {largest} ({size(getattr(worst, largest))})"
        )
        raise DoesNotFit(problem, short_by_bytes=worst.short_by)


@dataclass(frozen=True)
class Bytes:
    """What one device holds, and what it has moved to the host."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    host: float = 0.0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(
            self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer,
            self.activations + other.activations, self.host + other.host,
        )  # fmt: skip


def _fullest_device(job: Job, pipeline: Pipeline, group: int, groups: int) -> StageMemory:
    """Replicas may take different shares on different devices: the one that is fullest for its size."""
    stages = _stages_of(pipeline, group)
    kinds = dict.fromkeys(_kinds_of_devices(job, pipeline.stages[stages[0]]))
    rows = [_device_memory(job, pipeline, group, groups, *kind) for kind in kinds]
    return max(rows, key=lambda row: row.total / row.capacity)


def _kinds_of_devices(job: Job, stage: Stage) -> Iterator[tuple[int, int]]:
    """(group of the cluster, position in the stage) of one device of every sort: what it is, which share it takes."""
    seen = set()
    uneven = any(span.shares for span in stage.spans)
    for position, rank in enumerate(stage.ranks if uneven or len(job.cluster.groups) > 1 else stage.ranks[:1]):
        where = job.cluster.group_index(rank)
        sort = (where, tuple(span.share(0, span.replica(position)) for span in stage.spans) if uneven else ())
        if sort not in seen:
            seen.add(sort)
            yield where, position


def _stages_of(pipeline: Pipeline, group: int) -> list[int]:
    stages = len(pipeline.stages)
    return [s for s in range(stages) if group_of_stage(pipeline.schedule, stages, s) == group]


def _device_memory(job: Job, pipeline: Pipeline, group: int, groups: int, where: int, position: int) -> StageMemory:
    """All stages of one device group on one of its devices: states, and activations of what is in flight."""
    mine = _stages_of(pipeline, group)
    flight = in_flight(pipeline.schedule, groups, pipeline.micro_batches, group)
    held = {
        layer.name for s in mine for span in pipeline.stages[s].spans for layer in layers_of(job.model, span.layers)
    }
    total, working = Bytes(), 0.0
    for s, count in zip(mine, flight, strict=True):
        for index, span in enumerate(pipeline.stages[s].spans):
            cut = span.cut(span.share(pipeline.samples, span.replica(position)), job.seq_len, job.precision)
            total += _states(job, span, cut, held)
            total += _activations(job, span, cut, count, first=index == 0, held=held)
            working = max(working, _working(job, span, cut))
    parked = _parked_here(job, pipeline, set(mine), groups)
    home, stage = job.cluster.groups[where], pipeline.stages[mine[0]]
    return StageMemory(
        devices=stage.devices, capacity=home.device.memory, parameters=round(total.parameters),
        gradients=round(total.gradients), optimizer=round(total.optimizer), activations=round(total.activations),
        swapped_in=round(parked), working=round(working), host=round(total.host),
        host_capacity=home.host_memory // home.devices_per_node,
    )  # fmt: skip


def _states(job: Job, span: Span, cut: Slice, held: set[str]) -> Bytes:
    """Parameters, gradients and optimizer states. A tied layer far from its weights holds one copy of them."""
    p, extra = precision(job.precision), OPTIMIZERS[job.optimizer]
    dense = experts = frozen = 0
    for layer in layers_of(job.model, span.layers):
        copied = bool(layer.tied_to) and layer.tied_to not in held
        if copied:
            held.add(layer.tied_to)
        own_experts = layer.expert_parameters_on(cut)
        experts += own_experts
        frozen += layer.frozen_parameters_on(cut)
        dense += layer.parameters_on(cut, with_tied=copied) - own_experts
    total = Bytes()
    for count, still, replicas in ((dense, frozen, span.replicas), (experts, 0, span.expert_replicas)):
        shards = min(span.zero_group or replicas, replicas)
        parameters = count * p.parameter / (shards if span.zero >= 3 else 1)
        gradients = (count - still) * p.gradient / (shards if span.zero >= 2 else 1)
        optimizer = (count - still) * (p.master + extra) / (shards if span.zero >= 1 else 1)
        away = span.offload
        total += Bytes(
            parameters * (1 - away.parameters), gradients, optimizer * (1 - away.optimizer),
            host=parameters * away.parameters + optimizer * away.optimizer,
        )  # fmt: skip
    return total


def _kept(job: Job, span: Span, cut: Slice, *, first: bool, held: set[str]) -> float:
    """Activation bytes one micro-batch leaves on a device, before any of it is moved away."""
    layers = layers_of(job.model, span.layers)
    kept = sum(layer.kept_bytes(cut, span.recompute) for layer in layers)
    if span.recompute == "full" and not layers[0].opens_block:
        kept += layers[0].input_bytes(cut)  # a span that begins inside a block keeps what it received
    readers = [layer for layer in layers if layer.reads and layer.reads not in held]
    if first and readers:
        kept += readers[0].input_bytes(cut)  # what came from the encoder, once per stage
    return kept


def _activations(job: Job, span: Span, cut: Slice, count: int, *, first: bool, held: set[str]) -> Bytes:
    """What `count` micro-batches leave on the device and on the host; swapped parts are with another stage."""
    kept = count * _kept(job, span, cut, first=first, held=held)
    away = span.offload.activations
    swapped = span.swap.activations if span.swap else 0.0
    return Bytes(activations=kept * (1 - away - swapped), host=kept * away)


def _parked_here(job: Job, pipeline: Pipeline, mine: set[int], groups: int) -> float:
    """Bytes that the spans of other groups swap to a device of this one, spread over all its devices."""
    parked = 0.0
    here = len(pipeline.stages[min(mine)].ranks)
    for group in range(groups):
        flight = in_flight(pipeline.schedule, groups, pipeline.micro_batches, group)
        for s, count in zip(_stages_of(pipeline, group), flight, strict=True):
            for index, span in enumerate(pipeline.stages[s].spans):
                if span.swap and span.swap.to in mine:
                    cut = span.cut(max(span.shares, default=pipeline.samples // span.dp), job.seq_len, job.precision)
                    sent = count * _kept(job, span, cut, first=index == 0, held=set()) * span.swap.activations
                    parked += sent * span.devices / here
    return parked


def _working(job: Job, span: Span, cut: Slice) -> float:
    """The largest block while it runs: activations that were dropped or moved away, weights from elsewhere."""
    elsewhere = span.offload.parameters > 0 or (span.zero == 3 and (span.zero_group or span.replicas) > 1)
    here = 1 - span.offload.activations - (span.swap.activations if span.swap else 0.0)
    largest = 0.0
    for _, layers in groupby(layers_of(job.model, span.layers), key=lambda layer: layer.block or layer.name):
        block: list[Layer] = list(layers)
        again = sum(layer.kept_bytes(cut, "none") - here * layer.kept_bytes(cut, span.recompute) for layer in block)
        weights = sum(layer.parameters_on(cut, with_tied=True) for layer in block) * precision(job.precision).parameter
        # Two blocks' weights: the one that runs and the one being fetched.
        largest = max(largest, max(again, 0.0) + (2 * weights if elsewhere else 0.0))
    return largest
