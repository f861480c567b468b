"""Time of one pipeline stage for one micro-batch: its layers, and what travels beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from meshwright.cluster import Cluster, Link
from meshwright.cost.collectives import Counts, Fabric, exchange_seconds, gather_seconds, send_seconds
from meshwright.cost.compute import Chip
from meshwright.cost.constants import Constants
from meshwright.cost.layer import LayerTime, Placement, layer_time
from meshwright.cost.placement import counts, halves, placement, replicas
from meshwright.cost.runtime import Runtime, cut_of
from meshwright.model import Layer, Slice, precision
from meshwright.plan import Job, Span, Stage
from meshwright.plan.spans import alike, layers_of, sort_of

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
    """Where a stage runs: its devices, the chip, the links, the framework."""

    cluster: Cluster
    ranks: tuple[int, ...]
    chip: Chip
    fabric: Fabric
    runtime: Runtime
    constants: Constants
    host: float  # bytes/s to or from host memory
    host_update: float  # bytes/s at which this device's part of the host updates offloaded states
    _known: dict[tuple[object, ...], tuple[Placement, Counts, Counts]] = field(default_factory=dict, compare=False)

    def joined(self, span: Span) -> tuple[Placement, Counts, Counts]:
        """Members of each axis of a span, of its replicas, and of its experts' replicas, by what joins them."""
        key = (span.dp, span.tp, span.ulysses, span.ring, span.ep, span.etp, span.order)
        if key not in self._known:
            where = (self.cluster, span, self.ranks, self.fabric)
            self._known[key] = (placement(*where), *replicas(*where))
        return self._known[key]

    @staticmethod
    def of(job: Job, stage: Stage, where: int, runtime: Runtime, constants: Constants) -> Site:
        """One sort of device of a stage; a stage that spans groups of nodes is joined by their slowest link."""
        home = job.cluster.groups[where]
        touched = sorted({job.cluster.group_index(rank) for rank in (min(stage.ranks), max(stage.ranks))})
        fabric = Fabric.of(home, constants, between(job.cluster, touched) if len(touched) > 1 else None)
        chip = Chip.of(home.device, job.precision, runtime, constants)
        host = max(home.device.host_bandwidth, 1e9) * constants.host_copy
        update = constants.host_memory / home.devices_per_node
        return Site(job.cluster, stage.ranks, chip, fabric, runtime, constants, host, update)


def between(cluster: Cluster, groups: Sequence[int]) -> Link:
    """The link that joins some groups of nodes."""
    return cluster.between or min((cluster.groups[g].network for g in groups), key=lambda link: link.bandwidth)


def stage_time(job: Job, stages: Sequence[Stage], stage: Stage, site: Site, share: Callable[[Span], int]) -> StageTime:
    """One micro-batch through every span of a stage, one of the `stages` of its pipeline.

    `share` says how many of its samples this device's replica of a span takes.
    """
    spent: Parts = defaultdict(float)
    hidden: Parts = defaultdict(float)
    kernels = weight = 0.0
    before: Span | None = None
    for span in stage.spans:
        cut = cut_of(span, share(span), job, site.runtime)
        layers = layers_of(job.model, span.layers)
        parked = stages[span.swap.to].ranks[0] if span.swap else stage.ranks[0]
        blocks = [list(block) for _, block in groupby(layers, key=lambda layer: layer.block or layer.name)]
        for block, count in _alike_blocks(blocks):
            found = _block(block, cut, span, site, parked)
            for total, part in ((spent, found.spent), (hidden, found.hidden)):
                for name, seconds in part.items():
                    total[name] += count * seconds
            kernels += count * found.kernels
            weight += count * found.weight_gradient
        if before and _grid(before) != _grid(span):
            # Activations change from one cut of batch, sequence and width to another, and their gradients back.
            moved = exchange_seconds(site.fabric, float(layers[0].input_bytes(cut)), span.devices, _all(site))
            for when in ("forward", "backward"):
                spent[when, "relayout"] += float(moved)
        before = span
    _wait_for_host(spent, kernels, site)
    return StageTime(dict(spent), dict(hidden), weight)


def _grid(span: Span) -> tuple[object, ...]:
    return span.dp, span.tp, span.sp, span.ulysses, span.ring, span.order


