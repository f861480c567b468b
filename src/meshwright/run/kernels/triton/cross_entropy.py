"""Kernels of the cross entropy over rows of logits; imported only with a CUDA device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192


@triton.jit
def _statistics(logits, targets, most, total, chosen, width, first, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top, added = -float("inf"), 0.0
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        value = tl.load(logits + row * width + column, mask=column < width, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(value, axis=0))
        added = added * tl.exp(top - higher) + tl.sum(tl.exp(value - higher), axis=0)
        top = higher
    at = tl.load(targets + row) - first
    mine = (at >= 0) & (at < width)
    tl.store(chosen + row, tl.load(logits + row * width + at, mask=mine, other=0.0).to(tl.float32))
    tl.store(most + row, top)
    tl.store(total + row, added)


@triton.jit
def _gradients(logits, targets, log_total, width, first, ignored, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    log_sum = tl.load(log_total + row)
    counts = tl.where(target == ignored, 0.0, 1.0)
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        place = logits + row * width + column
        value = tl.load(place, mask=column < width, other=0.0).to(tl.float32)
        found = (tl.exp(value - log_sum) - tl.where(column == target - first, 1.0, 0.0)) * counts
        tl.store(place, found.to(logits.dtype.element_ty), mask=column < width)


def statistics(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return three statistics of every row, in float32.

    - the largest logit
    - the sum of exponentials of the logits less the largest
    - the target's logit; 0 if the target is not in this part of the vocabulary, which starts at `first`
    """
    rows, width = logits.shape
    most, total, chosen = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    _statistics[(rows,)](logits, targets, most, total, chosen, width, first, _BLOCK, num_warps=16)
    return most, total, chosen


def to_gradients(logits: Tensor, targets: Tensor, log_total: Tensor, first: int, ignored: int) -> None:
    """Overwrite logits with their gradients: softmax, less one at the target."""
    rows, width = logits.shape
    _gradients[(rows,)](logits, targets, log_total, width, first, ignored, _BLOCK, num_warps=16)


@triton.jit
def _scale(x, by, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(by)
    tl.store(x + at, value.to(x.dtype.element_ty), mask=at < count)


def scale(x: Tensor, by: Tensor) -> None:
    """Scale a contiguous tensor by one float32 number in place; PyTorch's mixed-type kernel is three times slower."""
    _scale[(triton.cdiv(x.numel(), _BLOCK),)](x, by.float(), x.numel(), _BLOCK, num_warps=8)
