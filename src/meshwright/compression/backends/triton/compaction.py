"""Lists of the numbers that pass a test as Triton text, one list per tile, in order.

Few numbers pass. So a tile is first examined four numbers at a time: whether the largest of them passes, which is all
that most numbers cost. Then each thread reads those of its 32 numbers in such a group of four again, from the cache,
and lists those that pass. It reads three groups at once, since each read waits. If a thread has more groups, every
number of the tile is tested.
"""

from __future__ import annotations

from textwrap import indent

from meshwright.compression.backends.triton.kernel import JUDGING, LOADING, LOWEST, NEXT, kernel
from meshwright.compression.backends.triton.values import Body, Shape
from meshwright.compression.language import Node

AT_ONCE = 3
_PASSED = "flat, residual, agreed, segments, stats, words, listed, values, seed, tile, at, segment, start, length"
_LIST = "flat, residual, agreed, segments, stats, listed, values, seed, at, segment, start, to, word, place, going"


def tested(shape: Shape, test: Node, body: Body, *, bad: bool) -> list[str]:
    """Return lines that write one bit for each passing number, in words of 32; bad ones only if `bad`.

    The words are written and read back so that each thread has one of them: threads hold copies of what they computed.
    """
    passing = body.of(test) + ("" if bad else " & good")
    return [
        *body.lines,
        f"passing = hide({passing}, inside, False, WHOLE)",
        *_words(shape, "passing"),
        "word = tl.load(own)",
        "here = ones(word.to(tl.uint32, bitcast=True))",
    ]


def _words(shape: Shape, bits: str, each: int = 1) -> list[str]:
    """Return lines that write a bit for `each` numbers, 32 in a word."""
    words = shape.size // 32 // each
    return [
        f"bits = tl.reshape({bits}, ({words}, 32))",
        f"own = words + tile.to(tl.int64) * {shape.size // 32} + tl.arange(0, {words})",
        "tl.store(own, tl.sum(tl.where(bits, (1 << tl.arange(0, 32))[None, :], 0), 1))",
        "tl.debug_barrier()",
    ]


def listing(
    shape: Shape, name: str, test: Node, wrote: list[str], after: list[str], *, bad: bool = False, back: bool = False
) -> str:
    """Return a kernel that lists what passes a test, if there is room for all.

    `wrote` stores a number (`number`, `x`) at its `place` where it is `inside`. The lines `after` follow with the
    count, `all_here`.
    """
    body = Body(shape)
    fours = _fours(shape, test, body)
    own = f"(words + tile.to(tl.int64) * {shape.size // 32}).to(tl.pointer_type(tl.uint8))"
    body.lines += [*_words(shape, fours, 4), f"word = tl.load({own} + tl.arange(0, {shape.size // 32})).to(tl.int32)"]
    body.lines += [f"all_here = list_{name}({_PASSED}, word, RESIDUAL, WHOLE)", *after]
    texts = [_put(shape, name, wrote), _all(shape, name, test, bad), _few(shape, name, test, bad)]
    return "\n".join([*texts, kernel(shape, name, body, back=back)])


def _fours(shape: Shape, test: Node, body: Body) -> str:
    """Return lines that test if one of four numbers passes, or may pass."""
    shape_of = f"({shape.size // 4}, 4)"
    if test.op == "ge" and test.args[1].over in {"gradient", "constant"}:
        value, least = body.full(test.args[0], "float"), body.of(test.args[1], "float")
        return f"tl.max(tl.reshape(hide({value}, inside, float('-inf'), WHOLE), {shape_of}), 1) >= {least}"
    passing = body.of(test)
    return f"tl.max(tl.reshape(hide({passing}, inside, False, WHOLE).to(tl.int32), {shape_of}), 1) > 0"


