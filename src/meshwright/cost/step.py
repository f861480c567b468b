"""Time of a whole step: the pipeline event by event, then gradients, optimizer, and waiting for the slowest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log2

from meshwright.cost.collectives import Fabric, gather_seconds, reduce_seconds, send_seconds
from meshwright.cost.constants import DEFAULT, Constants
from meshwright.cost.memory import sorts_of_devices
from meshwright.cost.pipeline import Timeline, simulate
from meshwright.cost.placement import halves
from meshwright.cost.runtime import Runtime, cut_of
from meshwright.cost.stage import (
    Site,
    StageTime,
    between,
    gradient_bytes,
    parameter_bytes,
    parameter_groups,
    stage_time,
)  # fmt: skip
from meshwright.model import Layer, Slice, precision
from meshwright.plan import OPTIMIZERS, Job, Pipeline, Plan, Span, group_of_stage
from meshwright.plan.actions import action_table
from meshwright.plan.schedule import Action
from meshwright.plan.spans import alike, layers_of

_LOOKED_AT = 32  # devices of a stage whose links to the next are compared
Sites = list[list[tuple[Site, int]]]  # of every stage: one device of each sort, with its position in the stage


@dataclass(frozen=True)
class PipelineTime:
    """One pipeline of a plan over one step."""

    timeline: Timeline
    stages: tuple[StageTime, ...]
    groups: tuple[tuple[int, ...], ...]  # the stages of each device group
    micro_batches: int
    gradients: tuple[float, ...]  # seconds of gradient reduction and parameter gathering per device group
    exposed: tuple[float, ...]  # the part of them that delays the step
    covered: tuple[float, ...]  # the part of them that runs under computation
    optimizer: tuple[float, ...]  # seconds of the update per device group
    sends: tuple[float, ...]  # seconds of one message from each stage to the next
    waiting: float  # seconds for the slowest of many devices, and of the host between steps
    seconds: float

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of the step by what they are spent on, a mean over device groups; they add up to the step."""
        count = len(self.groups)
        total: dict[str, float] = defaultdict(float)
        for time in self.stages:
            for (when, name), seconds in time.spent.items():
                total[f"{when} {name}" if name == "compute" else name] += seconds * self.micro_batches / count
        total["gradients"] = sum(self.exposed) / count
        total["optimizer"] = sum(self.optimizer) / count
        total["stragglers"] = self.waiting  # the slowest of many devices, and what the host does between steps
        # All else is waiting for other stages, or sending to them.
        total["pipeline bubble"] = self.seconds - sum(total.values())
        # Differences of large numbers leave dust.
        return {name: max(s, 0.0) for name, s in total.items() if s > 1e-9 * self.seconds}

    @cached_property
    def hidden(self) -> dict[str, float]:
        """Seconds of communication per step under computation, a mean over device groups."""
        total: dict[str, float] = defaultdict(float)
        for time in self.stages:
            for (_, name), seconds in time.hidden.items():
                total[name] += seconds * self.micro_batches / len(self.groups)
        total["gradients"] = sum(self.covered) / len(self.groups)
        return {name: seconds for name, seconds in total.items() if seconds > 1e-12}


