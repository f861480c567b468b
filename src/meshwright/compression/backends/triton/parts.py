"""Building blocks of the generated Triton kernels; imported only with Triton.

A program of the grid handles one tile: some numbers of one gradient, as rows and columns (a row is a block, if there
are blocks). A full tile takes the path without masks (`whole`), so that loads and stores are wide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshwright.compression.backends.triton.waiting import follow

_SMALLEST = tl.constexpr(2.0**-126)
_POSITIVE = tl.constexpr(2.0**-149)  # the smallest positive number


@triton.jit
def read(pointer, inside, whole: tl.constexpr):
    return tl.load(pointer) if whole else tl.load(pointer, mask=inside, other=0)


@triton.jit
def to_bfloat(value):
    """Round to bfloat16 by hand: the interpreter truncates."""
    bits = value.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def cast(value, to: tl.constexpr):
    """Convert with rounding to nearest."""
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
    """Replace values outside a gradient by a neutral one."""
    return value if whole else tl.where(inside, value, other)


@triton.jit
def nearest(x):
    """Round to the nearest integer, ties to even, by adding 1.5 * 2^23."""
    return tl.where(tl.abs(x) < 4194304.0, (x + 12582912.0) - 12582912.0, x)


@triton.jit
def nearest_small(x):
    """Round to nearest where numbers beyond 2^22 may be inexact, since they are clipped."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def small(x):
    """Convert a whole float within 2^22 of 0 to an integer: the last bits of 1.5 * 2^23 plus it."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def hashed(number, seed):
    """Return 32 random bits from the index and the prepared seed."""
    x = number.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    return x * 0x846CA68B


@triton.jit
def uniform(number, seed):
    """Return numbers from [0, 1): [1, 2) with the hash's first 23 bits as mantissa, less 1. No conversion is as cheap."""
    return ((hashed(number, seed) >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def put(pointer, code, length, whole: tl.constexpr, bits: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """Write codes of less than a byte, the first of a byte in its low bits.

    Floats are whole numbers that fit: their sums are exact, and cheaper than shifts.
    """
    # A thread has four adjacent numbers: with 4 bits, it can write their codes directly.
    wide: tl.constexpr = 16 if bits == 4 and whole else 8
    each: tl.constexpr = wide // bits
    to: tl.constexpr = tl.uint16 if wide == 16 else tl.uint8
    weight = 1 << (tl.arange(0, each) * bits)
    if code.dtype == tl.float32:
        many = tl.reshape(code, (rows, columns // each, each)) * weight.to(tl.float32)[None, None, :]
        packed = small(tl.sum(many, axis=2)).to(to)
    else:
        many = tl.reshape(code & (2**bits - 1), (rows, columns // each, each)) * weight[None, None, :]
        packed = tl.sum(many, axis=2).to(to)
    at = tl.arange(0, rows)[:, None] * (columns // each) + tl.arange(0, columns // each)[None, :]
    if wide == 16:
        at = tl.multiple_of(at, [1, 1])  # else the compiler would first gather what one thread can write
    write(pointer.to(tl.pointer_type(to)) + at, packed, at < (length + each - 1) // each, whole)


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
    """Count the bits set in a 32-bit word."""
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
    """Write the first eight bytes of a gradient's message."""
    word = (message + place).to(tl.pointer_type(tl.int32))
    tl.store(word, bad.to(tl.int32))
    tl.store(word + 1, many)


@triton.jit
def cleared(message, facts, sums, each: tl.constexpr, told: tl.constexpr):
    """Clear flags and counters: no bad number yet (unless `told`), and no numbers chosen by groups of tiles.

    For random choice, the count is known and written.
    """
    if told == 0:
        head(message, tl.load(facts + 2), tl.zeros((), tl.int32), tl.load(facts + 5).to(tl.int32))
    if each > 0:
        first, i = tl.load(facts + 6), tl.zeros((), tl.int32)
        many = (tl.load(facts + 4).to(tl.int32) + each - 1) // each
        at = tl.arange(0, 1024)
        while i < many:
            tl.store(sums + first + i + at, tl.zeros((1024,), tl.int32), mask=i + at < many)
            i += 1024


@triton.jit
def heads(message, segments, sums, width: tl.constexpr, each: tl.constexpr, told: tl.constexpr, chain: tl.constexpr):
    """Clear messages in a kernel of its own, if no other kernel does it first: tiles set flags of bad numbers later."""
    follow(chain)
    cleared(message, segments + tl.program_id(0) * width, sums, each, told)


@triton.jit
def candidate(low, high, j, turn):
    """Return candidates for the threshold.

    In the first round these are the smallest positive value (j = 0) and the largest / 2^15 to / 2, then those that
    divide the bracket into 16. Product and sum are rounded separately, as on every device: kernels that use this must
    be compiled without fused multiply-adds.
    """
    power = ((111 + j) << 23).to(tl.float32, bitcast=True)  # 2^(j - 16)
    later = low + (high - low) * (j.to(tl.float32) * 0.0625)
    return tl.where(turn == 0, tl.where(j == 0, _POSITIVE, high * power), later)


@triton.jit
def counted(value, low, high, turn):
    """Count the numbers that reach each of the 16 candidates: in one sum, since sums wait for each other."""
    tried = candidate(low, high, tl.arange(0, 16), turn)
    return tl.sum(tl.where(value[None, :] >= tried[:, None], 1.0, 0.0), 1).to(tl.int32)


@triton.jit
def narrowed(found, low, high, k, turn):
    """Return the narrowest bracket whose lower end more than k numbers reach."""
    at = tl.arange(0, 16)
    tried = candidate(low, high, at, turn)
    more = (found > k) & (at > 0)
    new_low = tl.maximum(low, tl.max(tl.where(more, tried, low), 0))
    new_high = tl.minimum(high, tl.min(tl.where(more | (at == 0), high, tried), 0))
    # Fewer than k numbers are positive: all of them are taken.
    few = (turn == 0) & (tl.sum(tl.where(at == 0, found, 0), 0) <= k)
    return tl.where(few, _SMALLEST, new_low), tl.where(few, _SMALLEST, new_high)


@triton.jit
def reaching(sorted_numbers, many, least, guess):
    """Count numbers less than one by search: 128 positions per round, in the first around a guess."""
    place = tl.arange(0, 128) + 1
    step = 1 + many // 8192
    begin = guess - 64 * step
    at = begin + place * step - 1
    inside = (at >= 0) & (at < many)
    below = tl.load(sorted_numbers + at, mask=inside, other=0x7FFFFFFF) < least
    turns = tl.sum((below | (at < 0)).to(tl.int32), 0)
    low = tl.where(turns == 0, 0, tl.maximum(begin + turns * step, 0))
    high = tl.where(turns == 128, many, tl.minimum(begin + turns * step + step - 1, many))
    while low < high:
        step = (high - low + 128) // 129
        at = low + place * step - 1
        below = tl.load(sorted_numbers + at, mask=at < high, other=0x7FFFFFFF) < least
        low += tl.sum(below.to(tl.int32), 0) * step
        high = tl.minimum(high, low + step - 1)
    return low
