"""Random choice of numbers as Triton text: one pass over the tiles.

A tile's position determines its strata and their places in the message, so that no program waits for another and only
chosen numbers cost a hash.
"""

from __future__ import annotations

from textwrap import indent

from meshwright.compression.backends.triton.kernel import JUDGING, LOADING, TOLD, fields_of, kernel
from meshwright.compression.backends.triton.values import Body, Shape
from meshwright.compression.program import Pass

_WRITTEN = "residual, message, agreed, segments, stats, seed, at, segment, start, place, offset, x, good, kept"


def drawing(shape: Shape, last: Pass) -> str:
    """Return the kernel. Bad numbers are drawn as 0, so that they do not shift later ones."""
    body = Body(shape)
    once = fields_of(shape, last, Body(shape), chosen=False)
    body.lines += [
        *TOLD,
        *once,
        "place, there, chosen, fine, kept = drawn(flat, residual, facts, seed, at, start, length, RESIDUAL)",
        "if RESIDUAL:",
        "    tl.debug_barrier()  # those have been read",
        "    write(residual + at + offset, tl.where(good, x, old), inside, WHOLE)",
        "    tl.debug_barrier()  # those that are chosen are written again",
        "write_drawn(residual, message, agreed, segments, stats, seed, at, segment, start, place, there, chosen, fine,",
        "            kept, RESIDUAL)",
    ]
    return "\n\n".join([_strata(shape), _written(shape, last), kernel(shape, "choose", body)])


def _strata(shape: Shape) -> str:
    """Return lines on the strata that overlap a tile: places, chosen indices, and whether these are in the tile."""
    part = max(one.part for one in shape.program.fields)
    shortest = max(1, int(1 / part) - 1)  # numbers; a shorter gradient has one stratum
    lanes = 1 << (shape.size // shortest + 1).bit_length()
    return f"""
@triton.jit
def drawn(flat, residual, facts, seed, at, start, length, RESIDUAL: tl.constexpr):
    count, many = tl.load(facts + 1).to(tl.int32), tl.load(facts + 5).to(tl.int32)
    wide = count // tl.maximum(many, 1)
    longer = count - many * wide
    both = longer * (wide + 1)
    behind = longer + (start - both) // tl.maximum(wide, 1)
    place = tl.where(start < both, start // (wide + 1), behind) + tl.arange(0, {lanes})
    own = (wide + (place < longer).to(tl.int32)).to(tl.uint64)
    inside = ((hashed(place, seed).to(tl.uint64) * own) >> 32).to(tl.int32)
    offset = place * wide + tl.minimum(place, longer) + inside - start
    inside = (place < many) & (offset >= 0) & (offset < length)
    WHOLE: tl.constexpr = False
{indent(chr(10).join([*LOADING, *JUDGING]), "    ")}
    return place, offset, x, good, inside
"""


def _written(shape: Shape, last: Pass) -> str:
    body = Body(shape)
    lines = fields_of(shape, last, body, chosen=True)
    rest = body.further()
    if last.result is not None:
        said = rest.of(last.result, "float")
        rest.lines.append(f"tl.store(residual + at + offset, x - {said}, mask=kept & good)")
    return f"""
@triton.jit
def write_drawn({_WRITTEN}, RESIDUAL: tl.constexpr):
    number, zero, facts = start + offset, offset * 0, segments + segment * {shape.width}
{indent(chr(10).join(lines), "    ")}
    if RESIDUAL:
{indent(chr(10).join(rest.lines or ["pass"]), "        ")}
"""
