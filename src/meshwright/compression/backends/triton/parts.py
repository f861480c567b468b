"""What the generated Triton kernels are made of; imported only where Triton is.

A program of the grid handles one tile: so many numbers of one gradient, as rows and columns (a row is a block, where there
are blocks). A tile that is full takes the path without masks (`whole`), so that loads and stores are wide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshwright.compression.backends.triton.waiting import follow

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
def hashed(number, seed):
    """32 bits from the place and from what the seed was made into."""
    x = number.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    return x * 0x846CA68B


@triton.jit
def uniform(number, seed):
    """From [0, 1): a number from [1, 2) whose last 23 bits are the hash's first ones, less 1. No conversion is as cheap."""
    return ((hashed(number, seed) >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def put(pointer, code, length, whole: tl.constexpr, bits: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """Write codes of less than a byte, the first of a byte in its low bits. Floats are whole numbers that fit: their sums
    are exact, and cheaper than shifts."""
    # A thread has four numbers that lie together: with 4 bits, what they become is written at once, where it is.
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
        at = tl.multiple_of(at, [1, 1])  # else the compiler would first bring together what one thread can write
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
def cleared(message, facts, sums, each: tl.constexpr, told: tl.constexpr):
    """A message tells of no bad number yet (unless it has been `told`), and groups of tiles have chosen nothing; all that
    will be drawn is counted."""
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
    """What is the first kernel where no other one begins with it: tiles that find a bad number tell of it later."""
    follow(chain)
    cleared(message, segments + tl.program_id(0) * width, sums, each, told)


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
def reaching(sorted_numbers, many, least, guess):
    """How many of the numbers are less than one: 128 places are looked at in each turn, at first those around a guess."""
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
