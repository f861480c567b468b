"""Kernels of the RMS norm; imported only with a CUDA device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096  # minimum elements in a program's registers: a wide row, or several narrow ones
_WAVES = 4  # programs per multiprocessor in the backward pass, which sums the weight's gradient in registers


@triton.jit
def _forward(x, y, weight, rstd, rows, width, heads, token, head, eps, many: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * many + tl.arange(0, many)
    column = tl.arange(0, block)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    at = (row // heads * token + row % heads * head)[:, None] + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)
    gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    out = value * scale[:, None] * gain[None, :]
    tl.store(y + row[:, None] * width + column[None, :], out.to(y.dtype.element_ty), mask=inside)
    tl.store(rstd + row, scale, mask=row < rows)


@triton.jit
def _backward(
    dy, x, weight, rstd, beside, dx, dw, rows, width, heads, token, head,
    adds: tl.constexpr, many: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, block)
    gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((block,), dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, many), tl.num_programs(0)):
        row = tile.to(tl.int64) * many + tl.arange(0, many)
        inside = (row[:, None] < rows) & (column[None, :] < width)
        at = (row // heads * token + row % heads * head)[:, None] + column[None, :]
        flat = row[:, None] * width + column[None, :]
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        unit = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        grad = tl.load(dy + flat, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(grad * unit, axis=0)
        grad *= gain[None, :]
        found = scale * (grad - unit * (tl.sum(grad * unit, axis=1) / width)[:, None])
        if adds:
            found += tl.load(beside + flat, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + flat, found.to(dx.dtype.element_ty), mask=inside)
    tl.store(dw + tl.program_id(0) * width + column, total, mask=column < width)


def _rows(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """Return the tensor, its number of rows, and their layout: heads per token, and strides of tokens and heads.

    Heads of one token may be apart from the next token's: q and k are parts of a wider product.
    """
    if x.dim() == 4 and x.stride(3) == 1 and x.stride(0) == x.shape[1] * x.stride(1):
        return x, x[..., 0].numel(), x.shape[2], x.stride(1), x.stride(2)
    x = x.contiguous()
    return x, x[..., 0].numel(), 1, x.shape[-1], 0


def _tile(width: int) -> tuple[int, int, int]:
    """Return rows and columns of a tile, and its number of warps."""
    block = triton.next_power_of_2(width)
    many = max(1, _ELEMENTS // block)
    return many, block, min(max(many * block // 512, 4), 16)


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm, and the reciprocal deviation of every row in float32."""
    x, rows, heads, token, head = _rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    many, block, warps = _tile(x.shape[-1])
    _forward[(triton.cdiv(rows, many),)](
        x, y, weight, rstd, rows, x.shape[-1], heads, token, head, eps, many, block, num_warps=warps
    )
    return y, rstd


def backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, beside: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return gradients of the input (plus that of the residual stream, if any) and of the weight."""
    x, rows, heads, token, head = _rows(x)
    dy, beside = dy.contiguous(), None if beside is None else beside.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    many, block, warps = _tile(x.shape[-1])
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = min(triton.cdiv(rows, many), _WAVES * processors)
    dw = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        dy, x, weight, rstd, dy if beside is None else beside, dx, dw, rows, x.shape[-1], heads, token, head,
        beside is not None, many, block, num_warps=warps,
    )  # fmt: skip
    return dx, dw.sum(dim=0).to(weight.dtype)
