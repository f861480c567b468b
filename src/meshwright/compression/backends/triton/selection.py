"""Choice of numbers as Triton text, in two passes.

The first pass tests every number and lists those that pass, tile by tile. The second goes over the lists, adds up how
many were chosen before, and writes the message. A list has room for several times the expected count. If more pass, the
second pass tests the tile's numbers again.
"""

from __future__ import annotations

from textwrap import indent

from meshwright.compression.backends.triton.compaction import listing, tested
from meshwright.compression.backends.triton.kernel import JUDGING, LOADING, LOWEST, NEXT, TOLD, fields_of
from meshwright.compression.backends.triton.values import TILE, Body, Shape
from meshwright.compression.language import REDUCTIONS
from meshwright.compression.program import Pass
from meshwright.errors import InputError

_TURNS = "flat, residual, message, agreed, segments, stats, seed, at, segment, start, word, place, room, left"
_GROUPS = (
    "flat, residual, message, agreed, tiles, segments, groups, stats, found, sums, words, listed, seed, "
    "RESIDUAL: tl.constexpr, CHAIN: tl.constexpr, ALIGNED: tl.constexpr"
)
GROUP = 4  # fields of a group of tiles: first, count, gradient, first group of the gradient
BEFORE = 1024  # groups whose counts are added up at once


def choosing(shape: Shape, last: Pass) -> str:
    """Return both passes."""
    if shape.program.block:
        raise InputError("chooses by blocks", field="choose", valid="a test without statistics of blocks")
    if any(one.over == "number" for one in last.fields):
        raise InputError("sends chosen numbers and all of them", field="encode", valid="one of both")
    return "\n\n".join([_listing(shape, last), _turns(shape, last), _again(shape, last), _collecting(shape, last)])


def _listing(shape: Shape, last: Pass) -> str:
    """Return the listing pass; the residual becomes what the message will lack if there is room for all."""
    assert last.choice is not None
    after = [
        "tl.store(found + tile, all_here)",
        f"tl.atomic_add(sums + tl.load(facts + 6) + start // {shape.size * shape.listed}, all_here, sem='relaxed')",
        *TOLD,
    ]
    if last.result is not None:
        body = Body(shape)
        passing = body.of(last.choice)
        body.lines.append(f"kept = {passing} & good")
        said = body.of(last.result, "float")
        body.lines.append(f"write(residual + at + offset, tl.where(good, x - {said}, old), inside, WHOLE)")
        after += [f"if RESIDUAL and all_here <= {shape.slots}:", "    tl.debug_barrier()  # they have been read"]
        after += ["    " + line for line in body.lines]
    # Index above, number below: one word to write.
    pair = "(number.to(tl.int64) << 32) | x.to(tl.uint32, bitcast=True).to(tl.int64)"
    wrote = [f"tl.store(listed + to + place, {pair}, mask=inside)"]
    before = [node for one in shape.program.encoding for node in one.reductions]
    back = any(node.op in REDUCTIONS or node.every == 1 for node in before if node.op != "agreed")
    return listing(shape, "choose", last.choice, wrote, after, back=back)


def _turns(shape: Shape, last: Pass) -> str:
    """Return lines that write the lowest number of each word, as far as there is room, until no word has any."""
    body = Body(shape)
    lines = fields_of(shape, last, body, chosen=True)
    rest = body.further()
    if last.result is not None:
        rest.lines.append(f"tl.store(residual + at + offset, x - {rest.of(last.result, 'float')}, mask=kept)")
    turn = [
        *LOWEST,
        "kept = (word != 0) & (place < room)",
        "number, zero = start + offset, offset * 0",
        "if RESIDUAL:",
        "    x = tl.load(residual + at + offset, mask=kept, other=0.0)",
        "else:",
        "    x = tl.load(flat + at + offset, mask=kept, other=0.0).to(tl.float32)",
        *lines,
        "if RESIDUAL:",
        *("    " + line for line in rest.lines),
        *NEXT,
        "left -= 1",
    ]
    return f"""
@triton.jit
def write_chosen({_TURNS}, RESIDUAL: tl.constexpr):
    which, facts = tl.arange(0, {shape.size // 32}) * 32, segments + segment * {shape.width}
    while left > 0:
{indent(chr(10).join(turn), "        ")}
"""


