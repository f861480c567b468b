"""Bytes per device of any plan: model states exactly, activations from the operators of `models/`.

States follow ZeRO (Rajbhandari et al., 2020): level 1 shards the optimizer's, 2 also the gradients, 3 also the
parameters, over all replicas or groups of them. Activations are those the schedule keeps in flight; `transient.py` adds
short-lived memory. The allocator is a stated model. It reserves `Runtime.fragmentation` more than the peak of
activations and temporaries, because blocks of different sizes do not fit into each other's places. Every process also
takes `Runtime.context`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from meshwright.base.units import size
from meshwright.clusters import Device, Group
from meshwright.clusters.measurements import Measured
from meshwright.cost.layers.layer_config import LayerConfig
from meshwright.cost.memory.transient import Transient, transient, weight_gradient_buffers
from meshwright.cost.runtime import RUNTIMES, Runtime, cut_of
from meshwright.errors import DoesNotFit
from meshwright.models import Layer, Slice, precision
from meshwright.plans import OPTIMIZERS, Job, Pipeline, Plan, Span, Stage, group_of_stage, in_flight
from meshwright.plans.spans import alike, layers_of, sort_of
from meshwright.plans.stored_estimate import StageMemory

# Error-feedback residuals of compressed gradients: kept in float32, for every number a process encodes.


_BYTES = 4


def residual_bytes(job: Job, plan: Plan, spans: Iterable[Span], runtime: Runtime) -> int:
    """Return the residual bytes on one device that runs these spans.

    They are of whole gradients, also under ZeRO, since a process sends parts of all shards. Only a hybrid sum over
    several sets of shards keeps residuals of the own shard.

    >>> table = {"model": "tiny-llama", "cluster": "2xcpu", "global_batch": 4, "seq_len": 32, "precision": "fp32"}
    >>> plan = Plan.of({**table, "zero": 1, "compression": [{"layers": "embed..head", "algorithm": "int8"}]})
    >>> from meshwright.cost.runtime import RUNTIMES
    >>> job, spans = plan.resolve(), plan.pipelines[0].stages[0].spans
    >>> residual_bytes(job, plan, spans, RUNTIMES["meshwright"]) == 4 * job.model.parameters
    True
    """
    named = {layer.name for rule in plan.compression for layer in layers_of(job.model, rule.layers)}
    total = 0.0
    for span in spans:
        if span.replicas < 2:
            continue
        cut, shards = cut_of(span, 1, job, runtime), span.shards(span.replicas)
        hybrid = span.zero > 0 and 1 < shards < span.replicas
        for layer in layers_of(job.model, span.layers):
            if layer.name in named:
                trained = float(layer.parameters_on(cut) - layer.frozen_parameters_on(cut))
                total += _BYTES * trained / (shards if hybrid else 1)
    return round(total)


OURS = RUNTIMES["meshwright"]
# On CPUs, resident memory without tensors once the first kernels have run (docs/measurements.md): a process started on
# its own, and one forked from a server, which has not touched all of PyTorch's pages.
_PROCESS, _FORKED = 4.4e8, 3.1e8  # bytes
_MALLOC = 0.5  # bytes that malloc leaves between blocks of other sizes, per byte of activations and temporaries
Array = Any


def plan_memory(plan: Plan, job: Job | None = None, runtime: Runtime = OURS) -> list[StageMemory]:
    """Return the memory of each device group, pipeline by pipeline, when a given framework runs the plan.

    >>> table = {"model": "llama3-8b", "cluster": "8xh100", "global_batch": 8, "seq_len": 4096, "zero": 3}
    >>> memory = plan_memory(Plan.of(table))[0]
    >>> memory.parameters == 4 * 8030261248 // 8, memory.short_by  # float32, cast when they are gathered
    (True, 0)
    """
    job = job or plan.resolve()
    found = []
    for pipeline in plan.pipelines:
        groups = len(pipeline.stages) // pipeline.schedule.virtual
        for group in range(groups):
            row = _fullest_device(job, pipeline, group, groups, runtime)
            spans = [span for s in stages_of(pipeline, group) for span in pipeline.stages[s].spans]
            kept = residual_bytes(job, plan, spans, runtime) if plan.compression else 0
            found.append(replace(row, communication=row.communication + kept) if kept else row)
    return found


def fits(memory: list[StageMemory]) -> None:
    """Raise `DoesNotFit`, naming the group that lacks the most memory and its largest parts."""
    worst = max(memory, key=lambda m: max(m.short_by, m.host_short_by))
    if worst.host_short_by > worst.short_by:
        needs = f"{size(worst.host)} of host memory, their part is {size(worst.host_capacity)}"
        problem = f"does not fit: devices {worst.devices} offload {needs}, short by {size(worst.host_short_by)} each"
        raise DoesNotFit(problem, short_by_bytes=worst.host_short_by)
    if worst.short_by:
        names = ("parameters", "gradients", "optimizer", "activations", "swapped_in", "working", "communication")
        largest = max(names, key=lambda name: int(getattr(worst, name)))
        problem = (
            f"does not fit: devices {worst.devices} need {size(worst.total)} of {size(worst.capacity)}, "
            f"short by {size(worst.short_by)}; most of it is {largest} ({size(getattr(worst, largest))})"
        )
        raise DoesNotFit(problem, short_by_bytes=worst.short_by)


@dataclass(frozen=True)
class Bytes:
    """Bytes on one device, and bytes it offloaded."""

    parameters: Array = 0.0
    gradients: Array = 0.0
    optimizer: Array = 0.0
    activations: Array = 0.0
    host: Array = 0.0

    @property
    def states(self) -> Array:
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(
            self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer,
            self.activations + other.activations, self.host + other.host,
        )  # fmt: skip

    def __mul__(self, factor: float) -> Bytes:
        return Bytes(
            self.parameters * factor, self.gradients * factor, self.optimizer * factor, self.activations * factor,
            self.host * factor,
        )  # fmt: skip


def _fullest_device(job: Job, pipeline: Pipeline, group: int, groups: int, runtime: Runtime) -> StageMemory:
    """Return the memory of the fullest device for its size; replicas may take different shares on different devices."""
    mine = stages_of(pipeline, group)
    sorts = list(sorts_of_devices(job, [pipeline.stages[s] for s in mine]))
    rows = [_device_memory(job, pipeline, group, groups, where, position, runtime) for where, position in sorts]
    return max(rows, key=lambda row: max(row.total / row.capacity, row.host / max(row.host_capacity, 1)))


def sorts_of_devices(job: Job, stages: list[Stage]) -> Iterator[tuple[int, int]]:
    """Yield (group of the cluster, position in the stage) of one device of every kind: its hardware, its shares."""
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


def stages_of(pipeline: Pipeline, group: int) -> list[int]:
    """Return the stages that a device group runs."""
    stages = len(pipeline.stages)
    return [s for s in range(stages) if group_of_stage(pipeline.schedule, stages, s) == group]


def names_held(job: Job, pipeline: Pipeline, stages: list[int]) -> set[str]:
    """Return the layers of some stages, by name."""
    spans = [span for s in stages for span in pipeline.stages[s].spans]
    return {layer.name for span in spans for layer in layers_of(job.model, span.layers)}


def _copies(job: Job, pipeline: Pipeline, stages: list[int], held: set[str]) -> set[str]:
    """Return the layers with a copy of tied weights: the first of each, unless the weights' own layer is there."""
    first: dict[str, str] = {}
    for span in (span for s in stages for span in pipeline.stages[s].spans):
        for layer in layers_of(job.model, span.layers):
            if layer.tied_to and layer.tied_to not in held:
                first.setdefault(layer.tied_to, layer.name)
    return set(first.values())


