"""What ends a step: gradients summed over replicas, parameters updated and gathered again."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.cost.collectives import Fabric, gather_seconds, reduce_seconds, send_seconds
from meshwright.cost.constants import DEFAULT, Constants
from meshwright.cost.memory import names_held, stages_of
from meshwright.cost.placement import halves
from meshwright.cost.runtime import Runtime, cut_of
from meshwright.cost.stage import Site, between, gradient_bytes, parameter_bytes, parameter_groups
from meshwright.model import Layer, Slice, precision
from meshwright.plan import OPTIMIZERS, Job, Pipeline, Plan
from meshwright.plan.spans import alike, layers_of

Sites = list[list[tuple[Site, int]]]  # of every stage: one device of each sort, with its position in the stage


def gradient_seconds(job: Job, pipeline: Pipeline, group: int, sites: Sites, runtime: Runtime) -> tuple[float, float]:
    """Seconds to reduce a device's gradients over the replicas, and to gather the parameters after the update.

    ZeRO-1 scatters the gradients to their shards; ZeRO-2 and 3 do so micro-batch by micro-batch, which `stage.py` counts.
    Hybrid groups sum their shards with the other groups' once per step.
    """
    mine = stages_of(pipeline, group)
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
    held = names_held(job, pipeline, mine)
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


def optimizer_seconds(job: Job, pipeline: Pipeline, group: int, sites: Sites, runtime: Runtime) -> float:
    """Read and write of states, bound by memory, on the slowest sort of device."""
    mine = stages_of(pipeline, group)
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
            for s in stages_of(pipeline, group):
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
