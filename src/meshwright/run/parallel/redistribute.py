"""Activations between layers that are cut differently: who has which tokens of a micro-batch, and what must travel.

One rule serves spans of different strategies in a stage, stages on other devices, stages of other sizes and unequal
shares of samples: every process takes what it needs from those that have it. Gradients go the same way back, since
whoever has a token has its whole gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.plans.strategy import Strategy
from meshwright.run.mesh.shards import Interval


@dataclass(frozen=True)
class Holding:
    """Samples of a micro-batch, and tokens of each in the order in which they lie."""

    samples: Interval
    tokens: tuple[Interval, ...]

    @staticmethod
    def of(strategy: Strategy, position: int, samples: int, length: int) -> Holding:
        """Return what the device at a position of a stage has between two layers.

        >>> Holding.of(Strategy(dp=2, ring=2), 2, samples=4, length=8)
        Holding(samples=(2, 4), tokens=((0, 2), (6, 8)))
        """
        at = coordinates(strategy, position)
        first = sum(strategy.share(samples, replica) for replica in range(at["dp"]))
        tokens: list[Interval] = [(0, length)]
        if strategy.ring > 1:
            piece = length // (2 * strategy.ring)
            front, back = at["ring"] * piece, (2 * strategy.ring - 1 - at["ring"]) * piece
            tokens = [(front, front + piece), (back, back + piece)]
        tokens = _part(tokens, at["ulysses"], strategy.ulysses)
        if strategy.sp:
            tokens = _part(tokens, at["tp"], strategy.tp)
        return Holding((first, first + strategy.share(samples, at["dp"])), tuple(tokens))

    @property
    def count(self) -> int:
        """Tokens of a sample."""
        return sum(high - low for low, high in self.tokens)


def coordinates(strategy: Strategy, position: int) -> dict[str, int]:
    """Along every axis, of the device at a position of a stage."""
    found: dict[str, int] = {}
    for axis in strategy.order:
        position, found[axis] = divmod(position, getattr(strategy, axis))
    return found


def _part(tokens: list[Interval], index: int, of: int) -> list[Interval]:
    """One of so many consecutive parts of what intervals hold together."""
    each = sum(high - low for low, high in tokens) // of
    found, at = [], 0
    for low, high in tokens:
        first, last = max(index * each - at, 0), min((index + 1) * each - at, high - low)
        if first < last:
            found.append((low + first, low + last))
        at += high - low
    return found


@dataclass(frozen=True)
class Move:
    """Samples and tokens from one process to another, by their places in what each of them has."""

    source: int
    target: int
    taken: Holding
    put: Holding

    @property
    def shape(self) -> tuple[int, int]:
        """Samples and tokens."""
        return self.put.samples[1] - self.put.samples[0], self.put.count


def moves(before: Mapping[int, Holding], after: Mapping[int, Holding]) -> list[Move]:
    """Return what every rank of `after` takes from the ranks of `before`, itself first."""
    holders: dict[Holding, list[int]] = defaultdict(list)
    for rank, holding in before.items():
        holders[holding].append(rank)
    found = []
    for turn, (rank, wanted) in enumerate(after.items()):
        for have, ranks in holders.items():
            low, high = max(wanted.samples[0], have.samples[0]), min(wanted.samples[1], have.samples[1])
            taken, put = _places(have.tokens, wanted.tokens)
            if low < high and put:
                source = rank if rank in ranks else ranks[turn % len(ranks)]
                there = (low - have.samples[0], high - have.samples[0])
                here = (low - wanted.samples[0], high - wanted.samples[0])
                found.append(Move(source, rank, Holding(there, taken), Holding(here, put)))
    return found


def _places(have: Sequence[Interval], wanted: Sequence[Interval]) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    """Return the places, in each of two, of the tokens that both have."""
    taken: list[Interval] = []
    put: list[Interval] = []
    to = 0
    for low, high in wanted:
        at = 0
        for first, last in have:
            a, b = max(low, first), min(high, last)
            if a < b:
                taken.append((at + a - first, at + b - first))
                put.append((to + a - low, to + b - low))
            at += last - first
        to += high - low
    return tuple(taken), tuple(put)


@dataclass
class Bridge:
    """One direction of a relayout, as one process sees it."""

    sent: list[Move]
    received: list[Move]
    local: list[Move]
    same: bool  # this process has before what it has after
    shape: tuple[int, int]  # samples and tokens that it then has

    @staticmethod
    def of(before: Mapping[int, Holding], after: Mapping[int, Holding], rank: int) -> Bridge:
        """From the holdings of all processes on both sides."""
        every = moves(before, after)
        shape = (after[rank].samples[1] - after[rank].samples[0], after[rank].count) if rank in after else (0, 0)
        return Bridge(
            [move for move in every if move.source == rank != move.target],
            [move for move in every if move.target == rank != move.source],
            [move for move in every if move.source == rank == move.target],
            before.get(rank) == after.get(rank),
            shape,
        )

    @property
    def nothing(self) -> bool:
        """Return True if this rank keeps what it has and sends nothing."""
        return self.same and not self.sent and not self.received

    def sends(self, x: Tensor) -> list[tuple[int, Tensor]]:
        """Return what is sent, by the rank that receives it."""
        return [(move.target, _cut(x, move.taken)) for move in self.sent]

    def buffers(self, like: Tensor) -> list[tuple[int, Tensor]]:
        """Room for what comes in, by the process that sends it; `like` gives type, device and width."""
        return [(move.source, like.new_empty(*move.shape, like.shape[-1])) for move in self.received]

    def joined(self, x: Tensor | None, arrived: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return what this rank then has: own parts of `x`, and what arrived in the order of the buffers."""
        if len(arrived) == 1 and not self.local and len(self.received[0].put.tokens) == 1:
            return arrived[0]  # from one process, all of it, in its order
        found = like.new_empty(*self.shape, like.shape[-1])
        for move in self.local:
            assert x is not None
            _paste(found, move.put, _cut(x, move.taken))
        for move, part in zip(self.received, arrived, strict=True):
            _paste(found, move.put, part)
        return found

    def moved(self, x: Tensor) -> Tensor:
        """All of it at once, among processes that all call this."""
        if self.nothing:
            return x
        buffers = self.buffers(x)
        work = [dist.P2POp(dist.isend, part, peer) for peer, part in self.sends(x)]
        work += [dist.P2POp(dist.irecv, part, peer) for peer, part in buffers]
        for one in dist.batch_isend_irecv(work) if work else []:
            one.wait()
        return self.joined(x, [part for _, part in buffers], x)


def _cut(x: Tensor, where: Holding) -> Tensor:
    rows = x[slice(*where.samples)]
    return torch.cat([rows[:, low:high] for low, high in where.tokens], dim=1).contiguous()


def _paste(x: Tensor, where: Holding, part: Tensor) -> None:
    rows, at = x[slice(*where.samples)], 0
    for low, high in where.tokens:
        rows[:, low:high] = part[:, at : at + high - low]
        at += high - low


class _Relayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Bridge, back: Bridge) -> Tensor:
        ctx.back = back
        return there.moved(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back.moved(grads[0].contiguous()), None, None


def redistributed(x: Tensor, there: Bridge, back: Bridge) -> Tensor:
    """Inside a stage, through which gradients pass."""
    found: Tensor = x if there.nothing and back.nothing else _Relayout.apply(x, there, back)
    return found
