"""PowerSGD (Vogels et al. 2019): matrices as products of two thin ones, one step of power iteration for each gradient.

Both messages are float32 and are averaged over all processes, by any all-reduce: first P = (G + e) Q of each matrix, then,
with P orthogonalised, Q = (G + e)' P. The gradient is P Q'; what it lacks of a process's own G + e stays in its residual.
Vectors, and matrices that would not get smaller, are sent as they are with the first message. Factors lie column by column:
columns differ by orders of magnitude, and a codec's block of numbers should not mix them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.compress.lowrank_passes import passes
from meshwright.errors import InputError

_Part = tuple[Tensor, Tensor | None, int, Tensor, Tensor]


class LowRank:
    """The two rounds for gradients of given shapes that lie one after the other in one buffer.

    >>> low = LowRank([(64, 32), (64,)], rank=2)
    >>> matrix = torch.arange(64.0).outer(torch.ones(32))  # of rank 1
    >>> flat = torch.cat([matrix.flatten(), torch.ones(64)])
    >>> low.finish(low.second(low.first(flat)))  # of one process: nothing is averaged
    >>> torch.allclose(flat[:2048].view(64, 32), matrix, atol=1e-3), sum(low.firsts + low.seconds), flat.numel()
    (True, 256, 2112)
    """

    def __init__(self, shapes: Sequence[Sequence[int]], rank: int = 4, device: Any = "cpu", seed: int = 0) -> None:
        if rank < 1:
            raise InputError(f"is {rank}", field="powersgd.rank", valid="1 or more")
        self.shapes = [(shape[0], prod(shape[1:])) if len(shape) > 1 else (prod(shape), 1) for shape in shapes]
        self.ranks = [_rank(shape, rank) for shape in self.shapes]
        self.counts = [rows * columns for rows, columns in self.shapes]
        pairs = list(zip(self.shapes, self.ranks, strict=True))
        # Numbers of each gradient in the first message (P, or the gradient itself) and in the second.
        self.firsts = [rows * (r or columns) for (rows, columns), r in pairs]
        self.seconds = [columns * r for (_, columns), r in pairs]
        self._passes = passes(torch.device(device).type)
        self._p = torch.zeros(sum(self.firsts), device=device)
        # Q of the last step is where the next one begins; the first is the same in all processes.
        self._q = torch.randn(sum(self.seconds), generator=torch.Generator().manual_seed(seed)).to(device)
        self._flat, self._residual = self._p, self._p  # of this step
        self._kept = False  # whether there is a residual
        self._at: tuple[int, ...] = ()  # addresses of which views were made
        self._views: list[_Part] = []

    def keep_in(self, memory: Tensor) -> None:
        """Where the next step begins lives in `memory` from now on; what is there already, if it is not zero, is used."""
        self._check("memory", memory, len(self._q))
        if not memory.any():
            memory.copy_(self._q)
        self._q = memory

    def first(self, flat: Tensor, residual: Tensor | None = None) -> Tensor:
        """The first message. The buffer becomes the sum of gradients and residual and is `finish`ed later; the message is
        overwritten by the next call. The message of a gradient with an infinite number, or none, has one, too."""
        self._check("gradients", flat, sum(self.counts))
        self._kept = residual is not None
        self._flat, self._residual = flat, flat if residual is None else residual
        if residual is not None:
            self._check("residual", residual, sum(self.counts))
        for matrix, kept, r, p, q in self._parts():
            if r:
                self._passes.first(matrix, kept, q, p)
            else:
                if kept is not None:
                    matrix += kept
                p.copy_(matrix.view_as(p))
        return self._p

    def second(self, p: Tensor) -> Tensor:
        """The second message, from the mean of the first ones. It is overwritten by the next call."""
        self._check("the first message", p, len(self._p))
        self._p.copy_(p)
        finite = bool(self._p.isfinite().all())
        for matrix, _, r, factor, q in self._parts():
            if r and (finite or factor.isfinite().all()):
                factor.copy_(orthogonal(factor))
                self._passes.second(matrix, factor, q)
            elif r:
                q.fill_(torch.nan)
        return self._q

    def finish(self, q: Tensor, lacks: Tensor | None = None) -> None:
        """The mean gradients, in place, from the mean of the second messages; what they lack of this process's goes to the
        residual. `lacks`: what this process's first message did not say, for what is sent as it is."""
        self._check("the second message", q, len(self._q))
        self._q.copy_(q)
        unsaid = [None] * len(self.shapes) if lacks is None else list(lacks.split(self.firsts))
        finite = bool(self._p.isfinite().all() and self._q.isfinite().all())
        for (matrix, kept, r, p, factor), missed in zip(self._parts(), unsaid, strict=True):
            if not finite and not (factor if r else p).isfinite().all():
                # All processes see the same; the residual stays, and the next step begins anew.
                matrix.fill_(torch.nan)
                factor.normal_(generator=torch.Generator(self._q.device).manual_seed(0))
            elif r:
                self._passes.finish(matrix, kept, p, factor)
            else:
                matrix.copy_(p.view_as(matrix))
                if kept is not None:
                    kept.copy_(missed.view_as(kept)) if missed is not None else kept.zero_()

    def _parts(self) -> list[_Part]:
        """Of each gradient: itself as a matrix, its residual, its rank, its P (or itself again) and Q. Views are made once
        for buffers that come again at the next step: they keep the memory, so nothing else can lie at its address."""
        at = (self._flat.data_ptr(), self._residual.data_ptr() if self._kept else 0, self._q.data_ptr())
        if at != self._at:
            self._at, self._views = at, self._cut()
        return self._views

    def _cut(self) -> list[_Part]:
        found = []
        for shape, r, flat, kept, p, q in zip(
            self.shapes, self.ranks, self._flat.split(self.counts), self._residual.split(self.counts),
            self._p.split(self.firsts), self._q.split(self.seconds), strict=True,
        ):  # fmt: skip
            mine = kept.view(shape) if self._kept else None
            found.append((flat.view(shape), mine, r, p.view(r or 1, -1), q.view(r or 1, -1) if r else q))
        return found

    def _check(self, name: str, tensor: Tensor, count: int) -> None:
        if tensor.dim() != 1 or tensor.numel() != count or tensor.dtype != torch.float32:
            problem = f"has the shape {tuple(tensor.shape)} and type {tensor.dtype}"
            raise InputError(problem, field=name, valid=f"({count},) of torch.float32")


def _rank(shape: tuple[int, int], rank: int) -> int:
    """The rank of the thin matrices, 0 where they would be no smaller."""
    rank = min(rank, *shape)
    return rank if rank * sum(shape) < prod(shape) else 0


def orthogonal(p: Tensor) -> Tensor:
    """Rows that span the same space (or a larger one) and are orthonormal, even where p has not its full rank.

    >>> orthogonal(torch.tensor([[3.0, 0.0, 0.0], [3.0, 0.0, 2.0]])).abs()
    tensor([[1., 0., 0.],
            [0., 0., 1.]])
    """
    return torch.linalg.qr(p.t())[0].t()
