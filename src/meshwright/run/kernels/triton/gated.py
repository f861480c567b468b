"""Kernels of SwiGLU; imported only with a CUDA device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _forward(x, y, width, block: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(dy, x, dx, width, block: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dy + row * width + column, mask=inside, other=0.0).to(tl.float32)
    soft = tl.sigmoid(gate)
    silu = gate * soft
    kind = dx.dtype.element_ty
    tl.store(dx + row * 2 * width + column, (grad * up * (soft + silu * (1 - soft))).to(kind), mask=inside)
    tl.store(dx + row * 2 * width + width + column, (grad * silu).to(kind), mask=inside)


def forward(x: Tensor) -> Tensor:
    """Return SwiGLU of a contiguous (.., 2 width)."""
    width = x.shape[-1] // 2
    y = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    _forward[(y.numel() // width, triton.cdiv(width, _BLOCK))](x, y, width, _BLOCK, num_warps=8)
    return y


def backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of gates and ups, side by side again."""
    dx = torch.empty_like(x)
    width = dy.shape[-1]
    _backward[(dy.numel() // width, triton.cdiv(width, _BLOCK))](dy, x, dx, width, _BLOCK, num_warps=8)
    return dx
