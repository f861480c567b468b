"""Time of a whole step: the pipeline event by event, then gradients, optimizer, and waiting for the slowest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import log2

from meshwright.cost.collectives import gather_seconds, reduce_seconds, send_seconds
from meshwright.cost.constants import DEFAULT, Constants
from meshwright.cost.memory import sorts_of_devices
from meshwright.cost.pipeline import Timeline, simulate
from meshwright.cost.runtime import Runtime, cut_of
from meshwright.cost.stage import Site, StageTime, parameter_groups, rank_step, stage_time
from meshwright.model import precision
from meshwright.plan import OPTIMIZERS, Job, Pipeline, Plan, group_of_stage
from meshwright.plan.actions import action_table
from meshwright.plan.schedule import Action
from meshwright.plan.spans import layers_of

Sites = list[list[tuple[Site, int]]]  # of every stage: its sorts of devices, with the samples each takes


@dataclass(frozen=True)
class PipelineTime:
    """One pipeline of a plan over one step."""

    timeline: Timeline
    stages: tuple[StageTime, ...]
    groups: tuple[tuple[int, ...], ...]  # the stages of each device group
    micro_batches: int
    gradients: tuple[float, ...]  # seconds of gradient reduction and parameter gathering per device group
    exposed: tuple[float, ...]  # the part of them that nothing hides
    optimizer: tuple[float, ...]  # seconds of the update per device group
    sends: tuple[float, ...]  # seconds of one message from each stage to the next
    seconds: float

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of the step by what they are spent on, a mean over device groups; they add up to the step."""
        count = len(self.groups)
        total: dict[str, float] = defaultdict(float)
        for time in self.stages:
            for (when, name), seconds in time.spent.items():
                total[f"{when} {name}" if name == "compute" else name] += seconds * self.micro_batches / count
        # Whatever else happens before the last group is done: waiting for other stages, and blocking sends.
        total["pipeline"] = self.timeline.seconds - sum(total.values())
        total["gradients"] = sum(self.exposed) / count
        total["optimizer"] = sum(self.optimizer) / count
        # The slowest of many devices, and what the host does between steps.
        total["stragglers"] = self.seconds - sum(total.values())
        return {name: seconds for name, seconds in total.items() if abs(seconds) > 1e-12}

    @cached_property
    def hidden(self) -> dict[str, float]:
        """Seconds of communication per step under computation, a mean over device groups."""
        total: dict[str, float] = defaultdict(float)
        for time in self.stages:
            for (_, name), seconds in time.hidden.items():
                total[name] += seconds * self.micro_batches / len(self.groups)
        late = zip(self.gradients, self.exposed, strict=True)
        total["gradients"] = sum(max(whole - seen, 0.0) for whole, seen in late) / len(self.groups)
        return {name: seconds for name, seconds in total.items() if seconds > 1e-12}


def pipeline_time(job: Job, pipeline: Pipeline, runtime: Runtime, constants: Constants = DEFAULT) -> PipelineTime:
    """Simulate the schedule with the times of the stages, then add what ends a step."""
    groups = len(pipeline.stages) // pipeline.schedule.virtual
    sites = [_sites(job, pipeline, s, runtime, constants) for s in range(len(pipeline.stages))]
    times = tuple(_slowest(job, pipeline, s, sites[s]) for s in range(len(pipeline.stages)))
    sends = [_send(job, pipeline, s, sites[s][0][0]) for s in range(len(pipeline.stages) - 1)]
    table = action_table(pipeline.schedule, groups, pipeline.micro_batches)
    timeline = simulate(table, _durations(times, sends, runtime), lambda a, b: sends[min(a, b)])
    reduced = [_gradients(job, pipeline, g, sites, runtime) for g in range(groups)]
    exposed = [_exposed(pipeline, g, times, *reduced[g], runtime, constants) for g in range(groups)]
    optimizer = tuple(_optimizer(job, pipeline, g, sites, runtime) for g in range(groups))
    ends = [end + late for end, late in zip(timeline.ends, exposed, strict=True)]
    size = min(group.devices_per_node for group in job.cluster.groups)
    nodes = max(len({rank for stage in pipeline.stages for rank in stage.ranks}) / size, 1)
    waiting = 1 + constants.straggler * log2(nodes)
    return PipelineTime(
        timeline, times, tuple(tuple(_stages_of(pipeline, g)) for g in range(groups)), pipeline.micro_batches,
        tuple(map(sum, reduced)), tuple(exposed), optimizer, tuple(sends),
        (max(ends) + max(optimizer)) * waiting + runtime.step_seconds,
    )  # fmt: skip


def _sites(job: Job, pipeline: Pipeline, index: int, runtime: Runtime, constants: Constants) -> list[tuple[Site, int]]:
    """Every sort of device of a stage, with the samples its replica takes."""
    stage = pipeline.stages[index]
    found = []
    for where, position in sorts_of_devices(job, [stage]):
        shares = [span.share(pipeline.samples, span.replica(position)) for span in stage.spans]
        found.append((Site.of(job, stage, where, runtime, constants), max(shares)))
    return found


def _slowest(job: Job, pipeline: Pipeline, index: int, sites: list[tuple[Site, int]]) -> StageTime:
    """A stage is as fast as the slowest of its sorts of devices."""
    stage = pipeline.stages[index]
    times = [stage_time(job, pipeline.stages, stage, site, share) for site, share in sites]
    return max(times, key=lambda t: t.forward + t.backward)


