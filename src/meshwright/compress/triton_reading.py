"""Decoding as Triton text: every number from its message, or chosen numbers to their places."""

from __future__ import annotations

from textwrap import indent

from meshwright.compress.language import Node
from meshwright.compress.program import walk
from meshwright.compress.triton_values import FIXED, TILE, TYPES, Body, Shape
from meshwright.errors import InputError


def reading(shape: Shape) -> str:
    """Decoding: every number from the message, or chosen numbers to their places."""
    result = shape.program.decoding.result
    assert result is not None
    if result.op == "spread":
        return _scattering(shape, result)
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
{indent(TILE.format(size=shape.size), "    ")}
    if length == {shape.size}:
        decode_tile({passed}, True)
    else:
        decode_tile({passed}, False)
"""


def _scattering(shape: Shape, result: Node) -> str:
    body = _Message(shape)
    index, value = body.of(result.args[0], "int"), body.of(result.args[1], "float")
    return f"""
@triton.jit
def decode(message, out, agreed, tiles, segments, ADD: tl.constexpr, ALIGNED: tl.constexpr):
{indent(TILE.format(size=shape.size), "    ")}
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


class _Message(Body):
    """Values of a message."""

    def _value(self, node: Node) -> str:
        if node.op != "field":
            return super()._value(node)
        place, one = next((i, one) for i, one in enumerate(self.shape.program.fields) if one.name == node.name)
        if not one.sent:
            return self.let("tl.load(agreed + segment)")
        begin = f"message + tl.multiple_of(tl.load(facts + {FIXED + place}), 16)"
        if one.over == "number" and one.bits < 8:
            each = 8 // one.bits
            at = f"{begin} + start // {each}"
            return self.let(f"get({at}, offset, inside, WHOLE, {one.bits})")
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
