"""How programs of one launch, and launches that follow each other, wait for what others find; imported only where Triton is.

A word that one program writes for others holds a value and a mark that changes with every launch, so that nothing is cleared
between launches: a program knows the new mark from its own word of the launch before. Devices start programs in their order,
so that all a program waits for has begun before it; the interpreter runs them one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# The kind of a word, above its value: 1 a tile's own number, 2 with all before it; 4 more in every second launch.
_KIND = tl.constexpr(56)
_VALUE = tl.constexpr((1 << 56) - 1)


@triton.jit
def follow(chain: tl.constexpr):
    """Let the next launch begin (`chain` is 1 or 2), and wait for the one before (2). What that one does not write has been
    read already."""
    if chain > 0:
        gdc_launch_dependents()
    if chain == 2:
        gdc_wait()


@triton.jit
def total_before(state, tile, first, mine, wide: tl.constexpr):
    """The sum of all tiles' numbers from the first one to before this one (Merrill and Garland 2016, decoupled look-back).
    `wide` is a multiple of the number of threads, so that each word is read once and all threads decide alike."""
    me = state + tile
    turn = ((tl.load(me) >> _KIND) & 4) ^ 4
    tl.debug_barrier()  # all threads have read it
    tl.atomic_xchg(me, mine | ((turn | tl.where(tile == first, 2, 1)) << _KIND), sem="relaxed")
    before = tl.zeros((), tl.int64)
    nearest = tile - 1
    place = tl.arange(0, wide)
    while nearest >= first:
        which = nearest - place
        inside = which >= first
        word = tl.load(state + which, mask=inside, other=0, volatile=True)
        kind = tl.where(inside, (word >> _KIND) ^ turn, 2).to(tl.int32)
        # The nearest tile that knows all before it (an even number), or is not ready (an odd one).
        end = tl.min(tl.where(kind == 1, 2 * wide, 2 * place + tl.where(kind > 2, 1, 0)), 0)
        if end % 2 == 0:
            before += tl.sum(tl.where(inside & (2 * place <= end), word & _VALUE, 0), 0)
            nearest = tl.where(end == 2 * wide, nearest - wide, first - 1)
    if tile != first:
        tl.atomic_xchg(me, (before + mine) | ((turn | 2) << _KIND), sem="relaxed")
    return before


@triton.jit
def all_of(board, row, first, many, mark, values, share: tl.constexpr):
    """The 16 values of every program that works on the same gradient, from `first` on, `many` of them: (share, 16)."""
    at = tl.arange(0, 16)
    which = tl.arange(0, share)[:, None]
    if share == 1:
        return values[None, :]
    tl.atomic_xchg(board + row * 16 + at, values.to(tl.int64) | (mark << 32), sem="relaxed")
    inside = (which < many) & (at[None, :] >= 0)
    late = 1
    word = tl.zeros((share, 16), tl.int64)
    while late > 0:
        word = tl.load(board + (first + which) * 16 + at[None, :], mask=inside, other=0, volatile=True)
        late = tl.max(tl.where(inside & ((word >> 32) != mark), 1, 0))
    return tl.where(inside, word & 0xFFFFFFFF, 0).to(tl.int32) + late  # 0; the compiler fails where it is not used
