"""Time of one pipeline stage for one micro-batch: its layers, and what travels beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod

from meshwright.cluster import Cluster, Link
from meshwright.cost.collectives import Fabric, gather_seconds, reduce_seconds, send_seconds
from meshwright.cost.compute import Chip
from meshwright.cost.constants import Constants
from meshwright.cost.layer import LayerTime, Placement, layer_time
from meshwright.cost.runtime import Runtime, cut_of
from meshwright.model import Layer, Slice
from meshwright.plan import Job, Span, Stage
from meshwright.plan.spans import alike, layers_of, sort_of
from meshwright.plan.strategy import Axis

_BACKWARD_KERNELS = 1.6  # kernels of the backward pass over those of the forward pass, as autograd issues them
Part = tuple[str, str]  # (forward or backward, what it is spent on)
Parts = defaultdict[Part, float]


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro-batch on one device of a stage."""

    spent: Mapping[Part, float] = field(default_factory=dict)  # on the device; adds up to the two passes
    hidden: Mapping[Part, float] = field(default_factory=dict)  # communication under computation
    weight_gradient: float = 0.0  # the part of the backward pass that may wait (zero-bubble schedules)

    @property
    def forward(self) -> float:
        return sum(seconds for (when, _), seconds in self.spent.items() if when == "forward")

    @property
    def backward(self) -> float:
        """With recomputation."""
        return sum(seconds for (when, _), seconds in self.spent.items() if when == "backward")


@dataclass(frozen=True)
class Site:
    """Where a stage runs: the chip, the links, the framework."""

    chip: Chip
    fabric: Fabric
    runtime: Runtime
    constants: Constants
    host: float  # bytes/s to or from host memory
    host_update: float  # bytes/s at which this device's part of the host updates offloaded states

    @staticmethod
    def of(job: Job, stage: Stage, where: int, runtime: Runtime, constants: Constants) -> Site:
        """One sort of device of a stage; a stage that spans groups of nodes is joined by their slowest link."""
        home = job.cluster.groups[where]
        between = _between(job.cluster) if len(job.cluster.kinds(stage.ranks)) > 1 else None
        chip = Chip.of(home.device, job.precision, runtime, constants)
        host = max(home.device.host_bandwidth, 1e9) * constants.host_copy
        update = constants.host_memory / home.devices_per_node
        return Site(chip, Fabric.of(home, constants, between), runtime, constants, host, update)


def _between(cluster: Cluster) -> Link:
    return cluster.between or min((g.network for g in cluster.groups), key=lambda link: link.bandwidth)


def stride(span: Span, axis: Axis) -> int:
    """Devices between two neighbours along an axis."""
    return prod(getattr(span, inner) for inner in span.order[: span.order.index(axis)])


def replica_stride(span: Span) -> int:
    """Devices between two that hold the same dense parameters."""
    axes: list[Axis] = [axis for axis in span.order if axis != "tp" and getattr(span, axis) > 1]
    return min((stride(span, axis) for axis in axes), default=1)


def placement(span: Span, step: int = 1) -> Placement:
    """Strides of the axes of a span, `step` devices between neighbours."""
    return Placement(
        step * stride(span, "tp"), step * stride(span, "ulysses"), step * stride(span, "ring"), step * span.etp
    )


def rank_step(stage: Stage) -> int:
    """Devices between two neighbours of a stage: 1, unless it takes every so manyth."""
    ranks = stage.ranks
    return ranks[1] - ranks[0] if len(ranks) > 1 else 1


def stage_time(job: Job, stages: Sequence[Stage], stage: Stage, site: Site, micro_batch: int) -> StageTime:
    """One micro-batch through every span of a stage, one of the `stages` of its pipeline."""
    spent: Parts = defaultdict(float)
    hidden: Parts = defaultdict(float)
    kernels = weight = 0.0
    for span in stage.spans:
        cut = cut_of(span, micro_batch, job, site.runtime)
        apart = abs(stages[span.swap.to].ranks[0] - stage.ranks[0]) if span.swap else 0
        layers = layers_of(job.model, span.layers)
        blocks = [list(block) for _, block in groupby(layers, key=lambda layer: layer.block or layer.name)]
        for block, count in _alike_blocks(blocks):
            found = _block(block, cut, span, site, rank_step(stage), apart)
            for total, part in ((spent, found.spent), (hidden, found.hidden)):
                for name, seconds in part.items():
                    total[name] += count * seconds
            kernels += count * found.kernels
            weight += count * found.weight_gradient
    _wait_for_host(spent, kernels, site)
    return StageTime(dict(spent), dict(hidden), weight)


def _alike_blocks(blocks: list[list[Layer]]) -> list[tuple[list[Layer], int]]:
    found: dict[tuple[object, ...], tuple[list[Layer], int]] = {}
    for block in blocks:
        key = tuple(map(sort_of, block))
        first, count = found.get(key, (block, 0))
        found[key] = (first, count + 1)
    return list(found.values())


