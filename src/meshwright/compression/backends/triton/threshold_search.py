"""Search of a threshold as Triton text: programs examine a gradient (or a sample of it) together, in rounds."""

from __future__ import annotations

from textwrap import indent

from meshwright.compression.backends.triton.compaction import listing
from meshwright.compression.backends.triton.kernel import JUDGING, LOADING
from meshwright.compression.backends.triton.values import Body, Shape
from meshwright.compression.language import Node
from meshwright.compression.program import ROUNDS, RUN, walk
from meshwright.errors import InputError

CHUNK = 2048  # numbers that a program examines at once
# Fields of a program: gradient, its row of the board, the gradient's first row, rows, numbers to reach, step, numbers,
# begin.
FACTS = 8
LANES = 8192  # list entries that a program examines at once
GUESS = 1024  # runs, of which one is examined for a first guess of the threshold
MARGIN = 1.25  # factor of listed numbers over wanted ones

_ARGUMENTS = "flat, residual, agreed, segments, stats"
_BEGIN = f"""
    row = programs + tl.program_id(0) * {FACTS}
    segment, mine, first = tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
    rows, k, step = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)
    seen, at = tl.load(row + 6).to(tl.int32), tl.multiple_of(tl.load(row + 7), ALIGNED)
    chunks = (seen - 1) // {CHUNK} + 1
    follow(CHAIN)"""
_MARK = """
    mark = ((tl.load(board + mine * 16) >> 32) + 1) & 0x7FFFFFFF
    tl.debug_barrier()  # all threads have read it"""
_CLEARING = "CLEAR: tl.constexpr, LISTED: tl.constexpr, TOLD: tl.constexpr"
_OPTIONS = "RESIDUAL: tl.constexpr, SHARE: tl.constexpr, ALIGNED: tl.constexpr, CHAIN: tl.constexpr"


def _top(slot: int, passed: str, begin: str = "rows") -> str:
    """Return a function for the largest number that all programs of a gradient see."""
    return f"""    chunk = mine - first + {begin}
    while chunk < chunks:
        high = tl.maximum(high, tl.max(look_{slot}({passed}, chunk, RESIDUAL)))
        chunk += rows
    tops = tl.zeros((16,), tl.int32) + high.to(tl.int32, bitcast=True)
    high = tl.max(all_of(board, mine, first, rows, mark, tops, SHARE)).to(tl.float32, bitcast=True)
"""


def searching(shape: Shape, node: Node) -> str:
    """Return a kernel: the largest number, then `ROUNDS` rounds of counting numbers that reach each of 16 candidates.

    After each round every program publishes its counts, and all draw the same conclusion.
    """
    if any(one.block for one in walk(node.args[0])):
        raise InputError("depends on blocks", field="threshold", valid="a value without statistics of blocks")
    slot = shape.stats[id(node)]
    passed = _passed()
    return f"""
{_seen(shape, node, "seen", CHUNK)}


@triton.jit
def look_{slot}({passed}, chunk, RESIDUAL: tl.constexpr):
    if chunk < seen // {CHUNK}:
        value = seen_{slot}({passed}, chunk, RESIDUAL, True)
    else:
        value = seen_{slot}({passed}, chunk, RESIDUAL, False)
    return value


@triton.jit(do_not_specialize=["seed"])
def search_{slot}({_ARGUMENTS}, programs, board, seed, many, message, sums, {_CLEARING}, {_OPTIONS}):{_BEGIN}
    own = look_{slot}({passed}, mine - first, RESIDUAL)  # the first ones are kept for all rounds{_MARK}
    if CLEAR:
        if mine == first:
            cleared(message, segments + segment * {shape.width}, sums, LISTED, TOLD)
    high = tl.maximum(tl.max(own), 0.0)
{_top(slot, passed)}    low = tl.zeros((), tl.float32)
    for turn in range({ROUNDS}):
        found = counted(own, low, high, turn)
        chunk = mine - first + rows
        while chunk < chunks:
            found += counted(look_{slot}({passed}, chunk, RESIDUAL), low, high, turn)
            chunk += rows
        board += many * 16
        found = tl.sum(all_of(board, mine, first, rows, mark, found, SHARE), 0)
        low, high = narrowed(found, low, high, k, turn)
    if mine == first:
        tl.store(stats + segment * {len(shape.stats)} + {slot}, high)
"""


def _passed() -> str:
    return f"{_ARGUMENTS}, segment, at, step, seen, seed"


