"""Rotary positions on queries and keys, rotated in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.run.kernels.device import fused


class _SplitTurned(torch.autograd.Function):
    """In-place rotation of queries and keys in their joint product with values.

    The product may be overwritten, because its own backward pass does not need it, and attention keeps one buffer
    instead of two. Gradients are rotated back into one buffer too.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int], dim: int) -> tuple[Tensor, ...]:
        from meshwright.run.kernels.triton import rotary as kernel

        ctx.save_for_backward(cos, sin)
        ctx.heads, ctx.dim = heads, dim
        parts = qkv.detach().unflatten(-1, (-1, dim))
        both = parts[:, :, : heads[0] + heads[1]]
        kernel.turn(both, both, cos, sin)
        found: tuple[Tensor, ...] = parts.split(list(heads), dim=2)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        from meshwright.run.kernels.triton import rotary as kernel

        cos, sin = ctx.saved_tensors
        found = grads[0].new_empty(*grads[0].shape[:2], sum(ctx.heads), ctx.dim)
        q, k, v = found.split(list(ctx.heads), dim=2)
        kernel.turn(grads[0], q, cos, sin, back=True)
        kernel.turn(grads[1], k, cos, sin, back=True)
        v.copy_(grads[2])
        return found.flatten(2), None, None, None, None


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _turn(grads[0], *ctx.saved_tensors, back=True), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """Rotate by one kernel on CUDA devices; elsewhere by four passes over half a head each, in float32."""
    if fused(x) and x.shape[-1] & (x.shape[-1] - 1) == 0:  # a kernel's blocks are powers of two
        from meshwright.run.kernels.triton import rotary as kernel

        found = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        kernel.turn(x, found, cos, sin, back=back)
        return found
    wide = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    cos, sin, sign = cos.unsqueeze(2), sin.unsqueeze(2), 1.0 if back else -1.0
    (one, two), (first, second) = x.to(wide.dtype).chunk(2, dim=-1), wide.chunk(2, dim=-1)
    torch.mul(one, cos, out=first).addcmul_(two, sin, value=sign)
    torch.mul(two, cos, out=second).addcmul_(one, sin, value=-sign)
    return wide.to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (batch, sequence, head, dim) by cosines and sines of (batch, sequence, dim / 2).

    The two values of a pair are half a head apart.

    >>> turned(torch.tensor([1.0, 0.0]).view(1, 1, 1, 2), torch.zeros(1, 1, 1), torch.ones(1, 1, 1)).flatten()
    tensor([0., 1.])
    """
    found: Tensor = _Turned.apply(x, cos, sin)
    return found


def split_turned(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """Split (batch, sequence, width) into heads of queries, keys and values, and rotate the first two.

    On CUDA devices `qkv` is overwritten: pass a tensor that no one else keeps.

    >>> parts = split_turned(torch.ones(1, 2, 8), torch.ones(1, 2, 1), torch.zeros(1, 2, 1), (2, 1, 1), 2)
    >>> [tuple(part.shape) for part in parts]
    [(1, 2, 2, 2), (1, 2, 1, 2), (1, 2, 1, 2)]
    """
    if fused(qkv) and dim & (dim - 1) == 0:
        found: tuple[Tensor, ...] = _SplitTurned.apply(qkv, cos, sin, tuple(heads), dim)
        return found
    q, k, v = qkv.unflatten(-1, (-1, dim)).split(list(heads), dim=2)
    return turned(q, cos, sin), turned(k, cos, sin), v