def _again(shape: Shape, last: Pass) -> str:
    """Return lines for a tile that has too many numbers for its list."""
    assert last.choice is not None
    lines = tested(shape, last.choice, Body(shape), bad=False)
    return f"""
@triton.jit
def test_again(flat, residual, message, agreed, tiles, segments, stats, words, seed, tile, before, room,
               RESIDUAL: tl.constexpr, ALIGNED: tl.constexpr):
    WHOLE: tl.constexpr = False
{indent(TILE.format(size=shape.size, place="tl.program_id(0)").partition(chr(10))[2], "    ")}
    offset = tl.arange(0, {shape.size // shape.columns})[:, None] * {shape.columns} + tl.arange(0, {shape.columns})[None, :]
    number, inside = start + offset, offset < length
    zero, facts = offset * 0, segments + segment * {shape.width}
{indent(chr(10).join([*LOADING, *JUDGING, *lines]), "    ")}
    place = before + tl.cumsum(here, 0) - here
    if RESIDUAL:
        write(residual + at + offset, tl.where(good, x, old), inside, WHOLE)
        tl.debug_barrier()  # those that are chosen are written again
    write_chosen({_TURNS.replace("left", "tl.max(here, 0)")}, RESIDUAL)
"""


def _collecting(shape: Shape, last: Pass) -> str:
    """Return the pass that writes lists of some tiles into the message; numbers without room return to the residual."""
    first, body = Body(shape), Body(shape)
    once, lines = fields_of(shape, last, first, chosen=False), fields_of(shape, last, body, chosen=True)
    many = shape.listed
    return f"""
@triton.jit(do_not_specialize=["seed"])
def collect({_GROUPS}):
    program = tl.program_id(0)
    row = groups + program * {GROUP}
    tile, tiles_here = tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32)
    segment, start = tl.load(row + 2).to(tl.int32), program - tl.load(row + 3).to(tl.int32)
    facts = segments + segment * {shape.width}
    at, room = tl.load(facts), tl.load(facts + 5).to(tl.int32)
    last = tile + tiles_here == (tl.load(facts + 3) + tl.load(facts + 4)).to(tl.int32)
    which = tl.arange(0, {many})
    follow(CHAIN)
    here = tl.load(found + tile + which, mask=which < tiles_here, other=0)
    rank = tl.arange(0, {shape.slots})[None, :]
    inside = rank < tl.where(here <= {shape.slots}, here, 0)[:, None]
    of = tile.to(tl.int64) * {shape.slots} + which[:, None] * {shape.slots} + rank
    pair = tl.load(listed + of, mask=inside, other=0)
    number, x = (pair >> 32).to(tl.int32), pair.to(tl.int32).to(tl.float32, bitcast=True)
    before = total_of(sums + program - start, start, {BEFORE})
    if last:
        head = (message + tl.load(facts + 2)).to(tl.pointer_type(tl.int32))
        tl.store(head + 1, tl.minimum(before + tl.sum(here, 0), room))
{indent(chr(10).join(once), "    ")}
    base = before + tl.cumsum(here, 0) - here
    place = base[:, None] + rank
    kept = inside & (place < room)
    zero = number * 0
{indent(chr(10).join(lines), "    ")}
    if RESIDUAL:
        tl.store(residual + at + number, x, mask=inside & (place >= room))
    if tl.max(here, 0) > {shape.slots}:
        i = tl.zeros((), tl.int32)
        while i < tiles_here:
            own = tl.sum(tl.where(which == i, base, 0), 0)
            if tl.load(found + tile + i) > {shape.slots}:
                test_again(flat, residual, message, agreed, tiles, segments, stats, words, seed, tile + i, own, room,
                           RESIDUAL, ALIGNED)
            i += 1
"""
