"""Layouts of a stage's devices as grids of axes.

A grid is dp x tp x ulysses x ring devices, an order of these axes from adjacent devices outwards, and expert
parallelism folded over the same devices. Axes fill a tier of links or divide it, so that every group of an axis uses
the same links. Of two orders that use the same links one is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import permutations
from typing import Any

import numpy as np

from meshwright.cost.layers.collectives import Fabric
from meshwright.models import Layer, Model
from meshwright.plans import Job
from meshwright.plans.spans import alike
from meshwright.plans.strategy import DEFAULT_ORDER, Axis
from meshwright.search.space.limits import Limits

Array = Any
AXES: tuple[Axis, ...] = DEFAULT_ORDER
ORDERS: tuple[tuple[Axis, ...], ...] = tuple(permutations(AXES))


@dataclass(frozen=True)
class Grids:
    """Degrees and orders: arrays with one entry per candidate."""

    tp: Array
    sp: Array
    ulysses: Array
    ring: Array
    dp: Array
    ep: Array
    etp: Array
    order: Array  # index into ORDERS

    @property
    def devices(self) -> Array:
        return self.tp * self.ulysses * self.ring * self.dp

    @property
    def replicas(self) -> Array:
        return self.ulysses * self.ring * self.dp

    @property
    def expert_replicas(self) -> Array:
        return np.maximum(self.devices // (self.ep * self.etp), 1)

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, rows: Array) -> Grids:
        return Grids(*(getattr(self, f.name)[rows] for f in fields(self)))

    @cached_property
    def strides(self) -> dict[Axis, Array]:
        """Positions between two neighbours along each axis."""
        found: dict[Axis, Array] = {axis: np.ones(len(self), dtype=np.int64) for axis in AXES}
        for index in np.unique(self.order):
            rows = self.order == index
            inner = np.ones(int(rows.sum()), dtype=np.int64)
            for axis in ORDERS[index]:
                found[axis][rows] = inner
                inner = inner * getattr(self, axis)[rows]
        return found


def divisors(number: int) -> list[int]:
    """Return the divisors of a number.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def stage_sizes(job: Job, limits: Limits) -> list[int]:
    """Return the devices a stage may have: parts of a node, or whole nodes."""
    group = job.cluster.groups[0]
    inside = divisors(group.devices_per_node)
    across = [group.devices_per_node * n for n in range(2, group.nodes + 1)]
    return [g for g in (*inside, *across) if g <= job.cluster.devices]


def _sorts(model: Model) -> tuple[Layer, ...]:
    return tuple(layer for layer, _ in alike(model.layers))


def all_grids(job: Job, fabric: Fabric, limits: Limits) -> Grids:
    """Return every grid that the model, the batch and the cluster allow, before experts are folded over it."""
    sizes = set(stage_sizes(job, limits))
    replicas = [d for d in divisors(job.global_batch) if limits.keeps("dp", d)]
    every = [
        (tp, sp, ulysses, ring, dp)
        for tp, sp, ulysses, ring in _cuts(job, limits)
        for dp in replicas
        if tp * ulysses * ring * dp in sizes
    ]
    return _placed(every, _spans(job, fabric), limits)


def bare_grids(job: Job, fabric: Fabric, limits: Limits) -> Grids:
    """Return every cut of one replica, on any cluster: for bounds."""
    every = [(tp, sp, ulysses, ring, 1) for tp, sp, ulysses, ring in _cuts(job, limits)]
    return _placed(every, _spans(job, fabric), limits, anyhow=True)


def _placed(every: Sequence[tuple[int, ...]], tiers: tuple[int, ...], limits: Limits, *, anyhow: bool = False) -> Grids:
    """Return grids of (tp, sp, ulysses, ring, dp) with every order of axes; `anyhow`: the default if none fits."""
    tp, sp, ulysses, ring, dp = np.array(every, dtype=np.int64).reshape(-1, 5).T
    may = _orders(np.stack([tp, ulysses, ring, dp]), tiers, len(ORDERS) if limits.allows("placement") else 1)
    may[0] |= anyhow & ~may.any(axis=0)
    rows, order = np.nonzero(may.T)
    ones = np.ones(len(rows), dtype=np.int64)
    return Grids(tp[rows], sp[rows], ulysses[rows], ring[rows], dp[rows], ones, ones, order)