def pipeline_time(job: Job, pipeline: Pipeline, runtime: Runtime, constants: Constants = DEFAULT) -> PipelineTime:
    """Simulate the schedule with the times of the stages, then add what ends a step."""
    groups = len(pipeline.stages) // pipeline.schedule.virtual
    if pipeline.schedule.name == "dualpipev":
        # What the schedule is for: each forward runs beside a backward, whose computation hides its all-to-alls.
        runtime = replace(runtime, overlap_experts=max(runtime.overlap_experts, constants.dual_pipe))
    sites = _sites(job, pipeline, runtime, constants)
    times = tuple(_slowest(job, pipeline, s, sites[s]) for s in range(len(pipeline.stages)))
    sends = [_send(job, pipeline, s, runtime, constants) for s in range(len(pipeline.stages) - 1)]
    table = action_table(pipeline.schedule, groups, pipeline.micro_batches)
    blocking = 0.0 if runtime.overlap_pipeline else 1.0  # a blocking send is part of the sender's action
    timeline = simulate(table, _durations(times, sends, blocking), lambda a, b: (1 - blocking) * sends[min(a, b)])
    reduced = [_gradients(job, pipeline, g, sites, runtime) for g in range(groups)]
    settled = [_settled(pipeline, g, times, *reduced[g], runtime, constants) for g in range(groups)]
    exposed, covered = ([pair[i] for pair in settled] for i in (0, 1))
    optimizer = tuple(_optimizer(job, pipeline, g, sites, runtime) for g in range(groups))
    ends = [end + late for end, late in zip(timeline.ends, exposed, strict=True)]
    size = min(group.devices_per_node for group in job.cluster.groups)
    nodes = max(len({rank for stage in pipeline.stages for rank in stage.ranks}) / size, 1)
    work = max(ends) + max(optimizer)
    waiting = work * constants.straggler * log2(nodes) + runtime.step_seconds
    return PipelineTime(
        timeline, times, tuple(tuple(_stages_of(pipeline, g)) for g in range(groups)), pipeline.micro_batches,
        tuple(map(sum, reduced)), tuple(exposed), tuple(covered), optimizer, tuple(sends), waiting, work + waiting,
    )  # fmt: skip


def _sites(job: Job, pipeline: Pipeline, runtime: Runtime, constants: Constants) -> Sites:
    """One device of every sort of each stage, with its position; stages on the same devices share what is known of them."""
    known: dict[tuple[object, ...], list[tuple[Site, int]]] = {}
    found = []
    for stage in pipeline.stages:
        key = (stage.devices, tuple(span.shares for span in stage.spans))
        if key not in known:
            sorts = sorts_of_devices(job, [stage])
            known[key] = [(Site.of(job, stage, where, runtime, constants), position) for where, position in sorts]
        found.append(known[key])
    return found


def _slowest(job: Job, pipeline: Pipeline, index: int, sites: list[tuple[Site, int]]) -> StageTime:
    """A stage is as fast as the slowest of its sorts of devices."""
    stage = pipeline.stages[index]

    def share(position: int) -> Callable[[Span], int]:
        return lambda span: span.share(pipeline.samples, span.replica(position))

    times = [stage_time(job, pipeline.stages, stage, site, share(position)) for site, position in sites]
    return max(times, key=lambda t: t.forward + t.backward)


