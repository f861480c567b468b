"""What the generated Triton kernels are made of; imported only where Triton is.

A program of the grid handles one tile: so many numbers of one gradient, as rows and columns (a row is a block, where there
are blocks). A tile that is full takes the path without masks (`whole`), so that loads and stores are wide.
"""

from __future__ import annotations

import triton
import triton.language as tl

TRIES = tl.constexpr(16)  # places for one threshold: how many numbers are positive, then how many reach each candidate
_SMALLEST = tl.constexpr(2.0**-126)
_POSITIVE = tl.constexpr(2.0**-149)  # the least number that is more than nothing


@triton.jit
def read(pointer, inside, whole: tl.constexpr):
    return tl.load(pointer) if whole else tl.load(pointer, mask=inside, other=0)


@triton.jit
def to_bfloat(value):
    """Rounded by hand: the interpreter cuts off."""
    bits = value.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def cast(value, to: tl.constexpr):
    """Rounded to the nearest."""
    return to_bfloat(value) if to == tl.bfloat16 and value.dtype == tl.float32 else value.to(to)


@triton.jit
def write(pointer, value, inside, whole: tl.constexpr):
    value = cast(value, pointer.dtype.element_ty)
    if whole:
        tl.store(pointer, value)
    else:
        tl.store(pointer, value, mask=inside)


@triton.jit
def hide(value, inside, other, whole: tl.constexpr):
    """A value that counts for nothing outside a gradient."""
    return value if whole else tl.where(inside, value, other)


@triton.jit
def nearest(x):
    """The nearest whole number, the even one of two: what an addition of 1.5 * 2^23 leaves."""
    return tl.where(tl.abs(x) < 4194304.0, (x + 12582912.0) - 12582912.0, x)


@triton.jit
def small(x):
    """A float that is whole and less than 2^22 away from 0, as an integer: the last bits of 1.5 * 2^23 and it."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def uniform(number, seed):
    """From [0, 1): a hash of the place and of what the seed was made into."""
    x = number.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return (x >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def put(pointer, code, length, whole: tl.constexpr, bits: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """Write codes of less than a byte: the first of a byte in its low bits."""
    each: tl.constexpr = 8 // bits
    shift = tl.arange(0, each) * bits
    many = tl.reshape(code & (2**bits - 1), (rows, columns // each, each)) << shift[None, None, :]
    packed = tl.sum(many, axis=2).to(tl.uint8)
    at = tl.arange(0, rows)[:, None] * (columns // each) + tl.arange(0, columns // each)[None, :]
    write(pointer + at, packed, at < (length + each - 1) // each, whole)


@triton.jit
def get(pointer, at, inside, whole: tl.constexpr, bits: tl.constexpr):
    """Read codes of less than a byte: every number reads the byte it is in, the first level of the cache has it."""
    each: tl.constexpr = 8 // bits
    shift: tl.constexpr = 3 if bits == 1 else (2 if bits == 2 else 1)
    byte = read(pointer + (at >> shift), inside, whole).to(tl.int32)
    return (byte >> ((at & (each - 1)) * bits)) & (2**bits - 1)


@triton.jit
def ones(word):
    """How many bits of a word of 32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def total_of(pointer, many, wide: tl.constexpr):
    found = tl.zeros((wide,), pointer.dtype.element_ty)
    at = tl.arange(0, wide)
    i = tl.zeros((), tl.int32)
    while i < many:
        found += tl.load(pointer + i + at, mask=i + at < many, other=0)
        i += wide
    return tl.sum(found, 0)


@triton.jit
def largest_of(pointer, many, least, wide: tl.constexpr):
    at = tl.arange(0, wide)
    found = tl.full((wide,), least, pointer.dtype.element_ty)
    i = tl.zeros((), tl.int32)
    while i < many:
        found = tl.maximum(found, tl.load(pointer + i + at, mask=i + at < many, other=least))
        i += wide
    return tl.max(found, 0)


@triton.jit
def smallest_of(pointer, many, most, wide: tl.constexpr):
    at = tl.arange(0, wide)
    found = tl.full((wide,), most, pointer.dtype.element_ty)
    i = tl.zeros((), tl.int32)
    while i < many:
        found = tl.minimum(found, tl.load(pointer + i + at, mask=i + at < many, other=most))
        i += wide
    return tl.min(found, 0)


