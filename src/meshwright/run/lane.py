"""Where a process stands in the grid of a span: which others it works with along every axis."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.plan.strategy import Strategy
from meshwright.run.collectives import ALONE, Line, copied, gathered, scattered, summed

Groups = dict[str, Any]  # process groups by the ranks they join


@dataclass(frozen=True)
class Lane:
    """One process in the grid of a span; the default stands alone."""

    tp: Line = ALONE
    ulysses: Line = ALONE
    ring: Line = ALONE
    dp: Line = ALONE
    replicas: Line = ALONE  # that hold the same parameters and see other tokens
    ep: Line = ALONE  # experts fold over the same processes: etp over adjacent ones, then ep, then their replicas
    etp: Line = ALONE
    expert_replicas: Line = ALONE
    sp: bool = False

    @staticmethod
    def of(strategy: Strategy, ranks: tuple[int, ...], made: Groups | None = None) -> Lane:
        """Every process of the world calls this for every span, in the same order.

        `made` keeps groups by the processes they join: each has threads and connections of its own.
        """
        # Axes lie in `order` from adjacent devices outwards, so that the last is the first dimension.
        names = list(strategy.order)[::-1]
        grid = torch.tensor(ranks).reshape([getattr(strategy, axis) for axis in names])
        folded = torch.tensor(ranks).reshape(-1, strategy.ep, strategy.etp)
        made = {} if made is None else made
        tp, ulysses, ring, dp = (_line(grid, [names.index(axis)], made) for axis in ("tp", "ulysses", "ring", "dp"))
        replicas = _line(grid, [names.index(axis) for axis in ("dp", "ring", "ulysses")], made)
        others, ep, etp = (_line(folded, [dim], made) for dim in range(3))
        return Lane(tp, ulysses, ring, dp, replicas, ep, etp, others, strategy.sp)

    def enter(self, x: Tensor) -> Tensor:
        """Into a part that tensor parallelism cuts: all tokens of (batch, sequence, hidden) on every member."""
        return gathered(x, self.tp, 1) if self.sp else copied(x, self.tp)

    def leave(self, x: Tensor) -> Tensor:
        """Out of it: sums, of the own tokens under sequence parallelism."""
        return scattered(x, self.tp, 1) if self.sp else summed(x, self.tp)

    def own(self, x: Tensor, dim: int = 1) -> Tensor:
        """The part of a whole sequence that this process has, before tensor parallelism.

        Rings take one piece from the front and one from the back, so that a causal mask gives all the same work;
        Ulysses cuts what its ring's place holds into consecutive parts.
        """
        if self.ring.size > 1:
            pieces = x.chunk(2 * self.ring.size, dim=dim)
            x = torch.cat([pieces[self.ring.rank], pieces[-1 - self.ring.rank]], dim=dim)
        return x.chunk(self.ulysses.size, dim=dim)[self.ulysses.rank]

    def inside(self, x: Tensor, dim: int = 1) -> Tensor:
        """The part that attention sees after Ulysses' exchange."""
        return Lane(ring=self.ring).own(x, dim)


def _line(grid: Tensor, kept: list[int], made: Groups) -> Line:
    """The processes that differ from this one in some dimensions of a grid only; `made`: groups that there are."""
    size = prod(grid.shape[i] for i in kept)
    if size == 1:
        return ALONE
    rest = [i for i in range(grid.dim()) if i not in kept]
    every = grid.permute(*rest, *kept).reshape(-1, size).tolist()
    if str(every) not in made:
        made[str(every)] = dist.new_subgroups_by_enumeration(every)[0]
    mine: list[int] = next((row for row in every if dist.get_rank() in row), [])
    return Line(size, mine.index(dist.get_rank()) if mine else 0, made[str(every)])


ONE = Lane()  # no cut at all
