"""Kernels for gradients that PowerSGD sends uncompressed, and for bad numbers; imported only with Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from meshwright.compression.backends.triton.waiting import follow


@triton.jit
def judge(p, q, start, flags, judged, wide: tl.constexpr, chain: tl.constexpr):
    """Flag factors (or uncompressed gradients) with an infinite number or NaN.

    Such a factor is reset to that of the first step.
    """
    row = judged + tl.program_id(0) * 3
    thin, at, many = tl.load(row).to(tl.int32), tl.load(row + 1), tl.load(row + 2).to(tl.int32)
    source = q if thin else p
    none = tl.zeros((wide,), tl.float32)
    follow(chain)
    turn = tl.zeros((), tl.int32)
    while turn * wide < many:
        place = turn * wide + tl.arange(0, wide)
        none += tl.load(source + at + place, mask=place < many, other=0.0) * 0.0
        turn += 1
    bad = tl.sum(none, 0) != 0.0
    tl.store(flags + tl.program_id(0), bad.to(tl.int32))
    if bad & (thin > 0):
        turn = tl.zeros((), tl.int32)
        while turn * wide < many:
            place = turn * wide + tl.arange(0, wide)
            tl.store(q + at + place, tl.load(start + at + place, mask=place < many), mask=place < many)
            turn += 1


@triton.jit
def send(flat, residual, p, tiles, size: tl.constexpr, kept: tl.constexpr, chain: tl.constexpr):
    """Copy uncompressed gradients, with their residual, to the message."""
    row = tiles + tl.program_id(0) * 4
    at, to, many = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    place = tl.arange(0, size)
    inside = place < many
    follow(chain)
    x = tl.load(flat + at + place, mask=inside)
    if kept:
        x += tl.load(residual + at + place, mask=inside)
        tl.store(flat + at + place, x, mask=inside)
    tl.store(p + to + place, x, mask=inside)


@triton.jit
def receive(
    flat, residual, p, lacks, flags, tiles, size: tl.constexpr,
    kept: tl.constexpr, said: tl.constexpr, chain: tl.constexpr,
):  # fmt: skip
    """Copy uncompressed gradients back from the message; `lacks` is what the message lost of them."""
    row = tiles + tl.program_id(0) * 4
    which, at, to, many = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    place = tl.arange(0, size)
    inside = place < many
    follow(chain)
    bad = tl.load(flags + which)
    x = tl.load(p + to + place, mask=inside)
    tl.store(flat + at + place, tl.where(bad == 0, x, float("nan")), mask=inside)
    if kept:
        rest = tl.zeros((size,), tl.float32)
        if said:
            rest = tl.load(lacks + to + place, mask=inside)
        tl.store(residual + at + place, rest, mask=inside & (bad == 0))