def _wait_for_host(spent: Parts, kernels: float, site: Site) -> None:
    """The device waits where the host issues kernels more slowly than they run."""
    issued = kernels * site.runtime.kernels * site.runtime.host_seconds
    power = site.constants.host_overlap
    for when, host in (("forward", issued), ("backward", _BACKWARD_KERNELS * issued)):
        device = sum(seconds for (which, _), seconds in spent.items() if which == when)
        spent[when, "host"] += (device**power + host**power) ** (1 / power) - device


@dataclass(frozen=True)
class _Block:
    spent: Parts
    hidden: Parts
    weight_gradient: float
    kernels: float


def _block(layers: list[Layer], cut: Slice, span: Span, site: Site, step: int, apart: int) -> _Block:
    """A block's passes, with what travels beside them: sharded weights, offloaded and swapped tensors."""
    place = placement(span, step)
    times = [layer_time(layer, cut, site.chip, site.fabric, site.runtime, place, span.recompute) for layer in layers]
    spent, hidden = _layers(times)
    passes = {when: sum(s for (which, _), s in spent.items() if which == when) for when in ("forward", "backward")}
    for name, both in _beside(layers, cut, span, site, step, apart).items():
        hides = name != "zero" or site.runtime.overlap_parameters
        for when, moved in zip(("forward", "backward"), both, strict=True):
            under = min(moved, passes[when]) if hides else 0.0
            spent[when, name] += moved - under + site.constants.contention * under
            hidden[when, name] += under
    weight = sum(float(t.work.weight_gradient) for t in times)
    return _Block(spent, hidden, weight, sum(float(t.work.kernels) for t in times))


def _layers(times: list[LayerTime]) -> tuple[Parts, Parts]:
    spent: Parts = defaultdict(float)
    hidden: Parts = defaultdict(float)
    for time in times:
        spent["forward", "compute"] += float(time.work.forward)
        spent["backward", "compute"] += float(time.work.input_gradient + time.work.weight_gradient)
        spent["backward", "recompute"] += float(time.work.recompute)
        for axis, t in time.transfers.items():
            spent["forward", axis] += float(t.forward_exposed)
            spent["backward", axis] += float(t.backward_exposed + t.repeated)
            hidden["forward", axis] += float(t.forward - t.forward_exposed)
            hidden["backward", axis] += float(t.backward - t.backward_exposed)
    return spent, hidden


def _beside(
    layers: list[Layer], cut: Slice, span: Span, site: Site, step: int, apart: int
) -> dict[str, tuple[float, float]]:
    """Seconds of transfers beside a block's forward and backward pass, by what causes them."""
    found: dict[str, tuple[float, float]] = {}
    if span.zero >= 2:
        gather, scatter = _sharding(layers, cut, span, site, step)
        found["zero"] = (gather, gather + scatter)
    kept = sum(float(layer.kept_bytes(cut, span.recompute)) for layer in layers)
    if span.offload.activations or span.offload.parameters:
        weights = sum(float(layer.parameters_on(cut)) for layer in layers) * span.offload.parameters
        seconds = (kept * span.offload.activations + site.runtime.gather_bytes * weights) / site.host
        found["offload"] = (seconds, seconds)
    if span.swap:
        seconds = float(send_seconds(site.fabric, kept * span.swap.activations, apart))
        found["swap"] = (seconds, seconds)
    return {name: both for name, both in found.items() if sum(both)}


def _sharding(layers: list[Layer], cut: Slice, span: Span, site: Site, step: int) -> tuple[float, float]:
    """Seconds to gather a block's weights and to scatter its gradients, once each (ZeRO-2 only scatters)."""
    gather = scatter = 0.0
    for count, replicas, apart in parameter_groups(layers, cut, span):
        shards = span.shards(replicas)
        if shards == 1 or not count:
            continue
        if span.zero == 3:
            gather += float(gather_seconds(site.fabric, count * site.runtime.gather_bytes, shards, apart * step))
        moved = count * site.runtime.gradient_bytes
        scatter += float(gather_seconds(site.fabric, moved, shards, apart * step))
        if shards < replicas:
            scatter += float(reduce_seconds(site.fabric, moved / shards, replicas / shards, apart * step * shards))
    return gather, scatter


def parameter_groups(layers: Sequence[Layer], cut: Slice, span: Span) -> list[tuple[float, int, int]]:
    """(parameters on a device, devices that hold the same, distance between them): dense ones, then experts."""
    experts = float(sum(n * layer.expert_parameters_on(cut) for layer, n in alike(layers)))
    dense = float(sum(n * layer.parameters_on(cut) for layer, n in alike(layers))) - experts
    return [
        (dense, span.replicas, replica_stride(span)),
        (experts, span.expert_replicas, span.ep * span.etp),
    ]
