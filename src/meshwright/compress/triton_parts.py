"""What the generated Triton kernels are made of; imported only where Triton is.

A program of the grid handles one tile: so many numbers of one gradient, as rows and columns (a row is a block, where there
are blocks). A tile that is full takes the path without masks (`whole`), so that loads and stores are wide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshwright.compress.triton_waiting import follow

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
def nearest_small(x):
    """The same where numbers beyond 2^22 need only stay about as large, since they are cut off."""
    return (x + 12582912.0) - 12582912.0


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
    """Write codes of less than a byte, the first of a byte in its low bits. Floats are whole numbers that fit: their sums
    are exact, and cheaper than shifts."""
    each: tl.constexpr = 8 // bits
    weight = 1 << (tl.arange(0, each) * bits)
    if code.dtype == tl.float32:
        many = tl.reshape(code, (rows, columns // each, each)) * weight.to(tl.float32)[None, None, :]
        packed = small(tl.sum(many, axis=2)).to(tl.uint8)
    else:
        many = tl.reshape(code & (2**bits - 1), (rows, columns // each, each)) * weight[None, None, :]
        packed = tl.sum(many, axis=2).to(tl.uint8)
    at = tl.arange(0, rows)[:, None] * (columns // each) + tl.arange(0, columns // each)[None, :]
    write(pointer + at, packed, at < (length + each - 1) // each, whole)


@triton.jit
def get(pointer, length, whole: tl.constexpr, bits: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """Read codes of less than a byte: every byte once."""
    each: tl.constexpr = 8 // bits
    at = tl.arange(0, rows)[:, None] * (columns // each) + tl.arange(0, columns // each)[None, :]
    byte = read(pointer + at, at < (length + each - 1) // each, whole).to(tl.int32)
    shift = tl.arange(0, each) * bits
    code = (byte[:, :, None] >> shift[None, None, :]) & (2**bits - 1)
    return tl.reshape(code, (rows, columns))


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
def heads(message, segments, partial, width: tl.constexpr, wide: tl.constexpr, chain: tl.constexpr):
    """Tell of bad numbers, where no other kernel has done so."""
    segment = segments + tl.program_id(0) * width
    first, many, place = tl.load(segment + 3), tl.load(segment + 4).to(tl.int32), tl.load(segment + 2)
    follow(chain)
    head(message, place, largest_of(partial + first, many, 0.0, wide), 0)


@triton.jit
def candidate(low, high, j, turn):
    """A value that may be the threshold: at first the smallest one that is positive (j = 0) and the largest / 2^15 to / 2,
    then those that part the bracket into 16. Product and sum are rounded one after the other, as on every device: kernels
    that use this must be compiled without fused ones."""
    power = ((111 + j) << 23).to(tl.float32, bitcast=True)  # 2^(j - 16)
    later = low + (high - low) * (j.to(tl.float32) * 0.0625)
    return tl.where(turn == 0, tl.where(j == 0, _POSITIVE, high * power), later)


@triton.jit
def counted(value, low, high, turn):
    """How many numbers reach each of the 16 candidates: one sum for all, since sums wait for each other."""
    tried = candidate(low, high, tl.arange(0, 16), turn)
    return tl.sum(tl.where(value[None, :] >= tried[:, None], 1.0, 0.0), 1).to(tl.int32)


@triton.jit
def narrowed(found, low, high, k, turn):
    """The narrowest bracket whose lower end more than k numbers reach."""
    at = tl.arange(0, 16)
    tried = candidate(low, high, at, turn)
    more = (found > k) & (at > 0)
    new_low = tl.maximum(low, tl.max(tl.where(more, tried, low), 0))
    new_high = tl.minimum(high, tl.min(tl.where(more | (at == 0), high, tried), 0))
    # Not even k numbers are positive: all of them are taken.
    few = (turn == 0) & (tl.sum(tl.where(at == 0, found, 0), 0) <= k)
    return tl.where(few, _SMALLEST, new_low), tl.where(few, _SMALLEST, new_high)


@triton.jit
def reaching(sorted_numbers, many, least):
    """How many of the numbers are less than one: 32 places are looked at in each turn."""
    low = tl.zeros((), tl.int32)
    high = low + many
    place = tl.arange(0, 32) + 1
    while low < high:
        step = (high - low + 32) // 33
        at = low + place * step - 1
        below = tl.load(sorted_numbers + at, mask=at < high, other=0x7FFFFFFF) < least
        low += tl.sum(below.to(tl.int32), 0) * step
        high = tl.minimum(high, low + step - 1)
    return low
