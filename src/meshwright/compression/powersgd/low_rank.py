"""PowerSGD (Vogels et al. 2019): matrices as products of two thin ones, one step of power iteration for each gradient.

Both messages are float32 and are averaged over all ranks, by any all-reduce:

1. P = (G + e) Q of each matrix.
2. With P orthogonalised, Q = (G + e)' P.

The gradient is P Q'; the rest of a rank's own G + e stays in its residual. Vectors, and matrices that would not shrink,
are sent uncompressed with the first message. Factors are stored column by column: columns differ by orders of
magnitude, and should not share a codec's block.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.compression.powersgd.cuda import device_rounds
from meshwright.compression.powersgd.rounds import EachMatrix
from meshwright.errors import InputError


class LowRank:
    """Two rounds for gradients of given shapes, adjacent in one buffer.

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
        self._p = torch.zeros(sum(self.firsts), device=device)
        # Q of the last step starts the next one; the first is the same on all ranks.
        self._q = torch.randn(sum(self.seconds), generator=torch.Generator().manual_seed(seed)).to(device)
        self._rounds = device_rounds(self.shapes, self.ranks, self._q) or EachMatrix(self.shapes, self.ranks, device)
        self._flat: Tensor = self._p  # of this step, and its residual
        self._residual: Tensor | None = None

    @property
    def asks_host(self) -> bool:
        """Return True if a step waits for the device, so that no graph can capture it."""
        return self._rounds.asks_host

    def keep_in(self, memory: Tensor) -> None:
        """Keep the starting point of steps in `memory` from now on; nonzero contents are used."""
        self._check("memory", memory, len(self._q))
        if not memory.any():
            memory.copy_(self._q)
        self._q = memory

    def first(self, flat: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the first message, which the next call overwrites.

        The buffer becomes the sum of gradients and residual, until `finish`. The message of a gradient with an infinite
        number or NaN has one, too.
        """
        self._check("gradients", flat, sum(self.counts))
        if residual is not None:
            self._check("residual", residual, sum(self.counts))
        self._flat, self._residual = flat, residual
        self._rounds.first(flat, residual, self._q, self._p)
        return self._p

    def second(self, p: Tensor) -> Tensor:
        """Return the second message, from the mean of the first ones. The next call overwrites it."""
        self._check("the first message", p, len(self._p))
        self._p.copy_(p)
        self._rounds.second(self._flat, self._residual, self._p, self._q)
        return self._q

    def finish(self, q: Tensor, lacks: Tensor | None = None) -> None:
        """Write the mean gradients in place, from the mean of the second messages; keep the rest in the residual.

        `lacks`: what this rank's first message lost of uncompressed gradients.
        """
        self._check("the second message", q, len(self._q))
        self._q.copy_(q)
        self._rounds.finish(self._flat, self._residual, self._p, self._q, lacks)

    def _check(self, name: str, tensor: Tensor, count: int) -> None:
        if tensor.dim() != 1 or tensor.numel() != count or tensor.dtype != torch.float32:
            problem = f"has the shape {tuple(tensor.shape)} and type {tensor.dtype}"
            raise InputError(problem, field=name, valid=f"({count},) of torch.float32")


def _rank(shape: tuple[int, int], rank: int) -> int:
    """Return the rank of the thin matrices, or 0 if they would be no smaller."""
    rank = min(rank, *shape)
    return rank if rank * sum(shape) < prod(shape) else 0
