"""Gradients that the replicas of a plan sum, layer by layer, in the order of the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.cost.constants import DEFAULT, seen_in
from meshwright.cost.estimate import Estimate, estimate
from meshwright.cost.layers.collectives import Counts, Fabric
from meshwright.cost.layers.layer_config import Held, LayerConfig, parameter_groups
from meshwright.cost.layers.placement import StagePlacement
from meshwright.cost.memory.device_memory import stages_of
from meshwright.cost.runtime import runtime as runtime_named
from meshwright.models import Layer, Slice
from meshwright.models.layer import Op, Weight
from meshwright.plans import Job, Pipeline, Plan, Span
from meshwright.plans.spans import layers_of, sort_of


@dataclass(frozen=True)
class Summed:
    """Gradients of one layer on one device: its dense parameters, or its experts."""

    layer: str
    part: str
    sort: tuple[object, ...] = field(repr=False)  # equal for equal layers
    shapes: tuple[tuple[int, ...], ...]
    numbers: int
    replicas: int
    ready: float  # seconds after the start of the last backward pass
    width: float  # bytes of a number that is sent
    sharded: bool  # reduce-scattered to the ranks that own its shards
    alone: str  # reason why it cannot be compressed; empty: it can
    fabric: Fabric = field(repr=False)
    joined: Counts = field(repr=False)  # number of replicas that each tier of links joins


def gradients(job: Job, plan: Plan, framework: str = "meshwright") -> list[list[Summed]]:
    """Return the gradients of every device group, those of equal replicas together.

    >>> from meshwright import Cluster, Model
    >>> job = Job(Model.preset("tiny-llama"), Cluster.preset("4xcpu"), 8, precision="fp32")
    >>> ((*_, last),) = gradients(job, Plan.of({"zero": 0}, job))
    >>> last.layer, last.replicas, last.numbers == job.model.layer("embed").parameters
    ('embed', 4, True)
    """
    found: list[list[Summed]] = []
    estimated = estimate(job, plan, framework)
    for index, pipeline in enumerate(plan.pipelines):
        for group in range(len(pipeline.stages) // pipeline.schedule.virtual):
            pools: dict[tuple[object, ...], list[Summed]] = {}
            for one in _of_group(estimated, index, pipeline, group):
                pools.setdefault((one.replicas, one.joined, one.width, one.sharded), []).append(one)
            found += pools.values()
    return found


def _of_group(estimated: Estimate, index: int, pipeline: Pipeline, group: int) -> Iterator[Summed]:
    """Yield the gradients on one device of a group, the last layer first: that is the order of the backward pass."""
    job, plan = estimated.job, estimated.plan
    used = runtime_named(estimated.runtime.name).switched(plan.overlap)
    mine = stages_of(pipeline, group)
    now, whole = 0.0, sum(estimated.pipelines[index].stages[s].backward for s in mine)
    for s in reversed(mine):
        stage, backward = pipeline.stages[s], estimated.pipelines[index].stages[s].backward
        where = job.cluster.group_index(stage.ranks[0])
        site = StagePlacement.of(job, stage.ranks, where, used, seen_in(job.cluster, DEFAULT))
        cuts = [(span, LayerConfig.of(span, 1, job, site)) for span in stage.spans]
        layers = [(layer, span, ways) for span, ways in cuts for layer in layers_of(job.model, span.layers)]
        flops = sum(float(layer.forward_flops(ways.cut)) for layer, _, ways in layers) or 1.0
        for layer, span, ways in reversed(layers):
            now += backward * float(layer.forward_flops(ways.cut)) / flops
            for part, held in zip(("dense", "experts"), parameter_groups([layer], ways), strict=True):
                if held.trained:
                    ready = now if used.overlap_gradients else whole
                    yield _summed(layer, part, held, (job, pipeline, span), ways.cut, site, ready)


def _summed(
    layer: Layer,
    part: str,
    held: Held,
    where: tuple[Job, Pipeline, Span],
    cut: Slice,
    site: StagePlacement,
    ready: float,
) -> Summed:
    numbers, replicas, span = int(held.trained), int(held.replicas.count), where[2]
    sharded = span.zero > 0 and int(held.replicas.shards) > 1
    return Summed(
        layer.name, part, (*sort_of(layer), part, replicas, span.zero), shapes(layer, part, cut, numbers), numbers,
        replicas, ready, site.gradient_bytes, sharded, _alone(*where, replicas, sharded=sharded), site.fabric,
        held.replicas.joined,
    )  # fmt: skip


def _alone(job: Job, pipeline: Pipeline, span: Span, replicas: int, *, sharded: bool) -> str:
    """Return why a run would refuse compression, or ""."""
    if replicas == 1:
        return "one replica: nothing is summed"
    if job.precision == "fp16":
        return "fp16: the loss scale changes between steps"
    if span.zero > 1 and sharded and pipeline.micro_batches > 1:
        return f"ZeRO-{span.zero} sums it in every micro-batch"
    if span.offload.parameters and not sharded:
        return "its parameters are on the host: PyTorch sums their gradients itself"
    return ""


def shapes(layer: Layer, part: str, cut: Slice, numbers: int) -> tuple[tuple[int, ...], ...]:
    """Return the matrices of a layer on a device, and a vector of all the rest.

    >>> from meshwright import Model
    >>> layer = Model.preset("tiny-llama").layer("block.0.mlp")
    >>> shapes(layer, "dense", Slice(tp=2), int(layer.parameters_on(Slice(tp=2))))
    ((128, 192), (128, 192), (192, 128), (128,))
    """
    found: list[tuple[int, int]] = []
    for op in layer.ops:
        for weight in op.weights:
            if not (op.tied or weight.frozen) and (weight.split == "expert") == (part == "experts"):
                found += _matrices(layer, op, weight, int(weight.on_device(cut)))
    rest = numbers - sum(rows * columns for rows, columns in found)
    if rest < 0:
        return ((numbers,),)  # only the count is known
    return (*found, (rest,)) if rest else tuple(found)


def _matrices(layer: Layer, op: Op, weight: Weight, held: int) -> list[tuple[int, int]]:
    """Return the matrices of a weight: one, or one for each expert; none for a vector."""
    side = int(layer.width_out) if op.kind == "lookup" else op.n if op.cut == "row" else op.k
    many = max(-(-weight.experts * held // max(weight.count, 1)), 1)
    if side < 2 or held <= side or held % (side * many):
        return []
    other = held // side // many
    return [(other, side) if op.kind == "lookup" or op.cut == "row" else (side, other)] * many