def _device_memory(
    job: Job, pipeline: Pipeline, group: int, groups: int, where: int, position: int, runtime: Runtime
) -> StageMemory:
    """Return the memory of one device of a group: states of its stages, and activations in flight."""
    mine, home = stages_of(pipeline, group), job.cluster.groups[where]
    held = names_held(job, pipeline, mine)
    copies = _copies(job, pipeline, mine, held)

    def share(span: Span) -> int:
        return span.share(pipeline.samples, span.replica(position))

    spans = [span for s in mine for span in pipeline.stages[s].spans]
    cuts = [cut_of(span, share(span), job, runtime) for span in spans]
    states, moment, once = Bytes(), Transient(), pipeline.micro_batches == 1
    for span, number in _alike(job, spans, copies):
        states += _states(job, span, copies, share(span), once, home.device, runtime) * number
        moment = moment.fuller(transient(job, span, share(span), runtime, once=once, gloo=is_processor(home.device)))
    working = moment.working + weight_gradient_buffers(job, spans, cuts, runtime)
    communication = moment.communication + _receive_buffers(job, pipeline, mine, runtime)
    each = [_activations(job, pipeline, s, held, share, runtime) for s in mine]
    mixes = [
        sum((one * count for one, count in zip(each, mix, strict=True)), Bytes())
        for mix in in_flight(pipeline.schedule, groups, pipeline.micro_batches, group)
    ]
    activations, on_host = max(mix.activations for mix in mixes), max(mix.host for mix in mixes)
    stage = pipeline.stages[mine[0]]
    loose = activations + working + communication
    reserved, context = loose_share(home.device, runtime), process_bytes(home, runtime)
    return StageMemory(
        devices=stage.devices, capacity=home.device.memory, parameters=round(states.parameters),
        gradients=round(states.gradients), optimizer=round(states.optimizer), activations=round(activations),
        swapped_in=round(_parked_here(job, pipeline, set(mine), groups, runtime)), working=round(working),
        communication=round(communication), fragmentation=round(reserved * loose),
        context=round(context),
        host=round(states.host + on_host), host_capacity=home.host_memory // home.devices_per_node,
    )  # fmt: skip


