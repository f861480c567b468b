"""Lists of the numbers that pass a test as Triton text, one for each tile, in the order of their places.

Few pass. So a tile is first looked at four numbers at a time: whether the largest of them passes, which is all that most
numbers cost. Then each thread tests those of its 32 numbers again, from the cache, that lie in such a four: three fours at
once, since each reading waits. Where a thread has more of them, every number of the tile is tested.
"""

from __future__ import annotations

from textwrap import indent

from meshwright.compress.language import Node
from meshwright.compress.triton_kernel import JUDGING, LOADING, LOWEST, NEXT, kernel
from meshwright.compress.triton_values import Body, Shape

FOURS = 3
_PASSED = (
    "flat, residual, agreed, segments, stats, words, numbers, values, seed, tile, at, segment, start, length"
)


def tested(shape: Shape, test: Node, body: Body, *, bad: bool = False) -> list[str]:
    """One bit for each number that passes, in words of 32; bad ones only if those may. The words are written and read, so
    that each thread has one of them: those that it has found are the same in many threads."""
    passing = body.of(test) + ("" if bad else " & good")
    return [
        *body.lines,
        f"passing = hide({passing}, inside, False, WHOLE)",
        *_spread(shape, "passing", 32),
        "here = ones(word.to(tl.uint32, bitcast=True))",
    ]


def _spread(shape: Shape, bits: str, each: int) -> list[str]:
    words = shape.size // 32
    return [
        f"bits = tl.reshape({bits}, ({words}, {each}))",
        f"own = words + tile.to(tl.int64) * {words} + tl.arange(0, {words})",
        f"tl.store(own, tl.sum(tl.where(bits, (1 << tl.arange(0, {each}))[None, :], 0), 1))",
        "tl.debug_barrier()",
        "word = tl.load(own)",
    ]


def listing(shape: Shape, name: str, test: Node, wrote: list[str], after: list[str], *, bad: bool = False) -> str:
    """A kernel that lists what passes a test, if there is room for all: `wrote` puts a number (`number`, `x`) at its `place`
    where it is `inside`. Then comes what is done `after` with how many there are, `all_here`."""
    body = Body(shape)
    fours = _fours(shape, test, body)
    body.lines += [*_spread(shape, fours, 8), f"all_here = list_{name}({_PASSED}, word, RESIDUAL)", *after]
    return "\n".join([_all(shape, name, test, wrote, bad), _few(shape, name, test, wrote, bad), kernel(shape, name, body)])


def _fours(shape: Shape, test: Node, body: Body) -> str:
    """Whether one of four numbers passes, or may."""
    shape_of = f"({shape.size // 4}, 4)"
    if test.op == "ge" and test.args[1].over in {"gradient", "constant"}:
        value, least = body.full(test.args[0], "float"), body.of(test.args[1], "float")
        return f"tl.max(tl.reshape(hide({value}, inside, float('-inf'), WHOLE), {shape_of}), 1) >= {least}"
    passing = body.of(test)
    return f"tl.max(tl.reshape(hide({passing}, inside, False, WHOLE).to(tl.int32), {shape_of}), 1) > 0"


def _few(shape: Shape, name: str, test: Node, wrote: list[str], bad: bool) -> str:
    body = Body(shape)
    passing = body.of(test) + ("" if bad else " & good")
    read, judged, listed = [], [], []
    for i in range(FOURS):
        read += [
            LOWEST[0],
            "offset = (which + (((lowest >> 23) & 255) - 127) * 4)[:, None] + four",
            "inside = (word != 0)[:, None] & (offset < length)",
            *LOADING,
            f"offset_{i}, inside_{i}, x_{i}, old_{i} = offset, inside, x, old",
            NEXT[0],
        ]
        judged += [
            f"offset, x, old = offset_{i}, x_{i}, old_{i}",
            "number, zero = start + offset, offset * 0",
            *JUDGING,
            *body.lines,
            f"inside_{i} = inside_{i} & ({passing})",
            f"x_{i}, many_{i} = x, inside_{i}.to(tl.int32)",
        ]
        listed += [
            f"number, x, inside = start + offset_{i}, x_{i}, inside_{i}",
            "zero = number * 0",
            f"place = before[:, None] + tl.cumsum(many_{i}, 1) - many_{i}",
            *wrote,
            f"before += tl.sum(many_{i}, 1)",
        ]
    return f"""
@triton.jit
def list_{name}({_PASSED}, word, RESIDUAL: tl.constexpr):
    which, facts = tl.arange(0, {shape.size // 32}) * 32, segments + segment * {shape.width}
    four = tl.arange(0, 4)[None, :]
    to = tile.to(tl.int64) * {shape.slots}
    WHOLE: tl.constexpr = False
{indent(chr(10).join([*read, "left = tl.max(word, 0)", *judged]), "    ")}
    here = tl.sum({" + ".join(f"many_{i}" for i in range(FOURS))}, 1)
    all_here = tl.sum(here, 0)
    if left == 0:
        if all_here <= {shape.slots}:
            before = tl.cumsum(here, 0) - here
{indent(chr(10).join(listed), "            ")}
    else:
        all_here = list_all_{name}({_PASSED}, RESIDUAL)
    return all_here
"""


def _all(shape: Shape, name: str, test: Node, wrote: list[str], bad: bool) -> str:
    lines = tested(shape, test, Body(shape), bad=bad)
    turn = [*LOWEST, "inside = word != 0", "number, zero = start + offset, offset * 0", *LOADING, *JUDGING, *wrote, *NEXT]
    return f"""
@triton.jit
def list_all_{name}({_PASSED}, RESIDUAL: tl.constexpr):
    offset = tl.arange(0, {shape.size // shape.columns})[:, None] * {shape.columns} + tl.arange(0, {shape.columns})[None, :]
    number, inside = start + offset, offset < length
    zero, facts = offset * 0, segments + segment * {shape.width}
    to = tile.to(tl.int64) * {shape.slots}
    WHOLE: tl.constexpr = False
{indent(chr(10).join([*LOADING, *JUDGING, *lines]), "    ")}
    all_here = tl.sum(here, 0)
    if all_here <= {shape.slots}:
        to_list_{name}(flat, residual, agreed, segments, stats, numbers, values, seed, at, segment, start, to, word,
                       tl.cumsum(here, 0) - here, tl.max(here, 0), RESIDUAL)
    return all_here


@triton.jit
def to_list_{name}(flat, residual, agreed, segments, stats, numbers, values, seed, at, segment, start, to, word, place, left,
                   RESIDUAL: tl.constexpr):
    which, facts = tl.arange(0, {shape.size // 32}) * 32, segments + segment * {shape.width}
    WHOLE: tl.constexpr = False
    while left > 0:
{indent(chr(10).join(turn), "        ")}
        left -= 1
"""
