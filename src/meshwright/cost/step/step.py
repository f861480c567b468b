"""Time of a whole step: the pipeline event by event, gradients, optimizer, and the wait for the slowest device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import log2

import numpy as np

from meshwright.cost.compression import Codec
from meshwright.cost.constants import DEFAULT, Constants
from meshwright.cost.layers.collectives import send_seconds
from meshwright.cost.layers.placement import StagePlacement
from meshwright.cost.layers.stage import StageTime, stage_time
from meshwright.cost.memory.device_memory import sorts_of_devices, stages_of
from meshwright.cost.runtime import Runtime, cut_of
from meshwright.cost.step.pipeline import StageTimes, Timeline, durations, simulate
from meshwright.cost.step.update import Sites, gradient_seconds, optimizer_seconds
from meshwright.plans import Job, Pipeline, Span
from meshwright.plans.action_table import action_table
from meshwright.plans.spans import layers_of

_LOOKED_AT = 32  # devices of a stage whose links to the next are compared


@dataclass(frozen=True)
class PipelineTime:
    """One pipeline of a plan over one step."""

    timeline: Timeline
    stages: tuple[StageTime, ...]
    micro_batches: int
    exposed: tuple[float, ...]  # exposed seconds of gradient reduction and parameter gathering, per device group
    covered: tuple[float, ...]  # overlapped seconds of the same, per device group
    optimizer: tuple[float, ...]  # seconds of the update per device group
    waiting: float  # seconds for the slowest of many devices, and of the host between steps
    seconds: float

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of the step by part, a mean over device groups; they add up to the step."""
        count = self.timeline.groups
        total: dict[str, float] = defaultdict(float)
        for time in self.stages:
            for (when, name), seconds in time.spent.items():
                total[f"{when} {name}" if name == "compute" else name] += seconds * self.micro_batches / count
        total["gradients"] = sum(self.exposed) / count
        total["optimizer"] = sum(self.optimizer) / count
        total["stragglers"] = self.waiting  # the slowest of many devices, and the host's work between steps
        # The rest is waiting for other stages, or sending to them.
        total["pipeline bubble"] = self.seconds - sum(total.values())
        # Differences of large numbers leave rounding errors.
        return {name: max(s, 0.0) for name, s in total.items() if s > 1e-9 * self.seconds}

    @cached_property
    def hidden(self) -> dict[str, float]:
        """Seconds of overlapped communication per step, a mean over device groups."""
        total: dict[str, float] = defaultdict(float)
        for time in self.stages:
            for (_, name), seconds in time.hidden.items():
                total[name] += seconds * self.micro_batches / self.timeline.groups
        total["gradients"] = sum(self.covered) / self.timeline.groups
        return {name: seconds for name, seconds in total.items() if seconds > 1e-12}


def pipeline_time(
    job: Job, pipeline: Pipeline, runtime: Runtime, constants: Constants = DEFAULT,
    codecs: Mapping[str, Codec] | None = None,
) -> PipelineTime:  # fmt: skip
    """Simulate the schedule with the times of the stages, then add gradients and the optimizer.

    `codecs` compress the gradients of some layers, by name.
    """
    groups = len(pipeline.stages) // pipeline.schedule.virtual
    if pipeline.schedule.name == "dualpipev":
        # The purpose of DualPipe: each forward runs beside a backward, whose computation overlaps its all-to-alls.
        runtime = replace(runtime, overlap_experts=max(runtime.overlap_experts, constants.dual_pipe))
    sites = _sites(job, pipeline, runtime, constants)
    times = tuple(_slowest(job, pipeline, s, sites[s]) for s in range(len(pipeline.stages)))
    sends = [_send(job, pipeline, s, runtime, constants) for s in range(len(pipeline.stages) - 1)]
    table = action_table(pipeline.schedule, groups, pipeline.micro_batches)
    blocking = 0.0 if runtime.overlap_pipeline else 1.0  # a blocking send is part of the sender's action
    send = np.array([sends])
    forward, backward, weight = np.array([[t.forward, t.backward, t.weight_gradient] for t in times]).T[:, None]
    kinds, delay = durations(StageTimes(forward, backward, weight, send, blocking * send))
    seconds, delays = {kind: value[0].tolist() for kind, value in kinds.items()}, delay[0].tolist()
    timeline = simulate(table, lambda action: seconds[action[1]][action[0]], lambda a, b: delays[min(a, b)])
    reduced = [gradient_seconds(job, pipeline, g, sites, codecs) for g in range(groups)]
    settled = [_settled(pipeline, g, times, *reduced[g], sites, constants) for g in range(groups)]
    exposed, covered = ([pair[i] for pair in settled] for i in (0, 1))
    optimizer = tuple(optimizer_seconds(job, pipeline, g, sites) for g in range(groups))
    ends = [end + late for end, late in zip(timeline.ends, exposed, strict=True)]
    size = min(group.devices_per_node for group in job.cluster.groups)
    nodes = max(len({rank for stage in pipeline.stages for rank in stage.ranks}) / size, 1)
    work = max(ends) + max(optimizer)
    waiting = work * constants.straggler * log2(nodes) + runtime.step_seconds
    return PipelineTime(
        timeline, times, pipeline.micro_batches, tuple(exposed), tuple(covered), optimizer, waiting, work + waiting
    )


