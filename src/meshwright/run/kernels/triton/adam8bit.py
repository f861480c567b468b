"""Kernel of 8-bit AdamW: one pass over a parameter, its gradient and both moments; imported only with a CUDA device.

The formulas are those of `optimizers/adam8bit.py`. Ten bytes per value leave time for about sixty instructions. So bits
are set instead of converted, roots and reciprocals are the device's approximations (2^-22), and one random number per
value serves all three roundings.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_MANY, _WARPS = 4, 2  # blocks per program and its warps: 16 values per thread
_NUMBERS = tl.constexpr("\n".join(f"prmt.b32 ${i}, $4, 0x4B000000, 0x744{i};" for i in range(4)))


@triton.jit
def _root(x):
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _below(x):
    """Round down to a whole number, up to 2^23, by adding 2^23 with truncation."""
    return tl.inline_asm_elementwise("add.rz.ftz.f32 $0, $1, 0f4B000000;", "=f,f", [x], tl.float32, True, 1) - 8388608.0


@triton.jit
def _positive(x):
    """Return one where x is positive, else 0."""
    return tl.inline_asm_elementwise("mul.sat.ftz.f32 $0, $1, 0f7F000000;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _noise(at):
    """Return multiples of the golden ratio, with the upper half also in the lower.

    Over steps, which start anywhere, every value gets each number equally often, and neighbours get different ones.
    """
    x = at * 0x9E3779B1
    return x ^ (x >> 16)


@triton.jit
def _number(code, less: tl.constexpr):
    """Convert unsigned bytes, four in a register, to floats minus `less`, through the last bits of 2^23."""
    found = tl.inline_asm_elementwise(_NUMBERS, "=r,=r,=r,=r,r", [code], tl.float32, True, 4)
    return found - (8388608.0 + less)


@triton.jit
def _byte(x, more: tl.constexpr):
    """Convert a whole number plus `more`, below 256, to a byte."""
    return (x + (8388608.0 + more)).to(tl.uint32, bitcast=True).to(tl.uint8)


@triton.jit
def _update(
    weight, grad, first, second, first_scale, second_scale, count, seed, beta1, beta2, eps, shrink, rate, root,
    rounds: tl.constexpr, whole: tl.constexpr, many: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * many
    which = tl.arange(0, many)
    at = which[:, None] * block + tl.arange(0, block)[None, :]
    left = tl.minimum(count - start * block, many * block).to(tl.int32)
    inside, there = (at < left) | whole, (which * block < left) | whole
    noise = _noise((start * block).to(tl.uint32) + at.to(tl.uint32) + seed.to(tl.uint32))
    weight += start * block
    first += start * block
    second += start * block
    first_scale += start
    second_scale += start
    g = tl.load(grad + start * block + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    m = _number(tl.load(first + at, mask=inside, other=128), 128.0)
    r = _number(tl.load(second + at, mask=inside, other=0), 0.0)
    scale = tl.load(first_scale + which, mask=there, other=0.0) * (beta1 / 16129.0)
    m = m * tl.abs(m) * scale[:, None] + (1 - beta1) * g
    scale = tl.load(second_scale + which, mask=there, other=0.0) * (beta2 / 4228250625.0)
    r *= r
    v = r * r * scale[:, None] + (1 - beta2) * g * g
    r = _root(v)
    w = w * shrink - rate * (m * _reciprocal(r * root + eps))
    if rounds:  # stochastic rounding to bfloat16: small steps are not lost on average
        up = w.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)
        tl.store(weight + at, (up >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        tl.store(weight + at, w.to(weight.dtype.element_ty), mask=inside)
    size = tl.abs(m)
    top, high = tl.max(size, axis=1), tl.max(v, axis=1)
    tl.store(first_scale + which, top, mask=there)
    tl.store(second_scale + which, high, mask=there)
    # Codes below and above; the upper one as often as makes the mean of the values right, not that of the codes.
    chance = ((noise >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    u = size * (16129.0 / tl.maximum(top, 1.2e-38))[:, None]
    low = _below(_root(u))
    code = tl.where(chance * tl.fma(low, 2.0, 1.0) < u - low * low, low + 1, low)
    signed = code.to(tl.uint32, bitcast=True) | (m.to(tl.uint32, bitcast=True) & 0x80000000)
    tl.store(first + at, _byte(signed.to(tl.float32, bitcast=True), 128.0), mask=inside)
    r *= (65025.0 / tl.sqrt(tl.maximum(high, 1.2e-38)))[:, None]
    low = _below(_root(r))
    least, step = low * low, tl.fma(low, 2.0, 1.0)
    code = tl.where(chance * (step * tl.fma(least, 2.0, step)) < r * r - least * least, low + 1, low)
    tl.store(second + at, _byte(tl.maximum(code, _positive(v)), 0.0), mask=inside)


def update(
    weight: Tensor, grad: Tensor, moments: tuple[Tensor, Tensor, Tensor, Tensor], block: int, seed: int,
    numbers: tuple[float, ...], rounds: bool,
) -> None:  # fmt: skip
    """Update in place. `numbers` are the learning rate, both betas, eps, weight decay and both bias corrections."""
    count = weight.numel()
    rate, beta1, beta2, eps, decay, correct1, correct2 = numbers
    _update[(triton.cdiv(count, _MANY * block),)](
        weight, grad, *moments, count, seed, beta1, beta2, eps, 1 - rate * decay, rate / correct1, correct2**-0.5,
        rounds, count % (_MANY * block) == 0, _MANY, block, num_warps=_WARPS,
    )  # fmt: skip
