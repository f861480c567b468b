"""PowerSGD's rounds, one matrix after the other: in C on CPUs, by PyTorch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.compression.powersgd.passes import passes

_Part = tuple[Tensor, Tensor | None, int, Tensor, Tensor]


class EachMatrix:
    """Rounds of gradients as matrices, with the rank of each; 0 for those sent uncompressed."""

    asks_host = True

    def __init__(self, shapes: Sequence[tuple[int, int]], ranks: Sequence[int], device: Any) -> None:
        self._shapes, self._ranks = shapes, ranks
        self._passes = passes(torch.device(device).type)
        self._at: tuple[int, ...] = ()  # addresses for which views were made
        self._views: list[_Part] = []

    def first(self, flat: Tensor, residual: Tensor | None, q: Tensor, p: Tensor) -> None:
        for matrix, kept, rank, left, right in self._parts(flat, residual, p, q):
            if rank:
                self._passes.first(matrix, kept, right, left)
            else:
                if kept is not None:
                    matrix += kept
                left.copy_(matrix.view_as(left))

    def second(self, flat: Tensor, residual: Tensor | None, p: Tensor, q: Tensor) -> None:
        finite = bool(p.isfinite().all())
        for matrix, _, rank, left, right in self._parts(flat, residual, p, q):
            if rank and (finite or left.isfinite().all()):
                left.copy_(orthogonal(left))
                self._passes.second(matrix, left, right)
            elif rank:
                right.fill_(torch.nan)

    def finish(self, flat: Tensor, residual: Tensor | None, p: Tensor, q: Tensor, lacks: Tensor | None) -> None:
        parts = self._parts(flat, residual, p, q)
        unsaid = [None] * len(parts) if lacks is None else lacks.split([left.numel() for _, _, _, left, _ in parts])
        finite = bool(p.isfinite().all() and q.isfinite().all())
        for (matrix, kept, rank, left, right), missed in zip(parts, unsaid, strict=True):
            if not finite and not (right if rank else left).isfinite().all():
                # All ranks see the same; the residual stays, and the next step starts afresh.
                matrix.fill_(torch.nan)
                right.normal_(generator=torch.Generator(q.device).manual_seed(0))
            elif rank:
                self._passes.finish(matrix, kept, left, right)
            else:
                matrix.copy_(left.view_as(matrix))
                if kept is not None:
                    kept.copy_(missed.view_as(kept)) if missed is not None else kept.zero_()

    def _parts(self, flat: Tensor, residual: Tensor | None, p: Tensor, q: Tensor) -> list[_Part]:
        """Return each gradient as a matrix, its residual, its rank, its P (or itself again) and Q.

        Views are made once for buffers that come again at the next step: they keep the memory, so nothing else can have
        its address.
        """
        at = tuple(0 if one is None else one.data_ptr() for one in (flat, residual, p, q))
        if at != self._at:
            self._at, self._views = at, self._cut(flat, residual, p, q)
        return self._views

    def _cut(self, flat: Tensor, residual: Tensor | None, p: Tensor, q: Tensor) -> list[_Part]:
        found: list[_Part] = []
        at = left = right = 0
        for (rows, columns), rank in zip(self._shapes, self._ranks, strict=True):
            count, first, second = rows * columns, rows * (rank or columns), columns * rank
            kept = None if residual is None else residual[at : at + count].view(rows, columns)
            thin = q[right : right + second]
            found.append((
                flat[at : at + count].view(rows, columns), kept, rank,
                p[left : left + first].view(rank or 1, -1), thin.view(rank, -1) if rank else thin,
            ))  # fmt: skip
            at, left, right = at + count, left + first, right + second
        return found


def orthogonal(p: Tensor) -> Tensor:
    """Return orthonormal rows that span the same space (or a larger one), even if p lacks full rank.

    >>> orthogonal(torch.tensor([[3.0, 0.0, 0.0], [3.0, 0.0, 2.0]])).abs()
    tensor([[1., 0., 0.],
            [0., 0., 1.]])
    """
    return torch.linalg.qr(p.t())[0].t()
