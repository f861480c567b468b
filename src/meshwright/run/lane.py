"""Where a process stands in the grid of a span: which others it works with along every axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.plan.strategy import Axis, Strategy
from meshwright.run.collectives import ALONE, Line, copied, gathered, scattered, summed


@dataclass(frozen=True)
class Lane:
    """One process in the grid of a span; the default stands alone."""

    tp: Line = ALONE
    ulysses: Line = ALONE
    ring: Line = ALONE
    dp: Line = ALONE
    replicas: Line = ALONE  # that hold the same parameters and see other tokens
    sp: bool = False

    @staticmethod
    def of(strategy: Strategy, ranks: tuple[int, ...]) -> Lane:
        """Every process of the world calls this for every span, in the same order."""
        sizes = [getattr(strategy, axis) for axis in strategy.order]
        # Axes lie in `order` from adjacent devices outwards, so that the last is the first dimension.
        grid = torch.tensor(ranks).reshape(sizes[::-1])
        names = list(strategy.order)[::-1]

        def line(*axes: Axis) -> Line:
            kept = [names.index(axis) for axis in axes]
            rest = [i for i in range(len(names)) if i not in kept]
            size = int(torch.tensor([grid.shape[i] for i in kept]).prod())
            every = grid.permute(*rest, *kept).reshape(-1, size).tolist()
            mine = next((row for row in every if dist.get_rank() in row), None)
            if size == 1:
                return ALONE
            group, _ = dist.new_subgroups_by_enumeration(every)
            return Line(size, mine.index(dist.get_rank()), group) if mine else Line(size)

        return Lane(line("tp"), line("ulysses"), line("ring"), line("dp"), line("dp", "ring", "ulysses"), strategy.sp)

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


ONE = Lane()  # no cut at all
