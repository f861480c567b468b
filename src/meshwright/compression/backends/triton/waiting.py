"""Synchronisation between programs of one launch, and between successive launches; imported only with Triton.

A word that one program writes for others holds a value and a mark that changes with every launch, so that nothing is
cleared between launches. A program knows the new mark from its own word of the last launch. Devices start programs in
order, so all that a program waits for has started before it; the interpreter runs them one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow(chain: tl.constexpr):
    """Let the next launch begin (`chain` is 1 or 2), and wait for the previous one (2).

    Data that the previous launch does not write has been read already.
    """
    if chain > 0:
        gdc_launch_dependents()
    if chain == 2:
        gdc_wait()


@triton.jit
def all_of(board, row, first, many, mark, values, share: tl.constexpr):
    """Return the 16 values of every program on the same gradient, `many` of them from `first` on: (share, 16)."""
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
    return tl.where(inside, word & 0xFFFFFFFF, 0).to(tl.int32) + late  # 0; the compiler fails if it is unused