def _send(job: Job, pipeline: Pipeline, index: int, runtime: Runtime, constants: Constants) -> float:
    """What a stage hands to the next, over the slowest of the links between their devices."""
    here, there = pipeline.stages[index], pipeline.stages[index + 1]
    span = here.spans[-1]
    layer = layers_of(job.model, span.layers)[-1]
    samples = max(span.share(pipeline.samples, replica) for replica in range(span.dp if span.shares else 1))
    moved = float(layer.output_bytes(cut_of(span, samples, job, runtime)))
    ours, theirs = here.ranks, there.ranks
    few = {*range(0, len(ours), max(len(ours) // _LOOKED_AT, 1)), len(ours) - 1}
    pairs = {(ours[i], theirs[i * len(theirs) // len(ours)]) for i in few}
    return max(send_seconds(job.cluster, moved, a, b, constants) for a, b in pairs)


def _durations(times: tuple[StageTime, ...], sends: list[float], blocking: float) -> Callable[[Action], float]:
    """Seconds of an action; a runtime that sends synchronously keeps the sender busy."""
    ahead = [*(blocking * s for s in sends), 0.0]
    back = [0.0, *(blocking * s for s in sends)]
    seconds = {}
    for stage, time in enumerate(times):
        weight = min(time.weight_gradient, time.backward)
        seconds[stage, "F"] = time.forward + ahead[stage]
        seconds[stage, "B"] = time.backward + back[stage]
        seconds[stage, "I"] = time.backward - weight + back[stage]
        seconds[stage, "W"] = weight
    return lambda action: seconds[action[0], action[1]]


def _stages_of(pipeline: Pipeline, group: int) -> list[int]:
    count = len(pipeline.stages)
    return [s for s in range(count) if group_of_stage(pipeline.schedule, count, s) == group]


def _gradients(job: Job, pipeline: Pipeline, group: int, sites: Sites, runtime: Runtime) -> tuple[float, float]:
    """Seconds to reduce a device's gradients over the replicas, and to gather the parameters after the update.

    ZeRO-1 scatters the gradients to their shards; ZeRO-2 and 3 do so micro-batch by micro-batch, which `stage.py` counts.
    Hybrid groups sum their shards with the other groups' once per step.
    """
    mine = _stages_of(pipeline, group)
    return max(
        (_reduced(job, pipeline, mine, [sites[s][min(sort, len(sites[s]) - 1)][0] for s in mine]) for sort in range(
            max(len(sites[s]) for s in mine))),
        key=sum,
    )  # fmt: skip


def _reduced(job: Job, pipeline: Pipeline, mine: list[int], sites: list[Site]) -> tuple[float, float]:
    """The same for one sort of device, whose place in each stage is given."""
    reduce = gather = 0.0
    for s, site in zip(mine, sites, strict=True):
        runtime, fabric = site.runtime, site.fabric
        for span in pipeline.stages[s].spans:
            cut = cut_of(span, 1, job, runtime)
            for held in parameter_groups(layers_of(job.model, span.layers), cut, span, site):
                if held.replicas == 1 or not held.count:
                    continue
                shards, moved = span.shards(held.replicas), held.trained * gradient_bytes(runtime, job.precision)
                inside, across = halves(held.joined, shards, held.replicas)
                if span.zero == 0 or shards == 1:
                    reduce += float(reduce_seconds(fabric, moved, held.replicas, held.joined))
                    continue
                if span.zero == 1:
                    reduce += float(gather_seconds(fabric, moved, shards, inside))
                    gather += shards * runtime.shard_seconds
                if shards < held.replicas:
                    reduce += float(reduce_seconds(fabric, moved / shards, held.replicas // shards, across))
                if span.zero in {1, 2}:
                    back = held.trained * parameter_bytes(runtime, job.precision)
                    gather += float(gather_seconds(fabric, back, shards, inside))
        reduce += _tied(job, pipeline, s, mine, site)
    return reduce, gather


def _tied(job: Job, pipeline: Pipeline, stage: int, mine: list[int], site: Site) -> float:
    """A head whose weights live on another stage sums its gradients with the embedding's (Megatron: first and last)."""
    held = {
        layer.name for s in mine for span in pipeline.stages[s].spans for layer in layers_of(job.model, span.layers)
    }
    seconds = 0.0
    for span in pipeline.stages[stage].spans:
        cut = cut_of(span, 1, job, site.runtime)
        for layer in layers_of(job.model, span.layers):
            if layer.tied_to and layer.tied_to not in held:
                count = float(layer.parameters_on(cut, with_tied=True)) - float(layer.parameters_on(cut))
                moved = count * gradient_bytes(site.runtime, job.precision)
                other = pipeline.stages[0].ranks[0]
                seconds += 2 * send_seconds(job.cluster, moved, site.ranks[0], other, site.constants)
    return seconds


def _settled(
    pipeline: Pipeline, group: int, times: tuple[StageTime, ...], reduce: float, gather: float, runtime: Runtime,
    constants: Constants,
) -> tuple[float, float]:  # fmt: skip
    """(what delays the step, what runs under computation): reductions under the last backward pass, gathering under the
    first forward pass."""
    mine = _stages_of(pipeline, group)
    late = covered = 0.0
    for moved, window, hides in (
        (reduce, sum(times[s].backward for s in mine), runtime.overlap_gradients),
        (gather, sum(times[s].forward for s in mine), runtime.overlap_parameters),
    ):
        under = min(moved, window) if hides else 0.0
        late += moved - under + constants.contention * under
        covered += under
    return late, covered


def _optimizer(job: Job, pipeline: Pipeline, group: int, sites: Sites, runtime: Runtime) -> float:
    """Read and write of states, bound by memory, on the slowest sort of device."""
    mine = _stages_of(pipeline, group)
    sorts = max(len(sites[s]) for s in mine)
    return max(
        sum(_update(job, pipeline, s, sites[s][min(sort, len(sites[s]) - 1)][0], runtime) for s in mine)
        for sort in range(sorts)
    )


def _update(job: Job, pipeline: Pipeline, stage: int, site: Site, runtime: Runtime) -> float:
    """One stage's states on one device; offloaded ones are updated by the host's processors."""
    seconds = 0.0
    scale = (precision(job.precision).master + OPTIMIZERS[job.optimizer] + 4.0) / 16.0  # 16: AdamW in mixed precision
    for span in pipeline.stages[stage].spans:
        cut, layers = cut_of(span, 1, job, runtime), layers_of(job.model, span.layers)
        if job.optimizer == "muon":
            seconds += _orthogonalise(layers, cut, 1 / (span.shards(span.replicas) if span.zero else 1), site)
        for held in parameter_groups(layers, cut, span, site):
            mine = held.trained / (span.shards(held.replicas) if span.zero else 1)
            moved, away = mine * runtime.optimizer_bytes * scale, span.offload.optimizer
            seconds += (1 - away) * moved / site.chip.memory
            # Gradients go to the host, parameters come back; processors update what lies between.
            back = parameter_bytes(runtime, job.precision)
            seconds += away * (moved / site.host_update + mine * (4 + back) / site.host)
    return seconds


def _orthogonalise(layers: Sequence[Layer], cut: Slice, part: float, site: Site) -> float:
    """Muon: five Newton-Schulz steps per matrix of m x n, m the smaller: 4 m^2 n + 2 m^3 FLOPs each (Jordan, 2024)."""
    flops = 0.0
    for layer, number in alike(layers):
        for op in layer.ops:
            if op.kind == "matmul" and layer.kind != "head" and op.k:
                held = float(sum(w.on_device(cut) for w in op.weights)) / (op.k * op.n)  # matrices of this shape
                m, n = min(op.k, op.n), max(op.k, op.n)
                flops += number * held * 5 * (4.0 * m * m * n + 2.0 * m**3)
    return flops * part / site.chip.product_16


def between_pipelines(job: Job, plan: Plan, runtime: Runtime, constants: Constants = DEFAULT) -> float:
    """Seconds in which several pipelines of a plan sum their gradients, after their own replicas have done so."""
    if len(plan.pipelines) == 1:
        return 0.0
    touched = sorted({job.cluster.group_index(p.stages[0].ranks[0]) for p in plan.pipelines})
    worst = 0.0
    for pipeline in plan.pipelines:
        for group in range(len(pipeline.stages) // pipeline.schedule.virtual):
            held = 0.0
            for s in _stages_of(pipeline, group):
                stage = pipeline.stages[s]
                site = Site.of(job, stage, job.cluster.group_index(stage.ranks[0]), runtime, constants)
                for span in stage.spans:
                    cut = cut_of(span, 1, job, runtime)
                    for part in parameter_groups(layers_of(job.model, span.layers), cut, span, site):
                        held += part.trained / (span.shards(part.replicas) if span.zero else 1)
            home = job.cluster.groups[touched[0]]
            fabric = Fabric.of(home, constants, between(job.cluster, touched) if len(touched) > 1 else None)
            apart = (1,) * (len(fabric.tiers) - 1) + (len(plan.pipelines),)  # pipelines seldom share a node
            moved = held * gradient_bytes(runtime, job.precision)
            worst = max(worst, float(reduce_seconds(fabric, moved, len(plan.pipelines), apart)))
    return worst