def _all(site: Site) -> Counts:
    return counts(site.cluster, site.ranks, list(range(len(site.ranks))), site.fabric)


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


def _block(layers: list[Layer], cut: Slice, span: Span, site: Site, parked: int) -> _Block:
    """A block's passes, with what travels beside them: sharded weights, offloaded and swapped tensors."""
    place = site.joined(span)[0]
    times = [layer_time(layer, cut, site.chip, site.fabric, site.runtime, place, span.recompute) for layer in layers]
    spent, hidden = _layers(times)
    passes = {when: sum(s for (which, _), s in spent.items() if which == when) for when in ("forward", "backward")}
    for name, both in _beside(layers, cut, span, site, parked).items():
        # Sharded weights are gathered ahead of the forward pass, gradients scattered behind the backward pass.
        ours = (site.runtime.overlap_parameters, site.runtime.overlap_gradients) if name == "zero" else (True, True)
        for when, moved, hides in zip(("forward", "backward"), both, ours, strict=True):
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


def _beside(layers: list[Layer], cut: Slice, span: Span, site: Site, parked: int) -> dict[str, tuple[float, float]]:
    """Seconds of transfers beside a block's forward and backward pass, by what causes them."""
    found: dict[str, tuple[float, float]] = {}
    if span.zero >= 2:
        gather, scatter = _sharding(layers, cut, span, site)
        found["zero"] = (gather, gather + scatter)
    kept = sum(float(layer.kept_bytes(cut, span.recompute)) for layer in layers)
    if span.offload.activations or span.offload.parameters:
        shards = span.shards(span.replicas) if span.zero == 3 else 1
        weights = sum(float(layer.parameters_on(cut)) for layer in layers) * span.offload.parameters / shards
        moved = kept * span.offload.activations + parameter_bytes(site.runtime, cut.precision) * weights
        found["offload"] = (moved / site.host, moved / site.host)
    if span.swap:
        seconds = send_seconds(site.cluster, kept * span.swap.activations, site.ranks[0], parked, site.constants)
        found["swap"] = (seconds, seconds)
    return {name: both for name, both in found.items() if sum(both)}


def parameter_bytes(runtime: Runtime, precision_name: str) -> float:
    """Of one element, as parameters travel: as the runtime casts them, or wider where the job trains wider."""
    return max(runtime.gather_bytes, precision(precision_name).parameter)


def gradient_bytes(runtime: Runtime, precision_name: str) -> float:
    """Of one element, as gradients travel."""
    return max(runtime.gradient_bytes, precision(precision_name).activation)


def _sharding(layers: list[Layer], cut: Slice, span: Span, site: Site) -> tuple[float, float]:
    """Seconds to gather a block's weights and to scatter its gradients, once each (ZeRO-2 only scatters)."""
    gather = scatter = 0.0
    for held in parameter_groups(layers, cut, span, site):
        shards = span.shards(held.replicas)
        if shards == 1 or not held.count:
            continue
        inside, _ = halves(held.joined, shards, held.replicas)
        if span.zero == 3:
            moved = held.count * parameter_bytes(site.runtime, cut.precision)
            gather += float(gather_seconds(site.fabric, moved, shards, inside))
        moved = held.trained * gradient_bytes(site.runtime, cut.precision)
        scatter += float(gather_seconds(site.fabric, moved, shards, inside))
    return gather, scatter


@dataclass(frozen=True)
class Held:
    """Parameters on one device, and the devices that hold the same."""

    count: float
    trained: float  # of these, those that have gradients
    replicas: int
    joined: Counts  # of the replicas, how many each tier of links joins


def parameter_groups(layers: Sequence[Layer], cut: Slice, span: Span, site: Site) -> tuple[Held, Held]:
    """Dense parameters, then experts: they are replicated over different devices."""
    kinds = alike(layers)
    experts = float(sum(n * layer.expert_parameters_on(cut) for layer, n in kinds))
    dense = float(sum(n * layer.parameters_on(cut) for layer, n in kinds)) - experts
    frozen = float(sum(n * layer.frozen_parameters_on(cut) for layer, n in kinds))
    _, same, same_experts = site.joined(span)
    return (
        Held(dense, dense - frozen, span.replicas, same),
        Held(experts, experts, span.expert_replicas, same_experts),
    )