def _sites(job: Job, pipeline: Pipeline, runtime: Runtime, constants: Constants) -> Sites:
    """Return one device of every kind of each stage, with its position; stages on the same devices share results."""
    known: dict[tuple[object, ...], list[tuple[StagePlacement, int]]] = {}
    found = []
    for stage in pipeline.stages:
        key = (stage.devices, tuple(span.shares for span in stage.spans))
        if key not in known:
            sorts = sorts_of_devices(job, [stage])
            known[key] = [
                (StagePlacement.of(job, stage.ranks, where, runtime, constants), position) for where, position in sorts
            ]
        found.append(known[key])
    return found


def _slowest(job: Job, pipeline: Pipeline, index: int, sites: list[tuple[StagePlacement, int]]) -> StageTime:
    """Return the time of a stage on the slowest of its kinds of devices."""
    stage = pipeline.stages[index]

    def share(position: int) -> Callable[[Span], int]:
        return lambda span: span.share(pipeline.samples, span.replica(position))

    times = [stage_time(job, pipeline.stages, stage, site, share(position)) for site, position in sites]
    return max(times, key=lambda t: t.forward + t.backward)


def _send(job: Job, pipeline: Pipeline, index: int, runtime: Runtime, constants: Constants) -> float:
    """Return the seconds of sending a stage's output, over the slowest of the links to the next."""
    here, there = pipeline.stages[index], pipeline.stages[index + 1]
    span = here.spans[-1]
    layer = layers_of(job.model, span.layers)[-1]
    samples = max(span.share(pipeline.samples, replica) for replica in range(span.dp if span.shares else 1))
    moved = float(layer.output_bytes(cut_of(span, samples, job, runtime)))
    ours, theirs = here.ranks, there.ranks
    few = {*range(0, len(ours), max(len(ours) // _LOOKED_AT, 1)), len(ours) - 1}
    pairs = {(ours[i], theirs[i * len(theirs) // len(ours)]) for i in few}
    return max(send_seconds(job.cluster, moved, a, b, constants) for a, b in pairs)


def _settled(
    pipeline: Pipeline, group: int, times: tuple[StageTime, ...], reduce: float, gather: float, sites: Sites,
    constants: Constants,
) -> tuple[float, float]:  # fmt: skip
    """Return (exposed, overlapped) seconds of the update.

    Reductions overlap with the last backward pass, gathering with the first forward pass.
    """
    mine = stages_of(pipeline, group)
    runtime = sites[mine[0]][0][0].runtime
    late = covered = 0.0
    for moved, window, hides in (
        (reduce, sum(times[s].backward for s in mine), runtime.overlap_gradients),
        (gather, sum(times[s].forward for s in mine), runtime.overlap_parameters),
    ):
        under = min(moved, window) if hides else 0.0
        late += moved - under + constants.contention * under
        covered += under
    return late, covered