@triton.jit
def head(message, place, bad, many):
    """The first eight bytes of a gradient's message."""
    word = (message + place).to(tl.pointer_type(tl.int32))
    tl.store(word, bad.to(tl.int32))
    tl.store(word + 1, many)


@triton.jit
def heads(message, segments, partial, width: tl.constexpr, wide: tl.constexpr):
    """Tell of bad numbers, where no other kernel has done so."""
    segment = segments + tl.program_id(0) * width
    bad = largest_of(partial + tl.load(segment + 3), tl.load(segment + 4).to(tl.int32), 0.0, wide)
    head(message, tl.load(segment + 2), bad, 0)


@triton.jit
def scan(message, segments, partial, found, base, flag: tl.constexpr, width: tl.constexpr, wide: tl.constexpr):
    """Where each tile writes the first number it has chosen, and how many a gradient has chosen, as far as there is room."""
    segment = segments + tl.program_id(0) * width
    first, many = tl.load(segment + 3), tl.load(segment + 4).to(tl.int32)
    at = tl.arange(0, wide)
    before = tl.zeros((), tl.int32)
    i = tl.zeros((), tl.int32)
    while i < many:
        inside = i + at < many
        here = tl.load(found + first + i + at, mask=inside, other=0)
        tl.store(base + first + i + at, before + tl.cumsum(here, 0) - here, mask=inside)
        before += tl.sum(here, 0)
        i += wide
    chosen = tl.minimum(before, tl.load(segment + 5).to(tl.int32))
    place = tl.load(segment + 2)
    word = (message + place).to(tl.pointer_type(tl.int32))
    tl.store(word + 1, chosen)
    if flag:
        tl.store(word, largest_of(partial + first, many, 0.0, wide).to(tl.int32))


@triton.jit
def begin(sample, partial, candidates, wide: tl.constexpr):
    """The first candidates of a threshold: the largest number / 2^15 to / 2; the bracket is from nothing to the largest."""
    which = tl.program_id(0)
    first, many = tl.load(sample + which * 4), tl.load(sample + which * 4 + 1).to(tl.int32)
    top = largest_of(partial + first, many, 0.0, wide)
    at = tl.arange(0, TRIES)
    power = ((111 + at) << 23).to(tl.float32, bitcast=True)  # 2^(at - 16)
    mine = candidates + which * 32
    tl.store(mine + at, tl.where(at == 0, _POSITIVE, top * power))
    tl.store(mine + 16, 0.0)
    tl.store(mine + 17, top)


@triton.jit
def narrow(
    sample, counts, candidates, stats, slots, slot, copies: tl.constexpr, first: tl.constexpr, last: tl.constexpr
):
    """Keep the narrowest bracket whose lower end more than k numbers reach, and part it into 16. Product and sum are
    rounded one after the other, as on every device: this kernel must be compiled without fused ones."""
    which = tl.program_id(0)
    k = tl.load(sample + which * 4 + 2).to(tl.int32)
    mine = candidates + which * 32
    at = tl.arange(0, TRIES)
    place = counts + which * copies * 16 + tl.arange(0, copies)[:, None] * 16 + at[None, :]
    found = tl.sum(tl.load(place), 0)
    tl.debug_barrier()  # all have been read
    tl.store(place, tl.zeros((copies, TRIES), tl.int32))
    low, high = tl.load(mine + 16), tl.load(mine + 17)
    tried = tl.load(mine + at)
    more = (found > k) & (at > 0)
    low = tl.maximum(low, tl.max(tl.where(more, tried, low), 0))
    high = tl.minimum(high, tl.min(tl.where(more | (at == 0), high, tried), 0))
    if first:  # not even k numbers are positive: all of them are taken
        few = tl.sum(tl.where(at == 0, found, 0), 0) <= k
        high = tl.where(few, _SMALLEST, high)
        low = tl.where(few, _SMALLEST, low)
    if last:
        tl.store(stats + which * slots + slot, high)
    else:
        step = (high - low) * (at.to(tl.float32) * 0.0625)
        tl.store(mine + at, low + step)
        tl.store(mine + 16, low)
        tl.store(mine + 17, high)