def _send(job: Job, pipeline: Pipeline, index: int, site: Site) -> float:
    """What a stage hands to the next, over the link between their devices."""
    here, there = pipeline.stages[index], pipeline.stages[index + 1]
    span = here.spans[-1]
    layer = layers_of(job.model, span.layers)[-1]
    samples = max(span.share(pipeline.samples, replica) for replica in range(span.dp if span.shares else 1))
    moved = float(layer.output_bytes(cut_of(span, samples, job, site.runtime)))
    a, b = here.ranks[0], there.ranks[0]
    if a == b:
        return 0.0
    if job.cluster.group_index(a) != job.cluster.group_index(b):
        link = job.cluster.link(a, b)
        return moved / (link.bandwidth * site.constants.network) + link.latency * site.constants.hop
    return float(send_seconds(site.fabric, moved, abs(b - a)))


def _durations(times: tuple[StageTime, ...], sends: list[float], runtime: Runtime) -> Callable[[Action], float]:
    """Seconds of an action; a runtime that sends synchronously keeps the sender busy."""
    blocking = 0.0 if runtime.overlap_pipeline else 1.0
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

    ZeRO-1 scatters the gradients to their shards, hybrid groups then sum theirs with the other groups'. ZeRO-2 and 3
    scatter them micro-batch by micro-batch, which `stage.py` counts.
    """
    reduce = gather = 0.0
    for s in _stages_of(pipeline, group):
        site, step = sites[s][0][0], rank_step(pipeline.stages[s])
        for span in pipeline.stages[s].spans:
            cut = cut_of(span, 1, job, runtime)
            for count, replicas, near in parameter_groups(layers_of(job.model, span.layers), cut, span):
                if replicas == 1 or not count:
                    continue
                shards, moved, apart = span.shards(replicas), count * runtime.gradient_bytes, near * step
                if span.zero == 0 or shards == 1:
                    reduce += float(reduce_seconds(site.fabric, moved, replicas, apart))
                elif span.zero == 1:
                    reduce += float(gather_seconds(site.fabric, moved, shards, apart))
                    gather += shards * runtime.shard_seconds
                    if shards < replicas:
                        rest = replicas / shards
                        reduce += float(reduce_seconds(site.fabric, moved / shards, rest, apart * shards))
                if span.zero in {1, 2} and shards > 1:
                    gather += float(gather_seconds(site.fabric, count * runtime.gather_bytes, shards, apart))
    return reduce, gather


def _exposed(
    pipeline: Pipeline, group: int, times: tuple[StageTime, ...], reduce: float, gather: float, runtime: Runtime,
    constants: Constants,
) -> float:  # fmt: skip
    """What the last backward pass does not hide of the reduction, and the first forward pass of the gathering."""
    mine = _stages_of(pipeline, group)
    total = 0.0
    for moved, window, hides in (
        (reduce, sum(times[s].backward for s in mine), runtime.overlap_gradients),
        (gather, sum(times[s].forward for s in mine), runtime.overlap_parameters),
    ):
        under = min(moved, window) if hides else 0.0
        total += moved - under + constants.contention * under
    return total


def _optimizer(job: Job, pipeline: Pipeline, group: int, sites: Sites, runtime: Runtime) -> float:
    """Read and write of states, bound by memory; offloaded states are updated by the host's processors."""
    seconds = 0.0
    scale = (precision(job.precision).master + OPTIMIZERS[job.optimizer] + 4.0) / 16.0  # 16: AdamW in mixed precision
    for s in _stages_of(pipeline, group):
        site = sites[s][0][0]
        for span in pipeline.stages[s].spans:
            cut = cut_of(span, 1, job, runtime)
            for count, replicas, _ in parameter_groups(layers_of(job.model, span.layers), cut, span):
                mine = count / (span.shards(replicas) if span.zero else 1)
                moved, away = mine * runtime.optimizer_bytes * scale, span.offload.optimizer
                seconds += (1 - away) * moved / site.chip.memory
                # Gradients go to the host, parameters come back; processors update what lies between.
                seconds += away * (moved / site.host_update + mine * (4 + runtime.gather_bytes) / site.host)
    return seconds


def between_pipelines(job: Job, plan: Plan, runtime: Runtime, constants: Constants = DEFAULT) -> float:
    """Seconds in which several pipelines of a plan sum their gradients, after their own replicas have done so."""
    if len(plan.pipelines) == 1:
        return 0.0
    worst = 0.0
    for pipeline in plan.pipelines:
        apart = len({rank for stage in pipeline.stages for rank in stage.ranks})
        for stage in pipeline.stages:
            site = Site.of(job, stage, job.cluster.group_index(stage.ranks[0]), runtime, constants)
            held = 0.0
            for span in stage.spans:
                cut = cut_of(span, 1, job, runtime)
                for count, replicas, _ in parameter_groups(layers_of(job.model, span.layers), cut, span):
                    held += count / (span.shards(replicas) if span.zero else 1)
            moved = held * runtime.gradient_bytes
            worst = max(worst, float(reduce_seconds(site.fabric, moved, len(plan.pipelines), apart)))
    return worst
