"""PowerSGD (Vogels et al. 2019): matrices as products of two thin ones, one step of power iteration for each gradient.

Both messages are float32 and are averaged over all processes, by any all-reduce: first P = (G + e) Q of each matrix, then,
with P orthogonalised, Q = (G + e)' P. The gradient is P Q'; what it lacks of a process's own G + e stays in its residual.
Vectors, and matrices that would not get smaller, are sent as they are with the first message.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import InputError


class LowRank:
    """The two rounds for gradients of given shapes that lie one after the other in one buffer.

    >>> low = LowRank([(64, 32), (64,)], rank=2)
    >>> matrix = torch.arange(64.0).outer(torch.ones(32))  # of rank 1
    >>> flat, out = torch.cat([matrix.flatten(), torch.ones(64)]), torch.empty(64 * 33)
    >>> low.finish(low.second(low.first(flat)), out)  # of one process: nothing is averaged
    >>> torch.allclose(out, flat, atol=1e-3), low.first_count + low.second_count, flat.numel()
    (True, 258, 2112)
    """

    def __init__(self, shapes: Sequence[Sequence[int]], rank: int = 4, device: Any = "cpu", seed: int = 0) -> None:
        if rank < 1:
            raise InputError(f"is {rank}", field="powersgd.rank", valid="1 or more")
        self.shapes = [(shape[0], prod(shape[1:])) if len(shape) > 1 else (prod(shape), 1) for shape in shapes]
        self.ranks = [_rank(shape, rank) for shape in self.shapes]
        self.counts = [rows * columns for rows, columns in self.shapes]
        # In the first message: P, or the gradient itself; then one number for each gradient, not zero if it was bad.
        sent = [
            rows * r if r else count for (rows, _), r, count in zip(self.shapes, self.ranks, self.counts, strict=True)
        ]
        self._firsts = [*sent, len(self.shapes)]
        self._seconds = [columns * r for (_, columns), r in zip(self.shapes, self.ranks, strict=True)]
        self.first_count, self.second_count = sum(self._firsts), sum(self._seconds)
        self._sum = torch.zeros(sum(self.counts), device=device)
        self._p = torch.zeros(self.first_count, device=device)
        # Q of the last step is where the next one begins; the first is the same in all processes.
        start = torch.randn(self.second_count, generator=torch.Generator().manual_seed(seed))
        self._q = start.to(device)
        self._bad = torch.zeros(len(self.shapes), device=device)  # of this process
        self._residual: Tensor | None = None

    def keep_in(self, memory: Tensor) -> None:
        """Where the next step begins lives in `memory` from now on; what is there already, if it is not zero, is used."""
        self._check("memory", memory, self.second_count)
        if not memory.any():
            memory.copy_(self._q)
        self._q = memory

    def first(self, flat: Tensor, residual: Tensor | None = None) -> Tensor:
        """The first message, of gradient and residual (which `finish` will renew). It is overwritten by the next call."""
        self._check("gradients", flat, len(self._sum))
        if residual is not None:
            self._check("residual", residual, len(self._sum))
        self._residual = residual
        self._sum.copy_(flat)
        if residual is not None:
            self._sum += residual
        *sent, flags = self._p.split(self._firsts)
        for i, (matrix, r, message, q) in enumerate(zip(self._matrices(), self.ranks, sent, self._qs(), strict=True)):
            self._bad[i] = (~matrix.isfinite()).any()
            matrix.nan_to_num_(0, 0, 0).mul_(1 - self._bad[i])
            if r:
                torch.mm(matrix, q, out=message.view(-1, r))
            else:
                message.copy_(matrix.view(-1))
        flags.copy_(self._bad)
        return self._p

    def second(self, p: Tensor) -> Tensor:
        """The second message, from the mean of the first ones. It is overwritten by the next call."""
        self._check("the first message", p, self.first_count)
        self._p.copy_(p)
        for matrix, r, message, q in zip(
            self._matrices(), self.ranks, self._p.split(self._firsts), self._qs(), strict=False
        ):
            if r:
                message.view(-1, r).copy_(orthogonal(message.view(-1, r)))
                torch.mm(matrix.t(), message.view(-1, r), out=q)
        return self._q

    def finish(self, q: Tensor, out: Tensor) -> None:
        """The mean gradient, from the mean of the second messages; what it lacks of this process's goes to the residual."""
        self._check("the second message", q, self.second_count)
        self._check("out", out, len(self._sum))
        self._q.copy_(q)
        *sent, _ = self._p.split(self._firsts)
        places = out.split(self.counts)
        for matrix, r, message, one, place in zip(self._matrices(), self.ranks, sent, self._qs(), places, strict=True):
            mean = message.view(-1, r) @ one.t() if r else message.view_as(matrix)
            place.copy_(mean.reshape(-1))
            matrix.sub_(mean) if r else matrix.zero_()  # what is sent as it is lacks nothing
        if self._residual is not None:
            pairs = zip(self._residual.split(self.counts), self._sum.split(self.counts), strict=True)
            for bad, (old, new) in zip(self._bad, pairs, strict=True):
                old.copy_(torch.where(bad > 0, old, new))

    def flags(self, p: Tensor) -> Tensor:
        """For every gradient, not zero if it had an infinite number or none in some process; from the first message."""
        return p[self.first_count - len(self.shapes) :]

    def _matrices(self) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(self._sum.split(self.counts), self.shapes, strict=True)]

    def _qs(self) -> list[Tensor]:
        return [
            part.view(-1, r) if r else part for part, r in zip(self._q.split(self._seconds), self.ranks, strict=True)
        ]

    def _check(self, name: str, tensor: Tensor, count: int) -> None:
        if tensor.dim() != 1 or tensor.numel() != count:
            raise InputError(f"has the shape {tuple(tensor.shape)}", field=name, valid=f"({count},)")


def _rank(shape: tuple[int, int], rank: int) -> int:
    """The rank of the thin matrices, 0 where they would be no smaller."""
    rank = min(rank, *shape)
    return rank if rank * sum(shape) < prod(shape) else 0


def orthogonal(p: Tensor) -> Tensor:
    """Columns that span the same space (or a larger one) and are orthonormal, even where p has not its full rank."""
    return torch.linalg.qr(p)[0]
