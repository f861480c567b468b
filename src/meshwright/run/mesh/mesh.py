"""The position of a rank in the mesh of a span, with its process group along every axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.plans.strategy import Strategy
from meshwright.run.mesh.collectives import ALONE, AxisGroup, copied, gathered, scattered, summed
from meshwright.run.torch_private import group_timeout

Groups = dict[str, Any]  # process groups by their ranks


@dataclass(frozen=True)
class Shards:
    """Sharding groups: replicas that share one set of shards, and those with the same shard of other sets."""

    axis: AxisGroup = ALONE
    copies: AxisGroup = ALONE
    ranks: Sequence[Sequence[int]] = ()  # (set, shard), including this rank


@dataclass(frozen=True)
class SpanMesh:
    """Mesh of a span, as one rank sees it; the default is a single rank."""

    tp: AxisGroup = ALONE
    ulysses: AxisGroup = ALONE
    ring: AxisGroup = ALONE
    dp: AxisGroup = ALONE
    replicas: AxisGroup = ALONE  # ranks with the same parameters and other tokens
    ep: AxisGroup = ALONE  # experts fold over the same ranks: etp over adjacent ones, then ep, then their replicas
    etp: AxisGroup = ALONE
    expert_replicas: AxisGroup = ALONE
    shards: Shards = Shards()  # how ZeRO shards parameters over the replicas
    expert_shards: Shards = Shards()
    alone: AxisGroup = ALONE  # this rank, as a group of its own where one is needed
    everyone: AxisGroup = ALONE  # ranks that share the tokens of a micro-batch
    fellows: AxisGroup = ALONE  # ranks that share the tokens of the same samples
    sharers: Mapping[int, AxisGroup] = field(default_factory=dict)  # groups of adjacent `tp` ranks, by their size
    sp: bool = False
    uneven: bool = False  # replicas get unequal numbers of samples
    chunks: int = 1  # chunks of the all-reduces of tensor parallelism

    @staticmethod
    def of(
        strategy: Strategy, ranks: tuple[int, ...], made: Groups | None = None, kv_heads: Iterable[int] = ()
    ) -> SpanMesh:
        """Build the mesh of a span; every rank of the world calls this for every span, in the same order.

        `made` keeps process groups by their ranks for reuse: each has threads and connections of its own.
        """
        # Axes follow `order` from adjacent devices outwards, so that the last is the first dimension.
        names = list(strategy.order)[::-1]
        grid = torch.tensor(ranks).reshape([getattr(strategy, axis) for axis in names])
        folded = torch.tensor(ranks).reshape(-1, strategy.ep, strategy.etp)
        made = {} if made is None else made
        tp, ulysses, ring, dp = (
            _axis_group(grid, [names.index(axis)], made) for axis in ("tp", "ulysses", "ring", "dp")
        )
        replicas = _axis_group(grid, [names.index(axis) for axis in ("dp", "ring", "ulysses")], made)
        others, ep, etp = (_axis_group(folded, [dim], made) for dim in range(3))
        apart = [names.index(axis) for axis in names if axis != "tp"]
        shards = _shards(grid, apart, strategy.shards(replicas.size), made)
        expert_shards = _shards(folded, [0], strategy.shards(others.size), made)
        sharers = {strategy.tp // heads for heads in kv_heads if heads and strategy.tp > heads}
        among = {few: _shards(grid, [names.index("tp")], few, made).axis for few in sorted(sharers)}
        everyone = _axis_group(grid, list(range(grid.dim())), made)
        fellows = _axis_group(grid, [names.index(axis) for axis in names if axis != "dp"], made)
        whole = (tp, ulysses, ring, dp, replicas, ep, etp, others)
        return SpanMesh(
            *whole, shards, expert_shards, ALONE, everyone, fellows, among, strategy.sp, bool(strategy.shares)
        )

    def enter(self, x: Tensor) -> Tensor:
        """Into a part that tensor parallelism cuts: all tokens of (batch, sequence, hidden) on every member."""
        if self.tp.size == 1:
            return x
        return gathered(x, self.tp, 1) if self.sp else copied(x, self.tp)

    def leave(self, x: Tensor) -> Tensor:
        """Out of it: sums, of the own tokens under sequence parallelism."""
        if self.tp.size == 1:
            return x
        return scattered(x, self.tp, 1) if self.sp else summed(x, self.tp)

    def own(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a whole sequence, before tensor parallelism.

        Ring attention takes one piece from the front and one from the back, so that a causal mask gives all ranks the
        same work. Ulysses cuts the tokens of its ring position into consecutive parts.
        """
        if self.ring.size > 1:
            pieces = x.chunk(2 * self.ring.size, dim=dim)
            x = torch.cat([pieces[self.ring.rank], pieces[-1 - self.ring.rank]], dim=dim)
        return x.chunk(self.ulysses.size, dim=dim)[self.ulysses.rank]

    def inside(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the part of a sequence that attention sees after Ulysses' exchange."""
        return SpanMesh(ring=self.ring).own(x, dim)


def _axis_group(grid: Tensor, kept: list[int], made: Groups) -> AxisGroup:
    """Return the group of ranks that differ from this one only in some dimensions; `made` holds existing groups."""
    size = prod(grid.shape[i] for i in kept)
    if size == 1:
        return ALONE
    rest = [i for i in range(grid.dim()) if i not in kept]
    every = grid.permute(*rest, *kept).reshape(-1, size).tolist()
    if str(every) not in made:
        made[str(every)] = dist.new_subgroups_by_enumeration(every, timeout=group_timeout())[0]
    mine: list[int] = next((row for row in every if dist.get_rank() in row), [])
    return AxisGroup(size, mine.index(dist.get_rank()) if mine else 0, made[str(every)])


def _shards(grid: Tensor, kept: list[int], few: int, made: Groups) -> Shards:
    """Return sharding groups of ranks that differ in some dimensions: adjacent ones, and those at equal positions."""
    rest = [i for i in range(grid.dim()) if i not in kept]
    flat = grid.permute(*rest, *kept).reshape(-1, prod(grid.shape[i] for i in kept) // few, few)
    mine = [table for table in flat.tolist() if any(dist.get_rank() in row for row in table)]
    return Shards(_axis_group(flat, [2], made), _axis_group(flat, [1], made), mine[0] if mine else [])


ONE = SpanMesh()  # no cut at all


def local(tensor: Tensor) -> Tensor:
    """Return the own shard of a tensor that a mesh cuts, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
