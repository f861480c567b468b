"""A plan's prediction in terms of traces: seconds of a step per device group and part."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from meshwright.cost.constants import DEFAULT, seen_in
from meshwright.cost.estimate import Estimate, estimate
from meshwright.cost.layers.layer import layer_time, operator_seconds, repeated_ops
from meshwright.cost.layers.layer_config import LayerConfig
from meshwright.cost.layers.placement import StagePlacement
from meshwright.cost.memory.device_memory import stages_of
from meshwright.cost.step.step import PipelineTime
from meshwright.plans import Plan
from meshwright.plans.document import Pipeline
from meshwright.plans.spans import alike, layers_of

# Parts of the cost model, by the part of a trace in which they are found.
PART_OF = {
    "compute": "compute", "recompute": "compute", "tp": "exposed", "ring": "exposed", "ulysses": "exposed",
    "ep": "exposed", "zero": "exposed", "relayout": "exposed", "offload": "copies", "swap": "copies",
    "waiting": "waiting", "host": "host",
}  # fmt: skip
PARTS = ("compute", "exposed", "waiting", "bubble", "host", "copies")
# Kinds of the model's operators -> classes of kernels.
CLASS_OF = {"matmul": "products", "attention": "attention", "norm": "norms"}
REST = "pointwise and others"
CLASSES = ("products", "attention", "norms", REST, "optimizer")


@dataclass(frozen=True)
class Promise:
    """Prediction for one device group over one step; seconds and bytes."""

    pipeline: int
    group: int
    devices: tuple[int, ...]  # of the cluster
    parts: dict[str, float]  # of PARTS; they add up to the step
    classes: dict[str, float]  # of CLASSES: computing by class; empty if the model lists no operators
    memory: int  # of tensors, on the device with the highest peak


def promised(plan: Plan) -> tuple[Estimate, tuple[Promise, ...]]:
    """Return the estimate of a plan, and its prediction for each device group.

    >>> job = {"model": "tiny-llama", "cluster": "4xcpu", "global_batch": 8, "precision": "fp32"}
    >>> found, groups = promised(Plan.of({**job, "pp": 2}))
    >>> abs(sum(groups[0].parts.values()) - found.step_seconds) < 1e-9
    True
    """
    found = estimate(plan.resolve(), plan)
    promises: list[Promise] = []
    for index, (pipeline, time) in enumerate(zip(plan.pipelines, found.pipelines, strict=True)):
        for group in range(time.timeline.groups):
            stages = stages_of(pipeline, group)
            promises.append(
                Promise(
                    pipeline=index,
                    group=group,
                    devices=tuple(sorted({device for stage in stages for device in pipeline.stages[stage].ranks})),
                    parts=_parts(found, time, stages, group),
                    classes=_classes(found, pipeline, stages) | {"optimizer": time.optimizer[group]},
                    memory=found.memory[len(promises)].allocated,
                )
            )
    return found, tuple(promises)


def _parts(found: Estimate, time: PipelineTime, stages: list[int], group: int) -> dict[str, float]:
    total: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for stage in stages:
        for (_, name), seconds in time.stages[stage].spent.items():
            total[PART_OF[name]] += seconds * time.micro_batches
    total["compute"] += time.optimizer[group]
    total["exposed"] += time.exposed[group]
    host = min(found.runtime.step_seconds, time.waiting)  # between two steps
    total["host"] += host
    total["waiting"] += time.waiting - host
    # All else is waiting for other stages, or sending to them, and for longer pipelines.
    total["bubble"] = max(found.step_seconds - sum(total.values()), 0.0)
    return total


def _classes(found: Estimate, pipeline: Pipeline, stages: list[int]) -> dict[str, float]:
    """Return seconds of computing by kind of operator, recompute included."""
    job, runtime = found.job, found.runtime.switched(found.plan.overlap)
    constants = seen_in(job.cluster, DEFAULT)
    total: dict[str, float] = defaultdict(float)
    for stage in (pipeline.stages[index] for index in stages):
        where = job.cluster.group_index(stage.ranks[0])
        site = StagePlacement.of(job, stage.ranks, where, runtime, constants)
        for span in stage.spans:
            ways = LayerConfig.of(span, span.share(pipeline.samples, span.replica(0)), job, site)
            for layer, count in alike(layers_of(job.model, span.layers)):
                often = count * pipeline.micro_batches
                again = repeated_ops(layer, span.recompute, site.runtime)
                once = operator_seconds(layer, ways.cut, site.chip, site.runtime)
                for op in layer.ops:
                    alone = replace(layer, ops=(op,))
                    work = layer_time(alone, ways.cut, site.chip, site.fabric, site.runtime, ways.place).work
                    seconds = float(work.forward + work.input_gradient + work.weight_gradient)
                    streams = op.kind == "stream" and span.recompute == "full" and bool(layer.block)
                    seconds += once[op.name] if op.name in again or streams else 0.0
                    total[CLASS_OF.get(op.kind, REST)] += often * seconds
    return dict(total)
