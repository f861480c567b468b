"""Tensor-parallel products with collectives in chunks of tokens, which overlap with the product of other chunks.

Under sequence parallelism, the all-gather into a layer overlaps with the product of the tokens that have arrived. In
the backward pass, the reduce-scatter of a chunk's gradient overlaps with the product of the next, and all of them with
the weight's gradient. Out of a layer it is the other way round. Tokens are kept sharded, and gathered again for the
weight's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from meshwright.run.mesh.collectives import AxisGroup, gather_tensor, scatter_tensor

_Arriving = tuple[Tensor, Any]  # output buffer, and the handle to wait for


def chunked_enter(x: Tensor, weight: Tensor, axis: AxisGroup, chunks: int, *, sp: bool) -> Tensor:
    """Return `x @ weight.T` for all ranks' tokens of (batch, token, width); under `sp` each rank brings its own."""
    found: Tensor = _Enter.apply(x, weight, axis, chunks, sp)
    return found


def chunked_leave(x: Tensor, weight: Tensor, axis: AxisGroup, chunks: int, *, sp: bool) -> Tensor:
    """Return `x @ weight.T` of (batch, token, width), all-reduced; under `sp` the own tokens of the sum."""
    found: Tensor = _Leave.apply(x, weight, axis, chunks, sp)
    return found


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: AxisGroup, chunks: int, sp: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.sp, ctx.chunks = axis, sp, chunks
        if not sp:
            return functional.linear(x, weight)
        arriving = [_gather(piece, axis) for piece in x.chunk(chunks, dim=1)]
        out = x.new_empty(x.shape[0], x.shape[1] * axis.size, weight.shape[0])
        for view, (whole, work) in zip(_split(out, axis, chunks, sp), arriving, strict=True):
            work.wait()
            view.copy_(functional.linear(whole, weight).transpose(0, 1))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        axis, sp, chunks = ctx.axis, ctx.sp, ctx.chunks
        pieces = list(x.chunk(chunks, dim=1))
        arriving = [_gather(piece, axis) if sp else (piece, None) for piece in pieces]
        some = _split(grads[0], axis, chunks, sp)
        leaving = [_sum(each @ weight, axis, sp) for each in some]
        dw = torch.zeros_like(weight)
        for each, (whole, work) in zip(some, arriving, strict=True):
            if work is not None:
                work.wait()
                whole = whole.transpose(0, 1)
            dw += each.flatten(0, -2).t() @ whole.flatten(0, -2)
        return _all(leaving), dw, None, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: AxisGroup, chunks: int, sp: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.sp, ctx.chunks = axis, sp, chunks
        return _all([_sum(functional.linear(some, weight), axis, sp) for some in _split(x, axis, chunks, sp)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        axis, sp, chunks = ctx.axis, ctx.sp, ctx.chunks
        pieces = list(grads[0].chunk(chunks, dim=1))
        arriving = [_gather(piece, axis) if sp else (piece, None) for piece in pieces]
        dx = torch.empty_like(x)
        dw = torch.zeros_like(weight)
        views = _split(dx, axis, chunks, sp)
        for some, view, (whole, work) in zip(_split(x, axis, chunks, sp), views, arriving, strict=True):
            if work is not None:
                work.wait()
                whole = whole.transpose(0, 1)
            view.copy_(whole @ weight)
            dw += whole.flatten(0, -2).t() @ some.flatten(0, -2)
        return dx, dw, None, None, None


def _gather(piece: Tensor, axis: AxisGroup) -> _Arriving:
    """Start the all-gather of a chunk of tokens: (rank, batch, token, width)."""
    piece = piece.contiguous()
    whole = piece.new_empty(axis.size, *piece.shape)
    return whole, gather_tensor(whole.flatten(0, 1), piece, group=axis.group, async_op=True)


def _sum(partial: Tensor, axis: AxisGroup, sp: bool) -> _Arriving:
    """Start the all-reduce of a chunk; under sequence parallelism a reduce-scatter of (batch, rank, token, width)."""
    if not sp:
        partial = partial.contiguous()
        return partial, dist.all_reduce(partial, group=axis.group, async_op=True)
    part = partial.new_empty(partial[:, 0].shape)
    return part, scatter_tensor(part, partial.transpose(0, 1).flatten(0, 1), group=axis.group, async_op=True)


def _all(arriving: list[_Arriving]) -> Tensor:
    for _, work in arriving:
        work.wait()
    return torch.cat([part for part, _ in arriving], dim=1)


def _split(x: Tensor, axis: AxisGroup, chunks: int, sp: bool) -> list[Tensor]:
    """Return chunks of tokens; under sequence parallelism each has tokens of every rank: (batch, rank, ...)."""
    if not sp:
        return list(x.chunk(chunks, dim=1))
    return list(x.unflatten(1, (axis.size, -1)).chunk(chunks, dim=2))
