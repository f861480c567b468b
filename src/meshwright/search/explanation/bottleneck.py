"""Bottleneck of a plan, in one sentence with its number, and the limit of each device group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshwright.base.units import size
from meshwright.cost.chrome_trace import NAMES
from meshwright.cost.estimate import Estimate
from meshwright.cost.layers.layer import operator_seconds
from meshwright.cost.layers.operators import Chip
from meshwright.cost.runtime import cut_of
from meshwright.plans import Job, Span, Stage
from meshwright.plans.spans import alike, layers_of
from meshwright.plans.stored_estimate import MEMORY_PARTS
from meshwright.search.explanation.features import groups_of, spans_of
from meshwright.search.explanation.time_breakdown import MEMORY_SAVERS, Spending

_LITTLE = 0.02  # of the step: below this only computation limits it
_FULL = 0.05  # of a device's memory: with less than this free, memory binds
# Axes of communication -> the degrees whose devices communicate.
_JOINED = {
    "tp": ("tp",), "ring": ("ring",), "ulysses": ("ulysses",), "zero": ("ulysses", "ring", "dp"),
    "gradients": ("ulysses", "ring", "dp"), "relayout": ("tp", "ulysses", "ring", "dp"),
}  # fmt: skip


@dataclass(frozen=True)
class Limit:
    """Largest cost of the step other than computation at full rate."""

    name: str
    seconds: float
    text: str


@dataclass(frozen=True)
class StageLimit:
    """Limit of one device group: its memory, its work, or neither (it waits for others)."""

    devices: str
    binding: Literal["memory", "work", "nothing"]
    largest: str  # the largest part of the memory
    largest_bytes: int
    total_bytes: int
    capacity_bytes: int
    busy: float  # part of the pipeline's time that the group works

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.total_bytes

    @property
    def text(self) -> str:
        free = f"{size(self.free_bytes)} free" if self.free_bytes >= 0 else f"{size(-self.free_bytes)} short"
        most = (
            f"{self.largest.replace('_', ' ')} take {size(self.largest_bytes)} of {size(self.capacity_bytes)}, {free}"
        )
        return f"devices {self.devices}: bound by {self.binding}; {most}; busy {self.busy:.0%}"


def limit_of(found: Estimate) -> Limit:
    """Return the largest cost; computation itself if nothing else costs."""
    short = max(found.memory, key=lambda row: max(row.short_by, row.host_short_by))
    if missing := max(short.short_by, short.host_short_by):
        text = f"memory: it does not fit, short by {size(missing)} on devices {short.devices}"
        return Limit("memory", 0.0, text)
    worst = max(_limits(found), key=lambda limit: limit.seconds)
    if worst.seconds >= _LITTLE * found.step_seconds:
        return worst
    spent = Spending.of(found)
    text = f"computation: {spent.part('compute'):.1%} of the step computes, at {found.mfu:.1%} of the peak"
    return Limit("computation", spent.groups["compute"], text)


def _limits(found: Estimate) -> Iterator[Limit]:
    spent = Spending.of(found)
    step, groups = spent.step_seconds, spent.groups
    saving = groups["recompute"] + sum(spent.exposed.get(axis, 0.0) for axis in MEMORY_SAVERS)
    free = min(row.capacity - row.total for row in found.memory)
    text = f"memory: {saving / step:.1%} of the step repeats or fetches what does not fit, {size(free)} are free"
    yield Limit("memory", saving, text)
    yield from _links(found, spent)
    bubble = groups["bubble"]
    yield Limit("bubble", bubble, f"the pipeline: devices wait {bubble / step:.1%} of the step for other stages")
    small = small_products(found)
    text = f"small matrix products: tiles that are not full cost about {small / step:.1%} of the step"
    yield Limit("small products", small, text)
    words = {
        "optimizer": "the optimizer updates for", "host": "devices wait for the host to issue kernels for",
        "stragglers": "devices wait for the slowest of them and the end of the step for",
    }  # fmt: skip
    if any(span.offload.optimizer for span in spans_of(found.plan)):
        words["optimizer"] = "memory is short, and the host updates what it holds of the optimizer states for"
    for name, verb in words.items():
        yield Limit(name, groups[name], f"{name}: {verb} {groups[name] / step:.1%} of the step")


def _links(found: Estimate, spent: Spending) -> Iterator[Limit]:
    """Yield exposed communication, separated by whether it leaves a node."""
    axes = {a: s for a, s in spent.exposed.items() if a not in MEMORY_SAVERS}
    axes["gradients"] = spent.groups["gradients"]
    for outside, name in ((True, "links between nodes"), (False, "links inside a node")):
        mine = {a: s for a, s in axes.items() if s > 0 and _leaves_node(found, a) is outside}
        seconds = sum(mine.values())
        most = max(mine, key=lambda axis: mine[axis], default="")
        text = f"{name}: {seconds / spent.step_seconds:.1%} of the step is communication that nothing hides"
        yield Limit(name, seconds, f"{text}, most of it {NAMES.get(most, most)}")


def _leaves_node(found: Estimate, axis: str) -> bool:
    """Return True if devices that share an axis are in different nodes, on any stage."""
    stages = [stage for p in found.plan.pipelines for stage in p.stages]
    return axis == "between pipelines" or any(_spread(found.job, stage, axis) for stage in stages)


def _spread(job: Job, stage: Stage, axis: str) -> bool:
    ranks = stage.ranks
    for span in stage.spans:
        if axis == "ep":
            last = span.ep * span.etp - 1
        else:
            last = sum((getattr(span, a) - 1) * stride for a, stride in _strides(span) if a in _JOINED[axis])
        if job.cluster.node(ranks[0]) != job.cluster.node(ranks[min(last, len(ranks) - 1)]):
            return True
    return False


def _strides(span: Span) -> Iterator[tuple[str, int]]:
    """Yield (axis, positions from one of its members to the next)."""
    stride = 1
    for axis in span.order:
        yield axis, stride
        stride *= getattr(span, axis)


def small_products(found: Estimate) -> float:
    """Return the approximate seconds that matrix products take beyond their FLOPs at the sustained rate.

    Forward products are priced as the plan cuts them; a backward pass counts as two of them.
    """
    job, lost = found.job, 0.0
    for pipeline in found.plan.pipelines:
        for stage in pipeline.stages:
            chip = Chip.of(job.cluster.device(stage.ranks[0]), job.precision, found.runtime)
            for span in stage.spans:
                cut = cut_of(span, span.share(pipeline.samples, 0), job, found.runtime)
                for layer, count in alike(layers_of(job.model, span.layers)):
                    taken = operator_seconds(layer, cut, chip, found.runtime)
                    for op in (op for op in layer.ops if op.kind == "matmul" and op.cut != "expert"):
                        ideal = float(op.forward_flops(cut, layer.length(job.seq_len))) / chip.products.rate
                        part = pipeline.micro_batches / groups_of(pipeline) / len(found.plan.pipelines)
                        lost += 3 * count * max(taken[op.name] - ideal, 0.0) * part
    return lost


def stage_limits(found: Estimate) -> tuple[StageLimit, ...]:
    """Return one limit per device group, in the order of the plan."""
    rows, limits = iter(found.memory), []
    for pipeline in found.pipelines:
        busy = [0.0] * pipeline.timeline.groups
        for event in pipeline.timeline.events:
            busy[event.group] += event.end - event.start
        for work in busy:
            row = next(rows)
            largest = max((name for name, _, _ in MEMORY_PARTS), key=lambda name: getattr(row, name))
            full = row.capacity - row.total < _FULL * row.capacity
            binding: Literal["memory", "work", "nothing"] = (
                "memory" if full else "work" if work >= 0.99 * max(busy) else "nothing"
            )
            limits.append(
                StageLimit(
                    row.devices, binding, largest, getattr(row, largest), row.total, row.capacity,
                    work / pipeline.timeline.seconds,
                )
            )  # fmt: skip
    return tuple(limits)
