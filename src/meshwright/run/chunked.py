"""Tensor-parallel products whose sums travel in chunks: while one chunk travels, the next is multiplied.

Forward, the partial results of a chunk of tokens are summed (or scattered, under sequence parallelism) under the product
of the next chunk; backward, a chunk of the gradient is gathered under the products with the one before.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.run.collectives import Line, gather_tensor, scatter_tensor


def chunked_leave(x: Tensor, weight: Tensor, line: Line, chunks: int, *, sp: bool) -> Tensor:
    """`x @ weight.T` of (batch, token, width), summed over the members; under `sp` the own tokens of the sum."""
    found: Tensor = _Chunked.apply(x, weight, line, chunks, sp)
    return found


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, line: Line, chunks: int, sp: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.line, ctx.sp, ctx.chunks = line, sp, chunks
        work, parts = [], []
        for some in _split(x, line, chunks, sp):
            partial = torch.nn.functional.linear(some, weight)
            if sp:  # (batch, member, tokens, width): members lie in the first dimension of what is scattered
                part = partial.new_empty(partial[:, 0].shape)
                partial = partial.transpose(0, 1).flatten(0, 1).contiguous()
                work.append((scatter_tensor(part, partial, group=line.group, async_op=True), partial))
            else:
                part = partial
                work.append((dist.all_reduce(part, group=line.group, async_op=True), partial))
            parts.append(part)
        for one, _ in work:
            one.wait()
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        line, sp, chunks = ctx.line, ctx.sp, ctx.chunks
        pieces = [piece.contiguous() for piece in grads[0].chunk(chunks, dim=1)]
        arriving = [_gather(piece, line) if sp else (piece, None) for piece in pieces]
        dx = torch.empty_like(x)
        dw = torch.zeros_like(weight)
        views = _split(dx, line, chunks, sp)
        for some, view, (whole, work) in zip(_split(x, line, chunks, sp), views, arriving, strict=True):
            if work is not None:
                work.wait()
                whole = whole.transpose(0, 1)
            view.copy_(whole @ weight)
            dw += whole.flatten(0, -2).t() @ some.flatten(0, -2)
        return dx, dw, None, None, None


def _gather(piece: Tensor, line: Line) -> tuple[Tensor, Any]:
    whole = piece.new_empty(line.size, *piece.shape)
    return whole, gather_tensor(whole.flatten(0, 1), piece, group=line.group, async_op=True)


def _split(x: Tensor, line: Line, chunks: int, sp: bool) -> list[Tensor]:
    """Chunks of tokens; under sequence parallelism of the tokens of every member, side by side: (batch, member, ...)."""
    if not sp:
        return list(x.chunk(chunks, dim=1))
    return list(x.unflatten(1, (line.size, -1)).chunk(chunks, dim=2))