def _cuts(job: Job, limits: Limits) -> Iterator[tuple[int, int, int, int]]:
    """Yield (tp, sp, ulysses, ring) that divide heads, widths and the sequence."""
    layers = _sorts(job.model)
    lengths = {layer.length(job.seq_len) for layer in layers}
    whole = not all(layer.tensor_parallel for layer in layers)
    most = 1 if whole else job.cluster.devices
    for cut in (d for d in _head_cuts(layers) if d <= most):
        for tp in divisors(cut):
            ulysses = cut // tp
            if not _allowed(limits, tp=tp, ulysses=ulysses) or not _widths(layers, tp):
                continue
            for ring in _rings(lengths, most // cut):
                if not _allowed(limits, ring=ring):
                    continue
                for sp in (0, 1) if tp > 1 else (0,):
                    pieces = ulysses * ring * (2 if ring > 1 else 1) * (tp if sp else 1)
                    if all(length % pieces == 0 for length in lengths) and _sp(limits, sp, tp):
                        yield tp, sp, ulysses, ring


def _allowed(limits: Limits, **degrees: int) -> bool:
    return all((d == 1 or limits.allows(name)) and limits.keeps(name, d) for name, d in degrees.items())


def _sp(limits: Limits, sp: int, tp: int) -> bool:
    return (not sp or limits.allows("sp")) and limits.keeps("sp", "true" if sp else "false")


def _head_cuts(layers: tuple[Layer, ...]) -> list[int]:
    """Return tp x ulysses that divide the heads, and divide or are divided by the key/value heads."""
    with_heads = [layer for layer in layers if layer.heads]
    if not with_heads:
        return [1]
    return [
        cut
        for cut in divisors(min(layer.heads for layer in with_heads))
        if all(x.heads % cut == 0 and (x.kv_heads % cut == 0 or cut % x.kv_heads == 0) for x in with_heads)
    ]


def _widths(layers: tuple[Layer, ...], tp: int) -> bool:
    return all(op.k % tp == 0 for layer in layers for op in layer.ops if op.name in {"down", "shared_down"})


def _rings(lengths: set[int], most: int) -> list[int]:
    return [r for r in divisors(min(lengths)) if r <= most] if most > 1 else [1]


def _spans(job: Job, fabric: Fabric) -> tuple[int, ...]:
    """Return the devices that each tier of links inside a node joins, and the node's.

    A tier that joins several nodes (NVL72) need not be filled evenly: 64 devices of 72 are a good stage.
    """
    size = job.cluster.groups[0].devices_per_node
    return tuple(sorted({*(tier.span for tier in fabric.tiers if tier.span < size), size}))


def _orders(degrees: Array, tiers: tuple[int, ...], count: int) -> Array:
    """Return (order, grid): True for allowed orders among the first `count`, one of each that use the same links.

    `degrees` are those of AXES, for every grid.
    """
    allowed: list[Array] = []
    meet: list[Array] = []
    for order in ORDERS[:count]:
        extent = np.ones(degrees.shape[1], dtype=np.int64)
        fine = np.ones(degrees.shape[1], dtype=bool)
        inside = np.empty((len(AXES), len(tiers), degrees.shape[1]), dtype=np.int64)
        for axis in (AXES.index(name) for name in order):
            for tier, span in enumerate(tiers):
                inside[axis, tier] = np.clip(span // extent, 1, degrees[axis])
            extent = extent * degrees[axis]
            for span in tiers:
                fine &= (extent % span == 0) | (span % extent == 0)
        for other, links in zip(allowed, meet, strict=True):
            fine &= ~(other & (links == inside).all(axis=(0, 1)))
        allowed.append(fine)
        meet.append(inside)
    return np.array(allowed)


def foldings(job: Job, fabric: Fabric, limits: Limits) -> list[tuple[int, bool]]:
    """Return (ep, True if etp follows tp): experts whole, or cut as tensor parallelism cuts the rest."""
    moe = [layer for layer in _sorts(job.model) if layer.experts]
    if not moe:
        return [(1, False)]
    degrees = [
        ep
        for ep in divisors(min(layer.experts for layer in moe))
        if _allowed(limits, ep=ep) and all(layer.experts % ep == 0 for layer in moe) and ep <= job.cluster.devices
    ]
    return [(ep, same) for ep in degrees for same in (False, True)]


def expert_widths(layers: Iterable[Layer]) -> set[int]:
    """Return the inner widths of experts, which tensor parallelism cuts."""
    return {int(op.k) for layer in layers for op in layer.ops if op.name == "expert_down"}


def fold(
    job: Job, widths: set[int], grids: Grids, ep: int, fabric: Fabric, limits: Limits, *, same: bool
) -> tuple[Grids, Array]:
    """Fold experts of some inner widths over the devices of each grid with room for them; also return the rows kept."""
    etp = grids.tp if same else np.ones_like(grids.tp)
    rows = (grids.devices % (ep * etp) == 0) & ((etp > 1) | (not same))
    for span in _spans(job, fabric):
        for extent in (etp, ep * etp):
            rows &= (extent % span == 0) | (span % extent == 0)
    for width in widths:
        rows &= width % etp == 0
    rows &= np.array([limits.keeps("etp", int(e)) for e in etp], dtype=bool) if "etp" in limits.fixed else True
    kept = np.flatnonzero(rows)
    some = grids.take(kept)
    full = Grids(
        some.tp,
        some.sp,
        some.ulysses,
        some.ring,
        some.dp,
        np.full(len(kept), ep, dtype=np.int64),
        etp[kept],
        some.order,
    )
    return full, kept
