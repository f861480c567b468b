"""Bytes per device of any plan: model states exactly, activations from the operators of `model/`.

States follow ZeRO (Rajbhandari et al., 2020): level 1 shards the optimizer's, 2 the gradients too, 3 the
parameters too, over all replicas or over groups of them. Activations are what the schedule keeps in
flight. Allocator overhead and communication buffers are not in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
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
        return Bytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, factor: float) -> Bytes:
        return Bytes(*(getattr(self, f.name) * factor for f in fields(self)))


def _fullest_device(job: Job, pipeline: Pipeline, group: int, groups: int) -> StageMemory:
    """Replicas may take different shares on different devices: the one that is fullest for its size."""
    mine = _stages_of(pipeline, group)
    sorts = list(_sorts_of_devices(job, [pipeline.stages[s] for s in mine]))
    rows = [_device_memory(job, pipeline, group, groups, where, position) for where, position in sorts]
    return max(rows, key=lambda row: max(row.total / row.capacity, row.host / max(row.host_capacity, 1)))


def _sorts_of_devices(job: Job, stages: list[Stage]) -> Iterator[tuple[int, int]]:
    """(group of the cluster, position in the stage) of one device of every sort: what it is, which shares it takes."""
    spans = [span for stage in stages for span in stage.spans]
    uneven = any(span.shares for span in spans)
    seen = set()
    ranks = stages[0].ranks
    for position, rank in enumerate(ranks if uneven or len(job.cluster.groups) > 1 else ranks[:1]):
        where = job.cluster.group_index(rank)
        sort = (where, tuple(span.share(0, span.replica(position)) for span in spans) if uneven else ())
        if sort not in seen:
            seen.add(sort)
            yield where, position


def _stages_of(pipeline: Pipeline, group: int) -> list[int]:
    stages = len(pipeline.stages)
    return [s for s in range(stages) if group_of_stage(pipeline.schedule, stages, s) == group]


def _names_held(job: Job, pipeline: Pipeline, stages: list[int]) -> set[str]:
    spans = [span for s in stages for span in pipeline.stages[s].spans]
    return {layer.name for span in spans for layer in layers_of(job.model, span.layers)}


def _copies(job: Job, pipeline: Pipeline, stages: list[int], held: set[str]) -> set[str]:
    """Layers that bring a copy of tied weights with them: the first of each, where the weights' own layer is not."""
    first: dict[str, str] = {}
    for span in (span for s in stages for span in pipeline.stages[s].spans):
        for layer in layers_of(job.model, span.layers):
            if layer.tied_to and layer.tied_to not in held:
                first.setdefault(layer.tied_to, layer.name)
    return set(first.values())


def _device_memory(job: Job, pipeline: Pipeline, group: int, groups: int, where: int, position: int) -> StageMemory:
    """All stages of one device group on one of its devices: states, and activations of what is in flight."""
    mine = _stages_of(pipeline, group)
    held = _names_held(job, pipeline, mine)
    copies = _copies(job, pipeline, mine, held)

    def share(span: Span) -> int:
        return span.share(pipeline.samples, span.replica(position))

    states, working = Bytes(), 0.0
    for span in (span for s in mine for span in pipeline.stages[s].spans):
        cut = span.cut(share(span), job.seq_len, job.precision)
        states += _states(job, span, cut, copies)
        working = max(working, _working(job, span, cut))
    each = [_activations(job, pipeline, s, held, share) for s in mine]
    mixes = [
        sum((one * count for one, count in zip(each, mix, strict=True)), Bytes())
        for mix in in_flight(pipeline.schedule, groups, pipeline.micro_batches, group)
    ]
    activations, on_host = max(mix.activations for mix in mixes), max(mix.host for mix in mixes)
    home, stage = job.cluster.groups[where], pipeline.stages[mine[0]]
    return StageMemory(
        devices=stage.devices, capacity=home.device.memory, parameters=round(states.parameters),
        gradients=round(states.gradients), optimizer=round(states.optimizer), activations=round(activations),
        swapped_in=round(_parked_here(job, pipeline, set(mine), groups)), working=round(working),
        host=round(states.host + on_host), host_capacity=home.host_memory // home.devices_per_node,
    )  # fmt: skip