def is_processor(device: Device) -> bool:
    """Return True if a node's CPUs compute: memory is malloc's, and gloo sums."""
    return device.architecture == "cpu"


def loose_share(device: Device, runtime: Runtime) -> float:
    """Return the bytes that the allocator reserves per byte of activations and temporaries."""
    usual = _MALLOC if is_processor(device) else runtime.fragmentation
    seen = (device.measured or Measured()).fragmentation
    return usual if seen is None else seen


def process_bytes(home: Group, runtime: Runtime) -> float:
    """Return the bytes of a process without its tensors: driver, kernels and communicators, or the program."""
    usual = runtime.context
    if is_processor(home.device):
        usual = _PROCESS if home.devices_per_node == 1 else _FORKED
    seen = (home.device.measured or Measured()).context
    return usual if seen is None else seen


def _alike(job: Job, spans: list[Span], copies: set[str]) -> list[tuple[Span, int]]:
    """Return one of each kind of span, with its count: per-layer choices make many short spans."""
    found: dict[tuple[object, ...], tuple[Span, int]] = {}
    for span in spans:
        copied = any(layer.name in copies for layer in layers_of(job.model, span.layers)) if copies else False
        sort = (*_sort_of_span(job, span), span.layers if copied else "")
        first, number = found.get(sort, (span, 0))
        found[sort] = (first, number + 1)
    return list(found.values())


def _sort_of_span(job: Job, span: Span) -> tuple[object, ...]:
    """Return a key that is equal for spans of equal layers with an equal strategy."""
    return replace(span, layers=""), *map(sort_of, layers_of(job.model, span.layers))


