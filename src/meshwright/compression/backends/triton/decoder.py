"""Decoding as Triton text: every number from its message, or chosen numbers to their indices."""

from __future__ import annotations

from textwrap import indent

from meshwright.compression.backends.triton.values import FIXED, TILE, TYPES, Body, Shape
from meshwright.compression.language import Node
from meshwright.compression.program import Field, Program, walk
from meshwright.errors import InputError

SPREAD = 4096  # numbers that one program writes if few were sent
_AT_ONCE = 128  # sent numbers read at once


def reading(shape: Shape) -> str:
    """Return a decoding kernel: every number from the message, or chosen numbers to their indices."""
    result = shape.program.decoding.result
    assert result is not None
    if result.op == "spread":
        return (_spreading(shape, result) if in_order(shape.program) else "") + _scattering(shape, result)
    if any(node.op == "spread" for node in walk(result)):
        raise InputError(
            "computes with what it has spread", field="decode", valid="spread(...) of computed values, at last"
        )
    body = _Message(shape)
    body.lines += [
        f"value = {body.full(result, 'float')}",
        "to = out + at + offset",
        "if ADD:",
        "    value += read(to, inside, WHOLE).to(tl.float32)",
        "write(to, value, inside, WHOLE)",
    ]
    columns = shape.columns
    where = [
        f"rows = tl.arange(0, {shape.size // columns})[:, None]",
        f"offset = rows * {columns} + tl.arange(0, {columns})[None, :]",
        "number, inside = start + offset, offset < length",
        f"zero, facts = offset * 0, segments + segment * {shape.width}",
    ]
    passed = "message, out, agreed, tiles, segments, at, segment, start, length, ADD"
    return f"""
@triton.jit
def decode_tile({passed}: tl.constexpr, WHOLE: tl.constexpr):
{indent(chr(10).join([*where, *body.lines]), "    ")}


@triton.jit
def decode(message, out, agreed, tiles, segments, ADD: tl.constexpr, ALIGNED: tl.constexpr):
{indent(TILE.format(size=shape.size, place="tl.program_id(0)"), "    ")}
    if length == {shape.size}:
        decode_tile({passed}, True)
    else:
        decode_tile({passed}, False)
"""


def in_order(program: Program) -> bool:
    """Return True if a message has chosen numbers in the order of their indices."""
    result = program.decoding.result
    if result is None or result.op != "spread" or result.args[0].op != "field":
        return False
    stored = next(one.node for one in program.fields if one.name == result.args[0].name)
    return stored.op == "take" and stored.args[1].op == "index"


def _spreading(shape: Shape, result: Node) -> str:
    """Return a kernel that writes chosen numbers and zeros; a tile's chosen numbers are found by their order."""
    body, size = _Message(shape), SPREAD
    index, value = body.of(result.args[0], "int"), body.of(result.args[1], "float")
    place, _ = _field(shape, result.args[0].name)
    passed = "message, out, agreed, segments, segment, facts, number, many"
    return f"""
@triton.jit
def sent({passed}):
    inside = number < many
{indent(chr(10).join(body.lines), "    ")}
    return {index}, {value}


@triton.jit
def decode(message, out, agreed, tiles, segments, ALIGNED: tl.constexpr):
{indent(TILE.format(size=size, place="tl.program_id(0)"), "    ")}
    facts, end = segments + segment * {shape.width}, start + length
    head = (message + tl.load(facts + 2)).to(tl.pointer_type(tl.int32))
    many = tl.minimum(tl.load(facts + 5).to(tl.int32), tl.maximum(tl.load(head + 1), 0))
    places = (message + tl.load(facts + {FIXED + place})).to(tl.pointer_type(tl.int32))
    guess = (start.to(tl.float32) * many.to(tl.float32) / tl.load(facts + 1).to(tl.float32)).to(tl.int32)
    number = reaching(places, many, start, guess) + tl.arange(0, {_AT_ONCE})
    place, value = sent({passed})  # before the zeros, behind which it would wait
    offset = tl.arange(0, {size})
    if length == {size}:
        tl.store(out + at + offset, tl.zeros(({size},), out.dtype.element_ty))
    else:
        tl.store(out + at + offset, tl.zeros(({size},), out.dtype.element_ty), mask=offset < length)
    tl.debug_barrier()  # the zeros have been written
    going = 1
    while going > 0:
        here = (number < many) & (place >= start) & (place < end)
        tl.store(out + at + (place - start), cast(value, out.dtype.element_ty), mask=here)
        going = (tl.max(tl.where(number < many, place, end), 0) < end).to(tl.int32)
        if going > 0:
            number += {_AT_ONCE}
            place, value = sent({passed})
"""


def _scattering(shape: Shape, result: Node) -> str:
    """Return a kernel that adds (or writes) chosen numbers at their indices."""
    body = _Message(shape)
    index, value = body.of(result.args[0], "int"), body.of(result.args[1], "float")
    return f"""
@triton.jit
def scatter(message, out, agreed, tiles, segments, ADD: tl.constexpr, ALIGNED: tl.constexpr):
{indent(TILE.format(size=shape.size, place="tl.program_id(0)"), "    ")}
    facts = segments + segment * {shape.width}
    number = start + tl.arange(0, {shape.size})
    head = (message + tl.load(facts + 2)).to(tl.pointer_type(tl.int32))
    inside = number < tl.minimum(tl.load(facts + 5).to(tl.int32), tl.load(head + 1))
{indent(chr(10).join(body.lines), "    ")}
    place, value = {index}, {value}
    inside = inside & (place >= 0) & (place < tl.load(facts + 1).to(tl.int32))  # a message may have been damaged
    to = out + at + place
    if ADD:
        value += tl.load(to, mask=inside, other=0).to(tl.float32)
    tl.store(to, cast(value, out.dtype.element_ty), mask=inside)
"""


def _field(shape: Shape, name: str) -> tuple[int, Field]:
    return next((i, one) for i, one in enumerate(shape.program.fields) if one.name == name)


class _Message(Body):
    """Values of a message."""

    def _value(self, node: Node) -> str:
        if node.op != "field":
            return super()._value(node)
        place, one = _field(self.shape, node.name)
        if not one.sent:
            return self.let("tl.load(agreed + segment)")
        begin = f"message + tl.multiple_of(tl.load(facts + {FIXED + place}), 16)"
        if one.over == "number" and one.bits < 8:
            each = 8 // one.bits
            at = f"{begin} + start // {each}"
            columns = self.shape.columns
            return self.let(f"get({at}, length, WHOLE, {one.bits}, {self.shape.size // columns}, {columns})")
        begin = f"({begin}).to(tl.pointer_type(tl.{TYPES[one.dtype]}))"
        kind = "float32" if node.kind == "float" else "int32"
        if one.over == "number":
            text = f"read({begin} + start + offset, inside, WHOLE)"
        elif one.over == "block":
            columns = self.shape.columns
            text = f"read({begin} + start // {columns} + rows, rows * {columns} < length, WHOLE)"
        elif one.over == "chosen":
            text = f"read({begin} + number, inside, False)"
        else:
            text = f"tl.load({begin})"
        return self.let(f"{text}.to(tl.{kind})")