def _states(job: Job, span: Span, cut: Slice, copies: set[str]) -> Bytes:
    """Parameters, gradients and optimizer states. A tied layer far from its weights holds one copy of them."""
    p, extra = precision(job.precision), OPTIMIZERS[job.optimizer]
    dense = experts = frozen = 0
    for layer in layers_of(job.model, span.layers):
        copied = layer.name in copies
        own_experts = layer.expert_parameters_on(cut)
        experts += own_experts
        frozen += layer.frozen_parameters_on(cut, with_tied=copied)
        dense += layer.parameters_on(cut, with_tied=copied) - own_experts
    total = Bytes()
    for count, still, replicas in ((dense, frozen, span.replicas), (experts, 0, span.expert_replicas)):
        shards = span.shards(replicas)
        parameters = count * p.parameter / (shards if span.zero >= 3 else 1)
        gradients = (count - still) * p.gradient / (shards if span.zero >= 2 else 1)
        optimizer = (count - still) * (p.master + extra) / (shards if span.zero >= 1 else 1)
        away = span.offload
        total += Bytes(
            parameters * (1 - away.parameters), gradients, optimizer * (1 - away.optimizer),
            host=parameters * away.parameters + optimizer * away.optimizer,
        )  # fmt: skip
    return total


def _kept(job: Job, span: Span, cut: Slice) -> float:
    """Activation bytes one micro-batch leaves on a device, before any of it is moved away."""
    layers = layers_of(job.model, span.layers)
    kept = sum(layer.kept_bytes(cut, span.recompute) for layer in layers)
    if span.recompute == "full" and not layers[0].opens_block:
        kept += layers[0].input_bytes(cut)  # a span that begins inside a block keeps what it received
    return kept


def _activations(job: Job, pipeline: Pipeline, stage: int, held: set[str], share: Callable[[Span], float]) -> Bytes:
    """What one micro-batch leaves on the device and on the host; swapped parts are with another stage."""
    total = Bytes()
    for span, kept in _kept_by_span(job, pipeline, stage, held, share):
        total += Bytes(activations=kept * span.activations_here, host=kept * span.offload.activations)
    return total


def _kept_by_span(
    job: Job, pipeline: Pipeline, stage: int, held: set[str], share: Callable[[Span], float]
) -> Iterator[tuple[Span, float]]:
    """What each span keeps; what came from an encoder elsewhere once per stage, in the first span that reads it."""
    read = set(held)
    for span in pipeline.stages[stage].spans:
        cut = span.cut(1, job.seq_len, job.precision)  # bytes are linear in samples
        kept = _kept(job, span, cut)
        readers = [layer for layer in layers_of(job.model, span.layers) if layer.reads and layer.reads not in read]
        if readers:
            read.add(readers[0].reads)
            kept += readers[0].input_bytes(cut)
        yield span, kept * share(span)


def _parked_here(job: Job, pipeline: Pipeline, mine: set[int], groups: int) -> float:
    """Bytes that the spans of other groups swap to a device of this one, spread over all its devices."""
    parked = 0.0
    here = len(pipeline.stages[min(mine)].ranks)
    for group in range(groups):
        senders = _stages_of(pipeline, group)
        held = _names_held(job, pipeline, senders)
        sent = []
        for s in senders:
            parts = _kept_by_span(job, pipeline, s, held, lambda span: pipeline.samples / span.dp)
            amounts = [
                kept * span.swap.activations * span.devices
                for span, kept in parts
                if span.swap and span.swap.to in mine
            ]
            sent.append(sum(amounts))
        if any(sent):
            mixes = in_flight(pipeline.schedule, groups, pipeline.micro_batches, group)
            parked += max(sum(a * n for a, n in zip(sent, mix, strict=True)) for mix in mixes) / here
    return parked


def _working(job: Job, span: Span, cut: Slice) -> float:
    """The largest block while it runs: activations that were dropped or moved away, weights that are fetched from
    elsewhere (the running block's and the next one's), and whole gradients before they are sharded."""
    p = precision(job.precision)
    largest = 0.0
    for _, layers in groupby(layers_of(job.model, span.layers), key=lambda layer: layer.block or layer.name):
        block: list[Layer] = list(layers)
        again = sum(
            layer.kept_bytes(cut, "none") - span.activations_here * layer.kept_bytes(cut, span.recompute)
            for layer in block
        )
        experts = sum(layer.expert_parameters_on(cut) for layer in block)
        dense = sum(layer.parameters_on(cut, with_tied=True) for layer in block) - experts
        extra = 0.0
        for count, replicas in ((dense, span.replicas), (experts, span.expert_replicas)):
            sharded = span.shards(replicas) > 1
            if span.offload.parameters or (span.zero == 3 and sharded):
                extra += 2 * count * p.parameter
            if span.zero >= 2 and sharded:
                extra += count * p.gradient
        largest = max(largest, max(again, 0.0) + extra)
    return largest
