"""Cost at the end of a step: gradients reduced over replicas, parameters updated and gathered again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.cost.compression import Codec
from meshwright.cost.constants import DEFAULT, Constants
from meshwright.cost.layers.collectives import Fabric, gather_parts, reduce_parts, reduce_seconds, send_seconds
from meshwright.cost.layers.layer_config import LayerConfig, parameter_groups
from meshwright.cost.layers.placement import StagePlacement, between
from meshwright.cost.layers.rank_groups import halves
from meshwright.cost.memory.device_memory import names_held, stages_of
from meshwright.cost.runtime import Runtime, cut_of
from meshwright.models import Layer, Slice, precision
from meshwright.plans import OPTIMIZERS, Job, Pipeline, Plan
from meshwright.plans.spans import alike, layers_of

Array = Any
Sites = list[
    list[tuple[StagePlacement, int]]
]  # of every stage: one device of each kind, with its position in the stage


def gradient_seconds(
    job: Job, pipeline: Pipeline, group: int, sites: Sites, codecs: Mapping[str, Codec] | None = None
) -> tuple[float, float]:
    """Return the seconds to reduce a device's gradients over the replicas, and to gather the updated parameters.

    - ZeRO-1 scatters the gradients to their shards.
    - ZeRO-2 and 3 do so per micro-batch, which `passes.py` counts.
    - Hybrid groups sum their shards with the other groups' once per step.

    Buckets follow each other without a gap, so only the longest latency counts, once. `codecs` compress the gradients
    of some layers, by name.
    """
    mine = stages_of(pipeline, group)
    sorts = range(max(len(sites[s]) for s in mine))
    of_sort = [[sites[s][min(sort, len(sites[s]) - 1)][0] for s in mine] for sort in sorts]
    return max((_reduced(job, pipeline, mine, some, codecs or {}) for some in of_sort), key=sum)


def _reduced(
    job: Job, pipeline: Pipeline, mine: list[int], sites: list[StagePlacement], codecs: Mapping[str, Codec]
) -> tuple[float, float]:
    """Return these seconds for one kind of device, given its placement in each stage."""
    total, tied = Settled(), 0.0
    for s, site in zip(mine, sites, strict=True):
        for span in pipeline.stages[s].spans:
            config = LayerConfig.of(span, 1, job, site)
            for codec, layers in _by_codec(layers_of(job.model, span.layers), codecs):
                total = total.after(settled(layers, config, site, codec))
        tied += _tied(job, pipeline, s, mine, site)
    return float(total.reduce + total.reduce_once + tied), float(total.gather + total.gather_once)


def _by_codec(layers: Sequence[Layer], codecs: Mapping[str, Codec]) -> list[tuple[Codec | None, Sequence[Layer]]]:
    """Group layers by the codec of their gradients."""
    if not codecs:
        return [(None, layers)]
    found: dict[Codec | None, list[Layer]] = {}
    for layer in layers:
        found.setdefault(codecs.get(layer.name), []).append(layer)
    return list(found.items())


@dataclass(frozen=True)
class Settled:
    """Seconds at the end of a step on one device: by bytes, which add up, and latency, which counts once."""

    reduce: Array = 0.0
    gather: Array = 0.0
    reduce_once: Array = 0.0
    gather_once: Array = 0.0

    def after(self, other: Settled) -> Settled:
        return Settled(
            self.reduce + other.reduce, self.gather + other.gather,
            np.maximum(self.reduce_once, other.reduce_once), np.maximum(self.gather_once, other.gather_once),
        )  # fmt: skip


def settled(layers: Sequence[Layer], ways: LayerConfig, site: StagePlacement, codec: Codec | None = None) -> Settled:
    """Return the cost of reducing the gradients of some layers over replicas, and gathering their parameters."""
    total, zero, runtime = Settled(), np.asarray(ways.zero), site.runtime
    for held in parameter_groups(layers, ways):
        count, shards = np.asarray(held.replicas.count), np.asarray(held.replicas.shards)
        used = (count > 1) & (held.count > 0)
        moved, back = held.trained * site.gradient_bytes, held.trained * site.parameter_bytes
        inside, across = halves(held.replicas.joined, shards, count)
        whole = used & ((zero == 0) | (shards == 1))
        scattered, hybrid = used & ~whole, used & ~whole & (shards < count)
        per_all, once_all = reduce_parts(site.fabric, count, held.replicas.joined)
        per_in, once_in = gather_parts(site.fabric, shards, inside)
        per_across, once_across = reduce_parts(site.fabric, np.maximum(count // shards, 1), across)
        first, later = scattered & (zero == 1), scattered & (zero <= 2)
        travel = whole * moved * per_all + first * moved * per_in + hybrid * moved / shards * per_across
        total = total.after(
            Settled(
                codec.seconds(travel, (whole | first) * moved + hybrid * (zero > 1) * moved / shards)
                if codec
                else travel,
                later * back * per_in,
                whole * once_all + first * once_in + hybrid * once_across,
                later * once_in + first * shards * runtime.shard_seconds,
            )
        )
    each = (np.asarray(ways.dense.shards) > 1) * len(layers) * site.shard
    return total.after(Settled(each * (zero == 1), each * ((zero == 1) | (zero == 2))))


def _tied(job: Job, pipeline: Pipeline, stage: int, mine: list[int], site: StagePlacement) -> float:
    """Return the seconds to sum a head's gradients with the embedding's on another stage (Megatron: first and last)."""
    held = names_held(job, pipeline, mine)
    seconds = 0.0
    for span in pipeline.stages[stage].spans:
        cut = cut_of(span, 1, job, site.runtime)
        for layer in layers_of(job.model, span.layers):
            if layer.tied_to and layer.tied_to not in held:
                count = float(layer.parameters_on(cut, with_tied=True)) - float(layer.parameters_on(cut))
                moved = count * site.gradient_bytes
                other = pipeline.stages[0].ranks[0]
                seconds += 2 * send_seconds(job.cluster, moved, site.ranks[0], other, site.constants)
    return seconds


def optimizer_seconds(job: Job, pipeline: Pipeline, group: int, sites: Sites) -> float:
    """Return the seconds to read and write states, memory-bound, on the slowest kind of device."""
    mine = stages_of(pipeline, group)
    sorts = max(len(sites[s]) for s in mine)

    def on(stage: int, site: StagePlacement) -> float:
        spans = pipeline.stages[stage].spans
        return sum(
            float(update_seconds(job, layers_of(job.model, span.layers), LayerConfig.of(span, 1, job, site), site))
            for span in spans
        )

    return max(sum(on(s, sites[s][min(sort, len(sites[s]) - 1)][0]) for s in mine) for sort in range(sorts))


def update_seconds(job: Job, layers: Sequence[Layer], ways: LayerConfig, site: StagePlacement) -> Array:
    """Return the update seconds of some layers' states on one device; the host's CPUs update offloaded ones."""
    seconds: Array = 0.0
    bare = job.optimizer in site.runtime.without_master
    master = precision(job.precision).master * (not bare)
    scale = (master + OPTIMIZERS[job.optimizer] + 4.0) / 16.0  # 16: AdamW in mixed precision
    sharded, away = np.asarray(ways.zero) > 0, ways.offload_optimizer
    if job.optimizer == "muon":
        seconds = seconds + _orthogonalise(layers, ways.cut, 1 / np.where(sharded, ways.dense.shards, 1), site)
    for held in parameter_groups(layers, ways):
        mine = held.trained / np.where(sharded, held.replicas.shards, 1)
        moved = mine * site.runtime.optimizer_bytes * scale
        seconds = seconds + (1 - away) * moved / site.chip.update
        # Gradients go to the host, parameters come back; CPUs do the update in between.
        seconds = seconds + away * (moved / site.host_update + mine * (4 + site.parameter_bytes) / site.host)
    return seconds


def _orthogonalise(layers: Sequence[Layer], cut: Slice, part: Array, site: StagePlacement) -> Array:
    """Return the seconds of Muon: five Newton-Schulz steps per m x n matrix, m the smaller (Jordan, 2024).

    Each step takes 4 m^2 n + 2 m^3 FLOPs.
    """
    flops: Array = 0.0
    for layer, number in alike(layers):
        for op in layer.ops:
            if op.kind == "matmul" and layer.kind != "head" and op.k:
                held = sum(w.on_device(cut) for w in op.weights) / (op.k * op.n)  # matrices of this shape
                m, n = min(op.k, op.n), max(op.k, op.n)
                flops = flops + number * held * 5 * (4.0 * m * m * n + 2.0 * m**3)
    return flops * part / site.chip.product_16


def between_pipelines(job: Job, plan: Plan, runtime: Runtime, constants: Constants = DEFAULT) -> float:
    """Return the seconds in which several pipelines sum their gradients, after their own replicas have."""
    if len(plan.pipelines) == 1:
        return 0.0
    touched = sorted({job.cluster.group_index(p.stages[0].ranks[0]) for p in plan.pipelines})
    worst = 0.0
    for pipeline in plan.pipelines:
        for group in range(len(pipeline.stages) // pipeline.schedule.virtual):
            held = 0.0
            for s in stages_of(pipeline, group):
                stage = pipeline.stages[s]
                site = StagePlacement.of(job, stage.ranks, job.cluster.group_index(stage.ranks[0]), runtime, constants)
                for span in stage.spans:
                    config = LayerConfig.of(span, 1, job, site)
                    for part in parameter_groups(layers_of(job.model, span.layers), config):
                        held += part.trained / (part.replicas.shards if span.zero else 1)
            home = job.cluster.groups[touched[0]]
            fabric = Fabric.of(home, constants, between(job.cluster, touched) if len(touched) > 1 else None)
            apart = (1,) * (len(fabric.tiers) - 1) + (len(plan.pipelines),)  # pipelines seldom share a node
            moved = held * site.gradient_bytes
            worst = max(worst, float(reduce_seconds(fabric, moved, len(plan.pipelines), apart)))
    return worst