def _seen(shape: Shape, node: Node, name: str, numbers: int) -> str:
    """Return a function that computes some of the values whose threshold is searched, -1 beyond the last."""
    body = Body(shape)
    value = body.full(node.args[0])
    reads = any(one.op == "gradient" for one in walk(node.args[0]))
    lines = [
        f"rows, columns = tl.arange(0, {numbers // RUN})[:, None], tl.arange(0, {RUN})[None, :]",
        f"offset = (chunk * {numbers // RUN} + rows) * (step * {RUN}) + columns",
        f"number, inside, zero = offset, rows * {RUN} + columns < seen - chunk * {numbers}, offset * 0",
        f"facts = segments + segment * {shape.width}",
        *([*LOADING, *JUDGING] if reads else []),
        *body.lines,
        f"return tl.reshape(hide({value}, inside, -1.0, WHOLE), ({numbers},))",
    ]
    return f"""
@triton.jit
def {name}_{shape.stats[id(node)]}({_passed()}, chunk, RESIDUAL: tl.constexpr, WHOLE: tl.constexpr):
{indent(chr(10).join(lines), "    ")}"""


def refining(shape: Shape, node: Node) -> str:
    """Return kernels for a threshold over all numbers: those that reach a guess are listed, then searched.

    A tile whose list is too short is examined as a whole in every round; if the guess was too high, all numbers are.
    """
    slot, slots = shape.stats[id(node)], shape.slots
    tiles = max(1, LANES // slots)
    one = Body(shape)
    listed = one.full(node.args[0])
    wrote = [*one.lines, f"tl.store(values + to + place, {listed}, mask=inside)"]
    # The guess is stored where the result will be.
    reaching = Node("ge", (node.args[0], node), kind="bool")
    passed = _passed()
    return f"""{_seen(shape, node, "tile", shape.size)}


{listing(shape, f"pass_{slot}", reaching, wrote, ["tl.store(found + tile, all_here)"], bad=True)}

@triton.jit
def listed_{slot}(found, values, tile, end):
    which = tile + tl.arange(0, {tiles})
    here = tl.load(found + which, mask=which < end, other=0)
    rank = tl.arange(0, {slots})[None, :]
    of = tile.to(tl.int64) * {slots} + tl.arange(0, {tiles})[:, None] * {slots} + rank
    inside = rank < tl.where(here <= {slots}, here, 0)[:, None]
    return tl.reshape(tl.load(values + of, mask=inside, other=-1.0), ({tiles * slots},)), here


@triton.jit(do_not_specialize=["seed"])
def refine_{slot}({_ARGUMENTS}, programs, board, seed, many, found, values, {_OPTIONS}):{_BEGIN}{_MARK}
    facts = segments + segment * {shape.width}
    begin = tl.load(facts + 3).to(tl.int32)
    end = begin + tl.load(facts + 4).to(tl.int32)
    top, listed = tl.zeros((), tl.float32), tl.zeros((), tl.int32)
    tile = begin + (mine - first) * {tiles}
    while tile < end:
        value, here = listed_{slot}(found, values, tile, end)
        top = tl.maximum(top, tl.max(value, 0))
        listed += tl.sum(here, 0)
        if tl.max(here, 0) > {slots}:
            i = tile
            while i < tl.minimum(tile + {tiles}, end):
                if tl.load(found + i) > {slots}:
                    top = tl.maximum(top, tl.max(tile_{slot}({passed}, i - begin, RESIDUAL, False), 0))
                i += 1
        tile += rows * {tiles}
    place = tl.arange(0, 16)
    own = tl.where(place == 0, top.to(tl.int32, bitcast=True), listed)
    told = all_of(board, mine, first, rows, mark, own, SHARE)
    high = tl.max(tl.where(place[None, :] == 0, told, 0)).to(tl.float32, bitcast=True)
    good = tl.sum(tl.where(place[None, :] == 1, told, 0)) > k
    board += many * 16
    if good == 0:
{indent(_top(slot, passed, "0"), "    ")}    low = tl.zeros((), tl.float32)
    for turn in range({ROUNDS}):
        counts = tl.zeros((16,), tl.int32)
        if good:
            tile = begin + (mine - first) * {tiles}
            while tile < end:
                value, here = listed_{slot}(found, values, tile, end)
                counts += counted(value, low, high, turn)
                if tl.max(here, 0) > {slots}:
                    i = tile
                    while i < tl.minimum(tile + {tiles}, end):
                        if tl.load(found + i) > {slots}:
                            counts += counted(tile_{slot}({passed}, i - begin, RESIDUAL, False), low, high, turn)
                        i += 1
                tile += rows * {tiles}
        else:
            chunk = mine - first
            while chunk < chunks:
                counts += counted(look_{slot}({passed}, chunk, RESIDUAL), low, high, turn)
                chunk += rows
        board += many * 16
        counts = tl.sum(all_of(board, mine, first, rows, mark, counts, SHARE), 0)
        low, high = narrowed(counts, low, high, k, turn)
    if mine == first:
        tl.store(stats + segment * {len(shape.stats)} + {slot}, high)
"""