def _receive_buffers(job: Job, pipeline: Pipeline, mine: list[int], runtime: Runtime) -> float:
    """Return the bytes of buffers for activations from the stage before and gradients from the one after."""
    if not runtime.receive_buffers or len(pipeline.stages) == 1:
        return 0.0
    total = 0.0
    for s in mine:
        span = pipeline.stages[s].spans[0]
        layers = layers_of(job.model, span.layers)
        cut = cut_of(span, pipeline.samples // span.dp, job, runtime)
        total += float(layers[0].input_bytes(cut)) if s else 0.0
        total += float(layers[-1].output_bytes(cut)) if s + 1 < len(pipeline.stages) else 0.0
    return total * pipeline.micro_batches


def _states(
    job: Job, span: Span, copies: set[str], samples: int, once: bool, device: Device, runtime: Runtime
) -> Bytes:
    """Return the bytes of parameters, gradients and optimizer states.

    A tied layer far from its weights holds one copy of them.
    """
    config = LayerConfig.anywhere(span, samples, job, runtime)
    layers = layers_of(job.model, span.layers)
    bring = [layer for layer in layers if layer.name in copies]
    own = alike(layer for layer in layers if layer.name not in copies)
    total = state_bytes(job, own, config, runtime, once=once)
    if once and runtime.gradients_grow:
        place = sum(number * taken_over(job, layer, span, config, device, runtime) for layer, number in own)
        total = dataclasses.replace(total, gradients=total.gradients - place)
    return total + state_bytes(job, [(layer, 1) for layer in bring], config, runtime, with_tied=True, once=once)


def taken_over(job: Job, layer: Layer, span: Span, ways: LayerConfig, device: Device, runtime: Runtime) -> float:
    """Return the bytes of a layer's gradients that reuse activation memory freed in the same backward pass."""
    gradients = float(state_bytes(job, [(layer, 1)], ways, runtime, once=True).gradients)
    kept = float(layer.kept_bytes(ways.cut, span.recompute) * ways.here)
    return float(min(gradients, (1 + loose_share(device, runtime)) * kept))


def state_bytes(
    job: Job, layers: Iterable[tuple[Layer, int]], ways: LayerConfig, runtime: Runtime, *, with_tied: bool = False,
    once: Array = False,
) -> Bytes:  # fmt: skip
    """Return the states of layers with their counts on one device; `once`: a step is one micro-batch."""
    p, extra, cut = precision(job.precision), OPTIMIZERS[job.optimizer], ways.cut
    dense: Array = 0
    experts: Array = 0
    frozen: Array = 0
    for layer, number in layers:
        own = layer.expert_parameters_on(cut)
        experts = experts + number * own
        frozen = frozen + number * layer.frozen_parameters_on(cut, with_tied=with_tied)
        dense = dense + number * (layer.parameters_on(cut, with_tied=with_tied) - own)
    total, zero = Bytes(), np.asarray(ways.zero)
    for count, still, replicas in ((dense, frozen, ways.dense), (experts, 0, ways.experts)):
        shards = replicas.shards
        one_copy = (zero == 3) & (np.asarray(shards) > 1) & (runtime.one_copy_of_parameters and p.master > 0)
        size = np.where(one_copy, p.master, p.parameter)
        bare = not runtime.master_copy or job.optimizer in runtime.without_master
        master = np.where(one_copy | bare, 0.0, p.master)
        parameters = count * size / np.where(zero >= 3, shards, 1)
        # Gathered weights stay beside the own shards; nothing else counts them where they are no wider.
        beside = (zero > 0) & (zero < 3) & (np.asarray(shards) > 1) & (p.master == 0) & runtime.one_copy_of_parameters
        parameters = parameters + beside * count * p.parameter / shards
        narrow = np.asarray(once) & (np.asarray(shards) == 1) & runtime.narrow_gradients
        wide = np.where(narrow, p.parameter, min(p.gradient, runtime.accumulate_bytes))
        gradients = (count - still) * wide / np.where(zero >= 2, shards, 1)
        flat = runtime.flat_sums & (zero == 0) & (np.asarray(replicas.count) > 1)
        gradients = gradients + flat * (count - still) * 4
        states = master + extra + runtime.optimizer_temporary
        optimizer = (count - still) * states / np.where(zero >= 1, shards, 1)
        away = parameters * ways.offload_parameters + optimizer * ways.offload_optimizer
        total += Bytes(
            parameters * (1 - ways.offload_parameters), gradients, optimizer * (1 - ways.offload_optimizer), host=away
        )
    return total


def _kept(job: Job, span: Span, cut: Slice) -> float:
    """Return the activation bytes that one micro-batch keeps on a device, before offload and swap."""
    layers = layers_of(job.model, span.layers)
    kept = sum(count * float(layer.kept_bytes(cut, span.recompute)) for layer, count in alike(layers))
    if span.recompute == "full" and not layers[0].opens_block:
        kept += layers[0].input_bytes(cut)  # a span that begins inside a block keeps its input
    return kept


def _activations(
    job: Job, pipeline: Pipeline, stage: int, held: set[str], share: Callable[[Span], float], runtime: Runtime
) -> Bytes:
    """Return the bytes one micro-batch keeps on the device and on the host; swapped parts are on another stage."""
    total = Bytes()
    for span, kept in _kept_by_span(job, pipeline, stage, held, share, runtime):
        total += Bytes(activations=kept * span.activations_here, host=kept * span.offload.activations)
    return total


def _kept_by_span(
    job: Job, pipeline: Pipeline, stage: int, held: set[str], share: Callable[[Span], float], runtime: Runtime
) -> Iterator[tuple[Span, float]]:
    """Yield the bytes each span keeps.

    The output of an encoder on another stage counts once per stage, in the first span that reads it.
    """
    read = set(held)
    known: dict[tuple[object, ...], float] = {}  # by strategy and kinds of layers
    for span in pipeline.stages[stage].spans:
        cut = cut_of(span, 1, job, runtime)  # bytes are linear in samples
        layers = layers_of(job.model, span.layers)
        sort = _sort_of_span(job, span)
        if sort not in known:
            known[sort] = _kept(job, span, cut)
        kept = known[sort]
        readers = [layer for layer in layers if layer.reads and layer.reads not in read]
        if readers:
            read.add(readers[0].reads)
            kept += readers[0].input_bytes(cut)
        yield span, kept * share(span)


def _parked_here(job: Job, pipeline: Pipeline, mine: set[int], groups: int, runtime: Runtime) -> float:
    """Return the bytes that the spans of other groups swap to a device of this one, spread over all its devices."""
    sending = {
        s for s, stage in enumerate(pipeline.stages) for span in stage.spans if span.swap and span.swap.to in mine
    }
    parked = 0.0
    here = len(pipeline.stages[min(mine)].ranks)
    for group in sorted({group_of_stage(pipeline.schedule, len(pipeline.stages), s) for s in sending}):
        senders = stages_of(pipeline, group)
        held = names_held(job, pipeline, senders)
        sent = []
        for s in senders:
            parts = _kept_by_span(job, pipeline, s, held, lambda span: pipeline.samples / span.dp, runtime)
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