def _few(shape: Shape, name: str, test: Node, bad: bool) -> str:
    """Return lines that turn one bit per four numbers into one bit per number.

    One sum gives the count of passing numbers, and whether a thread has more groups or numbers than are read at once.
    """
    words, high = shape.size // 32, shape.size.bit_length()
    body = Body(shape)
    passing = body.of(test) + ("" if bad else " & good")
    read, judged = [], []
    for i in range(AT_ONCE):
        read += [
            LOWEST[0],
            "shift = (((lowest >> 23) & 255) - 127) * 4",
            "offset = (which + shift)[:, None] + four",
            f"inside = tl.broadcast_to((word != 0)[:, None], ({words}, 4))",
            "if not FULL:",
            "    inside = inside & (offset < length)",
            *LOADING,
            f"shift_{i}, offset_{i}, inside_{i}, x_{i}, old_{i} = shift, offset, inside, x, old",
            NEXT[0],
        ]
        judged += [
            f"offset, inside, x, old = offset_{i}, inside_{i}, x_{i}, old_{i}",
            "number, zero = start + offset, offset * 0",
            *JUDGING,
            *body.lines,
            f"found |= tl.sum(tl.where(inside & ({passing}), 1 << four, 0), 1) << (shift_{i} & 31)",
        ]
    return f"""
@triton.jit
def list_{name}({_PASSED}, word, RESIDUAL: tl.constexpr, FULL: tl.constexpr):
    which, facts = tl.arange(0, {words}) * 32, segments + segment * {shape.width}
    four = tl.arange(0, 4)[None, :]
    found = tl.zeros(({words},), tl.int32)
    WHOLE: tl.constexpr = False
{indent(chr(10).join([*read, *judged]), "    ")}
    here = ones(found.to(tl.uint32, bitcast=True))
    more = ((word != 0).to(tl.int32) << {high}) + ((here > {AT_ONCE}).to(tl.int32) << {2 * high - 5})
    told = tl.sum(here + more, 0)
    all_here = told & {(1 << high) - 1}
    if (told >> {high}) & {(1 << (high - 5)) - 1} == 0:
        if all_here <= {shape.slots}:
            to, word, place = tile.to(tl.int64) * {shape.slots}, found, tl.cumsum(here, 0) - here
            going = told >> {2 * high - 5}
            put_{name}({_LIST}, RESIDUAL)
    else:
        all_here = list_all_{name}({_PASSED}, RESIDUAL)
    return all_here
"""


def _all(shape: Shape, name: str, test: Node, bad: bool) -> str:
    lines = tested(shape, test, Body(shape), bad=bad)
    return f"""
@triton.jit
def list_all_{name}({_PASSED}, RESIDUAL: tl.constexpr):
    offset = tl.arange(0, {shape.size // shape.columns})[:, None] * {shape.columns} + tl.arange(0, {shape.columns})[None, :]
    number, inside = start + offset, offset < length
    zero, facts = offset * 0, segments + segment * {shape.width}
    WHOLE: tl.constexpr = False
{indent(chr(10).join([*LOADING, *JUDGING, *lines]), "    ")}
    all_here = tl.sum(here, 0)
    if all_here <= {shape.slots}:
        to, place, going = tile.to(tl.int64) * {shape.slots}, tl.cumsum(here, 0) - here, tl.max(here, 0)
        put_{name}({_LIST}, RESIDUAL)
    return all_here
"""


def _put(shape: Shape, name: str, wrote: list[str]) -> str:
    """Return lines that list numbers whose bits are set; `going` is nonzero if a word has more than are read at once."""
    read = [*LOWEST, "inside = word != 0", *LOADING]
    used = ["number, zero = start + offset, offset * 0", *JUDGING, *wrote, NEXT[1]]
    lines: list[str] = []
    for i in range(AT_ONCE):
        lines += [*read, f"offset_{i}, inside_{i}, x_{i}, old_{i} = offset, inside, x, old", NEXT[0]]
    for i in range(AT_ONCE):
        lines += [f"offset, inside, x, old = offset_{i}, inside_{i}, x_{i}, old_{i}", *used]
    return f"""
@triton.jit
def put_{name}({_LIST}, RESIDUAL: tl.constexpr):
    which, facts = tl.arange(0, {shape.size // 32}) * 32, segments + segment * {shape.width}
    WHOLE: tl.constexpr = False
{indent(chr(10).join(lines), "    ")}
    while going > 0:
{indent(chr(10).join([*read, *used, NEXT[0]]), "        ")}
        going = tl.max((word != 0).to(tl.int32), 0)
"""
