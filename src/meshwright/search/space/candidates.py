"""Grids with ZeRO levels and offload, as the arrays that the cost model prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from meshwright.cost.layers.collectives import EVERYTHING, Counts, Fabric
from meshwright.cost.layers.layer import Placement
from meshwright.cost.layers.layer_config import LayerConfig, Replicas
from meshwright.cost.runtime import Runtime
from meshwright.models import Layer, Slice
from meshwright.plans import Job, Span
from meshwright.plans.strategy import Offload
from meshwright.search.space.grids import ORDERS, Grids, expert_widths, fold, foldings
from meshwright.search.space.limits import Limits

Array = Any
# Offloaded fractions of optimizer states and parameters: none, optimizer states, both.
AWAY = ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0))


@dataclass(frozen=True)
class Choices:
    """Configurations of all layers of a stage: a grid, samples per replica, a ZeRO level, offloaded states."""

    grids: Grids
    samples: Array  # of one micro-batch, per replica
    zero: Array
    zero_group: Array  # 0: all replicas
    optimizer_away: Array
    parameters_away: Array

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, rows: Array) -> Choices:
        parts = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "grids"}
        return Choices(grids=self.grids.take(rows), **parts)

    @property
    def micro_batch(self) -> Array:
        """Samples of one micro-batch over all replicas."""
        return self.samples * self.grids.dp

    def span(self, row: int, layers: str) -> Span:
        """Return one choice as a span of a plan."""
        g = self.grids
        away = Offload(optimizer=float(self.optimizer_away[row]), parameters=float(self.parameters_away[row]))
        return Span(
            layers=layers, dp=int(g.dp[row]), zero=int(self.zero[row]), zero_group=int(self.zero_group[row]),  # type: ignore[arg-type]
            tp=int(g.tp[row]), sp=bool(g.sp[row]), ulysses=int(g.ulysses[row]), ring=int(g.ring[row]),
            ep=int(g.ep[row]), etp=int(g.etp[row]), order=ORDERS[g.order[row]], offload=away,
        )  # fmt: skip


def bare(grids: Grids, samples: Array) -> Choices:
    """Return grids without ZeRO or offload."""
    none = np.zeros(len(grids), dtype=np.int64)
    return Choices(grids, samples, none, none, none * 0.0, none * 0.0)


def folded(job: Job, sorts: Sequence[Layer], part: Choices, fabric: Fabric, limits: Limits) -> Choices:
    """Return every grid with every folding of the experts over it; unchanged if no layer has experts."""
    if not any(layer.experts for layer in sorts):
        return part
    found, widths = [], expert_widths(sorts)
    for ep, same in foldings(job, fabric, limits):
        grids, rows = fold(job, widths, part.grids, ep, fabric, limits, same=same)
        if len(rows):
            found.append(bare(grids, part.samples[rows]))
    return joined(found) if found else part.take(np.zeros(0, dtype=np.int64))


def with_states(bare_: Choices, job: Job, limits: Limits) -> tuple[Choices, Array]:
    """Return every grid with every ZeRO level, over all replicas or those of a node, with and without offload.

    The second result is the row of `bare_` that each comes from.
    """
    size = job.cluster.groups[0].devices_per_node
    grids = bare_.grids
    near = np.minimum(inside(grids, ("ulysses", "ring", "dp"), size), grids.replicas)
    parts, parents = [], []
    for level in (0, 1, 2, 3):
        if not limits.keeps("zero", level) or (level and not (limits.allows("zero") and limits.allows(f"zero{level}"))):
            continue
        for hybrid in (False, True) if level in {1, 3} and limits.allows("hybrid") else (False,):
            rows = np.ones(len(grids), dtype=bool)
            if level and "zero" not in limits.fixed:  # shards of one device are whole
                rows &= (grids.replicas > 1) | (grids.expert_replicas > 1)
            if hybrid:
                rows &= (near > 1) & (near < grids.replicas) & (grids.replicas % near == 0)
                low, high = np.minimum(near, grids.expert_replicas), np.maximum(near, grids.expert_replicas)
                rows &= high % low == 0
            if "zero_group" in limits.fixed:
                rows &= (near if hybrid else 0 * near) == limits.fixed["zero_group"]
            chosen = np.flatnonzero(rows)
            part = bare_.take(chosen)
            group = near[chosen] if hybrid else np.zeros(len(chosen), dtype=np.int64)
            part = replace(part, zero=np.full(len(chosen), level), zero_group=group)
            for fractions in AWAY if _may_offload(job, limits) else AWAY[:1]:
                parts.append(away(part, *fractions))
                parents.append(chosen)
    if not parts:
        return bare_.take(np.zeros(0, dtype=np.int64)), np.zeros(0, dtype=np.int64)
    return joined(parts), np.concatenate(parents)


def _may_offload(job: Job, limits: Limits) -> bool:
    return limits.allows("offload") and all(group.host_memory > 0 for group in job.cluster.groups)


def away(part: Choices, optimizer: float, parameters: float) -> Choices:
    """Return the choices with the given parts of the states offloaded."""
    ones = np.ones(len(part))
    return replace(part, optimizer_away=ones * optimizer, parameters_away=ones * parameters)


def joined(parts: list[Choices]) -> Choices:
    grids = Grids(*(np.concatenate([getattr(part.grids, f.name) for part in parts]) for f in fields(Grids)))
    rest = {f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Choices)[1:]}
    return Choices(grids=grids, **rest)


def inside(grids: Grids, axes: tuple[str, ...], span: int) -> Array:
    """Return the members of a group along some axes that one span of devices holds."""
    strides = grids.strides
    found = np.ones(len(grids), dtype=np.int64)
    for axis in axes:
        found = found * np.clip(span // strides[axis], 1, getattr(grids, axis))  # type: ignore[index]
    return found


def _counts(grids: Grids, fabric: Fabric, axes: tuple[str, ...], size: Array) -> Counts:
    return tuple(size if tier.span >= EVERYTHING else inside(grids, axes, tier.span) for tier in fabric.tiers)


def _strided(fabric: Fabric, stride: Array, size: Array) -> Counts:
    spans = [tier.span for tier in fabric.tiers]
    return tuple(size if span >= EVERYTHING else np.clip(span // stride, 1, size) for span in spans)


def cut_of(choices: Choices, job: Job, runtime: Runtime) -> LayerConfig:
    """Return the configurations without distances between devices, enough for bytes."""
    return priced(choices, job, Fabric(()), runtime)


def priced(choices: Choices, job: Job, fabric: Fabric, runtime: Runtime) -> LayerConfig:
    """Return the arrays that the cost model takes."""
    g = choices.grids
    cut = Slice(
        choices.samples, job.seq_len, job.precision, g.tp, g.sp.astype(bool), g.ulysses, g.ring, g.ep, g.etp,
        runtime.fused_attention, not runtime.loss_in_chunks,
    )  # fmt: skip
    place = Placement(
        _counts(g, fabric, ("tp",), g.tp), _counts(g, fabric, ("ulysses",), g.ulysses),
        _counts(g, fabric, ("ring",), g.ring), _strided(fabric, g.etp, g.ep),
    )  # fmt: skip
    group = np.where(choices.zero_group > 0, choices.zero_group, 1 << 40)
    same = _counts(g, fabric, ("ulysses", "ring", "dp"), g.replicas)
    experts = _strided(fabric, g.ep * g.etp, g.expert_replicas)
    return LayerConfig(
        cut, place, Replicas(g.replicas, np.minimum(group, g.replicas), same),
        Replicas(g.expert_replicas, np.minimum(group, g.expert_replicas), experts), choices.zero,
        offload_optimizer=choices.optimizer_away, offload_parameters=choices.parameters_away,
    )  # fmt: skip
