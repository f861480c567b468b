"""Kernel of rotary positions; imported only with a CUDA device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn(
    x, y, cos, sin, sign, length, heads, x_batch, x_token, x_head, y_batch, y_token, y_head, half: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    token, pair, head = tl.program_id(0).to(tl.int64), tl.arange(0, half), tl.arange(0, block)
    c, s = tl.load(cos + token * half + pair)[None, :], sign * tl.load(sin + token * half + pair)[None, :]
    batch, place = token // length, token % length
    inside = head[:, None] < heads
    source = x + batch * x_batch + place * x_token + head[:, None] * x_head + pair[None, :]
    one = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    target = y + batch * y_batch + place * y_token + head[:, None] * y_head + pair[None, :]
    tl.store(target, (one * c - two * s).to(y.dtype.element_ty), mask=inside)
    tl.store(target + half, (two * c + one * s).to(y.dtype.element_ty), mask=inside)


def turn(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> None:
    """Rotate (batch, sequence, head, dim) of any strides into y, which may be x itself; or rotate back."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, length, heads, dim = x.shape
    cos, sin = (part.expand(batch, length, dim // 2).contiguous() for part in (cos, sin))
    _turn[(batch * length,)](
        x, y, cos, sin, -1.0 if back else 1.0, length, heads, *x.stride()[:3], *y.stride()[:3], dim // 2,
        triton.next_power_of_2(heads), num_warps=4,
    )  # fmt: skip
