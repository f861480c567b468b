"""`estimate(job, plan)`: step time, throughput, utilisation, memory and the timeline of any plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from meshwright.base.units import size
from meshwright.cost.compression import codecs_of
from meshwright.cost.constants import DEFAULT, Constants, seen_in
from meshwright.cost.layers.layer import repeated_ops
from meshwright.cost.layers.operators import peak_flops
from meshwright.cost.memory.device_memory import plan_memory
from meshwright.cost.runtime import Runtime, runtime
from meshwright.cost.step.step import PipelineTime, pipeline_time
from meshwright.cost.step.update import between_pipelines
from meshwright.errors import InputError, shorten
from meshwright.models import Slice
from meshwright.plans import Job, Plan
from meshwright.plans.spans import alike, layers_of
from meshwright.plans.stored_estimate import StageMemory

MEMORY_MARGIN = 0.15  # 19 of 20 published peaks lie within this part of ours (docs/measurements.md)
CONVENTION = (
    "a multiply-add is two FLOPs; the backward pass counts twice the forward; causal masks count only the pairs they let "
    "through; MFU counts the model's own FLOPs, HFU what is repeated too; both over the dense peak of the precision that "
    "the matrix products run in"
)


@dataclass(frozen=True, repr=False)
class Estimate:
    """Time of one step of a plan, by part.

    >>> import meshwright as mw
    >>> job = mw.Job(mw.Model.preset("llama3-8b"), mw.Cluster.preset("8xh100"), global_batch=64, seq_len=8192)
    >>> found = mw.estimate(job, mw.Plan.of({"zero": 3, "recompute": "selective"}, job))
    >>> 2 < found.step_seconds < 8 and 0.3 < found.mfu < 0.7
    True
    """

    job: Job
    plan: Plan
    runtime: Runtime
    step_seconds: float
    mfu: float
    hfu: float
    memory: tuple[StageMemory, ...]
    pipelines: tuple[PipelineTime, ...]

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.job.tokens_per_step / self.step_seconds / self.plan.devices

    @property
    def peak_memory(self) -> int:
        """Bytes on the fullest device."""
        return max(row.total for row in self.memory)

    @property
    def fits(self) -> bool:
        return not any(row.short_by or row.host_short_by for row in self.memory)

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of the step by part, a mean over device groups; they add up to the step."""
        slowest = max(self.pipelines, key=lambda p: p.seconds)
        return slowest.breakdown | {"between pipelines": rest} if (rest := self._between) > 0 else slowest.breakdown

    @property
    def _between(self) -> float:
        return self.step_seconds - max(p.seconds for p in self.pipelines)

    @cached_property
    def hidden(self) -> dict[str, float]:
        """Seconds of communication overlapped with computation per step, a mean over device groups."""
        return max(self.pipelines, key=lambda p: p.seconds).hidden

    def __repr__(self) -> str:
        return (
            f"Estimate({self.job.model.name} on {self.job.cluster.name}: {self.step_seconds:.4g} s per step, "
            f"MFU {self.mfu:.1%}, {size(self.peak_memory)} on the fullest device)"
        )

    def to_table(self) -> dict[str, Any]:
        """Return everything but the timeline, as JSON knows it."""
        return {
            "model": self.job.model.name,
            "cluster": self.job.cluster.name,
            "runtime": self.runtime.name,
            "devices": self.plan.devices,
            "global_batch": self.job.global_batch,
            "seq_len": self.job.seq_len,
            "precision": self.job.precision,
            "optimizer": self.job.optimizer,
            "step_seconds": self.step_seconds,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "flops_convention": CONVENTION,
            "fits": self.fits,
            "peak_memory_bytes": self.peak_memory,
            "memory_margin": MEMORY_MARGIN,
            "seconds": self.breakdown,
            "hidden_seconds": self.hidden,
            "memory": [msgspec.structs.asdict(row) | {"total": row.total} for row in self.memory],
        }


def estimate(
    job: Job, plan: Plan, runtime_name: str | Runtime = "meshwright", constants: Constants = DEFAULT
) -> Estimate:
    """Price a plan, from a search or written by hand, as a given framework would run it."""
    framework = runtime(runtime_name) if isinstance(runtime_name, str) else runtime_name
    _same_job(job, plan)
    constants = seen_in(job.cluster, constants)
    codecs = codecs_of(job, plan, framework)
    switched = framework.switched(plan.overlap)
    pipelines = tuple(pipeline_time(job, pipeline, switched, constants, codecs) for pipeline in plan.pipelines)
    seconds = max(p.seconds for p in pipelines) + between_pipelines(job, plan, switched, constants)
    model_flops = 3 * _forward_flops(job) * job.global_batch
    peak = _peak(job, plan) * seconds
    return Estimate(
        job, plan, framework, seconds, model_flops / peak, (model_flops + _repeated_flops(job, plan, framework)) / peak,
        tuple(plan_memory(plan, job, framework)), pipelines,
    )  # fmt: skip


def _same_job(job: Job, plan: Plan) -> None:
    """Check that the plan belongs to the job: pricing it for another would mix the two."""
    for name in ("model", "cluster", "global_batch", "seq_len", "precision", "optimizer"):
        theirs, ours = getattr(plan.job, name), getattr(job.written(), name)
        if theirs != ours:
            shown = [shorten(str(value), 40) for value in (theirs, ours)]
            raise InputError(f"the plan was made for {name} {shown[0]}, the job has {shown[1]}", field=name)


def _peak(job: Job, plan: Plan) -> float:
    """Return the FLOP/s of all devices in use, by the datasheets."""
    peaks = [peak_flops(group.device, job.precision) for group in job.cluster.groups]
    if len(peaks) == 1:
        return plan.devices * peaks[0]
    ranks = {rank for p in plan.pipelines for stage in p.stages for rank in stage.ranks}
    return sum(peaks[job.cluster.group_index(rank)] for rank in ranks)


def _forward_flops(job: Job) -> float:
    """Return the forward FLOPs of one sample, over all devices."""
    whole = Slice(1, job.seq_len, job.precision)
    return float(sum(count * layer.forward_flops(whole) for layer, count in alike(job.model.layers)))


def _repeated_flops(job: Job, plan: Plan, runtime: Runtime) -> float:
    """Return the FLOPs that recompute adds to the step."""
    whole = Slice(1, job.seq_len, job.precision)
    total = 0.0
    for pipeline in plan.pipelines:
        for span in (span for stage in pipeline.stages for span in stage.spans):
            for layer, count in alike(layers_of(job.model, span.layers)):
                again = repeated_ops(layer, span.recompute, runtime)
                flops = sum(op.forward_flops(whole, layer.length(job.seq_len)) for op in layer.ops if op.name in again)
                total += float(flops) * count * pipeline.batch
    return total
