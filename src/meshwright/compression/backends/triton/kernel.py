"""A kernel over tiles as Triton text: the common part of every pass, and writing the fields of a message."""

from __future__ import annotations

from textwrap import indent

from meshwright.compression.backends.triton.values import FIXED, TILE, TYPES, Body, Shape, small_whole
from meshwright.compression.program import Field, Pass

_ARGUMENTS = (
    "flat, residual, message, agreed, tiles, segments, partial, stats, found, sums, words, listed, values, seed, many"
)
_MOST = 3.4028234663852886e38  # a number that is not less or equal is infinite or NaN
_FLAGS = "FLAG: tl.constexpr, RESIDUAL: tl.constexpr, CHAIN: tl.constexpr, WIDE: tl.constexpr"

LOADING = [
    "x = read(flat + at + offset, inside, WHOLE).to(tl.float32)",
    "old = x",
    "if RESIDUAL:",
    "    old = read(residual + at + offset, inside, WHOLE)",
]
JUDGING = [
    "seen = x",
    "if RESIDUAL:",
    "    seen = x + old",
    f"    old = tl.where(tl.abs(old) <= {_MOST}, old, 0.0)  # else it would be bad for ever",
    "    x += old",
    f"good = tl.abs(x) <= {_MOST}",
    "x = tl.where(good, x, 0.0)",
]
# One number of each 32-bit word per iteration.
LOWEST = [
    "lowest = (word & -word).to(tl.float32).to(tl.int32, bitcast=True)  # its exponent is the place of the bit",
    "offset = which + ((lowest >> 23) & 255) - 127",
]
NEXT = ["word &= word - 1", "place += 1"]
LOOKED = ["if FLAG:", "    none = tl.sum(seen * 0.0)  # not 0 if a number is bad; nothing is cheaper"]
# An earlier kernel has written that no number is bad.
TOLD = [
    "if FLAG:",
    "    if none != 0.0:",
    "        tl.store((message + tl.load(facts + 2)).to(tl.pointer_type(tl.int32)), 1)",
]


def kernel(shape: Shape, name: str, body: Body, *, back: bool = False) -> str:
    """Return a pass over tiles of the gradients. Each can be the first, which looks for bad numbers.

    With `back` a pass starts at the last tile, where the previous pass ended: a cache still has some of its numbers.
    """
    size, columns = shape.size, shape.columns
    where = [
        f"rows = tl.arange(0, {size // columns})[:, None]",
        f"offset = rows * {columns} + tl.arange(0, {columns})[None, :]",
        "number, inside = start + offset, offset < length",
        f"zero, facts = offset * 0, segments + segment * {shape.width}",
        *LOADING,
        "follow(CHAIN)",
        *JUDGING,
        *LOOKED,
    ]
    inner = indent("\n".join([*where, *body.lines]), "    ")
    passed = f"{_ARGUMENTS}, tile, at, segment, start, length, FLAG, RESIDUAL, CHAIN, WIDE"
    return f"""
@triton.jit
def {name}_tile({_ARGUMENTS}, tile, at, segment, start, length, {_FLAGS}, WHOLE: tl.constexpr):
{inner}


@triton.jit(do_not_specialize=["seed", "many"])
def {name}({_ARGUMENTS}, {_FLAGS}, ALIGNED: tl.constexpr):
{indent(TILE.format(size=size, place="tl.num_programs(0) - 1 - tl.program_id(0)" if back else "tl.program_id(0)"), "    ")}
    if length == {size}:
        {name}_tile({passed}, True)
    else:
        {name}_tile({passed}, False)
"""


def stored(shape: Shape, body: Body, one: Field, place: int) -> list[str]:
    """Return lines that write a field of the message."""
    pointer = f"tl.multiple_of(tl.load(facts + {FIXED + place}), 16)"
    lines = [f"to = message + {pointer}"]
    kind = "float" if "f" in one.dtype else "int"
    if one.over == "number" and one.bits < 8:
        lines[0] += f" + start // {8 // one.bits}"
        kind = "float" if small_whole(one.node) else "int"
        code = f"hide({body.full(one.node, kind)}, inside, 0, WHOLE)"
        return [*lines, f"put(to, {code}, length, WHOLE, {one.bits}, {shape.size // shape.columns}, {shape.columns})"]
    value = body.full(one.node, kind) if one.over in {"number", "chosen"} else body.of(one.node, kind)
    lines[0] = f"to = (message + {pointer}).to(tl.pointer_type(tl.{TYPES[one.dtype]}))"
    if one.over == "number":
        lines.append(f"write(to + start + offset, {value}, inside, WHOLE)")
    elif one.over == "block":
        lines.append(f"write(to + start // {shape.columns} + rows, {value}, rows * {shape.columns} < length, WHOLE)")
    elif one.over == "chosen":
        lines.append(f"tl.store(to + place, cast({value}, to.dtype.element_ty), mask=kept)")
    else:
        lines.append(f"tl.store(to, cast({value}, to.dtype.element_ty), mask=start == 0)")
    return lines


def fields_of(shape: Shape, last: Pass, body: Body, *, chosen: bool) -> list[str]:
    """Return lines that write the fields of chosen numbers, or those that all gradients have."""
    fields = [(i, one) for i, one in enumerate(last.fields) if one.sent and (one.over == "chosen") == chosen]
    lines = [line for i, one in fields for line in stored(shape, body, one, i)]
    return [*body.lines, *lines]
