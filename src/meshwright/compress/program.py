"""From a traced algorithm to a few passes over the gradient, and where everything lies in a message.

Statistics of a whole gradient must be known before they are used, so that each costs a pass; all that can be done in one
pass is done in one. Statistics of blocks cost none: a block is in a cache while it is reduced and used. With error
feedback, what `decode` will find is composed with `encode` symbolically (codes are not packed and unpacked), so that the
residual is one more result of the last pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from meshwright.compress.language import REDUCTIONS, Node, Packed
from meshwright.errors import InputError

Sent = Mapping[str, "Node | Packed"]
_HALVES = {"half": "f16", "bfloat": "bf16"}
ALIGN = 16  # bytes: every part of a message begins at a multiple of it, so that wide loads work


@dataclass(frozen=True, eq=False)
class Field:
    """One part of a message."""

    name: str
    node: Node  # what is stored
    over: str  # number (packed), block, gradient, chosen
    dtype: str  # f32, i32, f16, bf16; u1, u2, u4, u8, u16 of packed codes
    block: int = 0
    part: float = 0.0  # of the numbers, that are chosen at most

    @property
    def bits(self) -> int:
        return int(self.dtype.removeprefix("bf").lstrip("ufi"))

    def length(self, numbers: int) -> int:
        """How many values it has, for a gradient of so many numbers."""
        if self.over == "number":
            return numbers
        if self.over == "block":
            return -(-numbers // self.block)
        return capacity(numbers, self.part) if self.over == "chosen" else 1

    def bytes(self, numbers: int) -> int:
        return -(-self.length(numbers) * self.bits // 8)


def capacity(numbers: int, part: float) -> int:
    """Numbers of a gradient that a choice may hold: a part of them, one at least.

    >>> capacity(1000, 0.01), capacity(3, 0.01), capacity(0, 0.01)
    (10, 1, 0)
    """
    return min(numbers, max(1, int(numbers * part)))


@dataclass(frozen=True, eq=False)
class Pass:
    """One loop over the numbers of every gradient."""

    level: int
    reductions: tuple[Node, ...] = ()  # statistics of whole gradients that it finds; thresholds are found by several passes
    fields: tuple[Field, ...] = ()  # parts of the message that it writes
    choice: Node | None = None  # the test whose passing numbers it collects
    result: Node | None = None  # decoded numbers, or with error feedback what the message will say of each


@dataclass(frozen=True, eq=False)
class Program:
    """An algorithm, ready to be turned into code."""

    fields: tuple[Field, ...]
    encoding: tuple[Pass, ...]
    decoding: Pass
    agrees: Node | None  # a statistic that processes agree on before the last passes

    def layout(self, numbers: int) -> dict[str, int]:
        """Where each field of one gradient's message begins, in bytes; "" is the end. The first four bytes are the flag:
        not zero if a number was infinite or none; the next four how many were chosen.

        >>> from meshwright.compress import language as l
        >>> program = compiled(lambda g: {"up": l.pack(g > 0, 1), "scale": l.largest(g)}, lambda m: m["up"] * m["scale"])
        >>> program.layout(1000)
        {'up': 16, 'scale': 144, '': 160}
        """
        at, found = ALIGN, {}
        for field in self.fields:
            found[field.name] = at
            at += -(-field.bytes(numbers) // ALIGN) * ALIGN
        return found | {"": at}


def compiled(encode: Callable[[Node], Sent], decode: Callable[[Mapping[str, Node]], Node]) -> Program:
    """Trace both functions and arrange them in passes."""
    from meshwright.compress.language import gradient

    fields = tuple(_field(name, what) for name, what in encode(gradient()).items())
    read = {field.name: _read(field) for field in fields}
    decoded = decode(read)
    if decoded.over not in {"number", "block", "gradient", "constant"}:
        raise InputError(f"decode returns a value of every {decoded.over}", field="decode", valid="of every number")
    said = composed(decoded, {field.name: field for field in fields})
    stops = barriers([field.node for field in fields])
    passes = [Pass(level, tuple(node for node in stops if depth(node) - 1 == level)) for level in range(_last(stops))]
    tests = {id(mask): mask for field in fields if (mask := chosen_by(field.node))}
    if len(tests) > 1:
        raise InputError("chooses by several tests", field="encode", valid="one choose(...), whose .take(...) give values")
    last = Pass(_last(stops), (), fields, next(iter(tests.values()), None), said)
    agreed = [node for node in stops if node.op == "agreed"]
    if len(agreed) > 1:
        raise InputError("agrees on several values", field="encode", valid="one agreed(...)")
    return Program(fields, (*passes, last), Pass(0, result=decoded), agreed[0] if agreed else None)


def _last(stops: list[Node]) -> int:
    return max((depth(node) for node in stops), default=0)


def _field(name: str, what: Node | Packed) -> Field:
    if isinstance(what, Packed):
        return Field(name, what.node, "number", f"u{what.bits}")
    if what.over in {"number", "constant"}:
        if what.over == "number" and what.op in _HALVES:
            return Field(name, what, "number", _HALVES[what.op])
        if what.over == "number" and what.kind == "float":
            return Field(name, what, "number", "f32")
        raise InputError(f"belongs to every {what.over}", field=name, valid="pack(...), half(...), or a coarser value")
    dtype = _HALVES.get(what.op, "f32" if what.kind == "float" else "i32")
    if what.op == "take" and what.args[1].op in _HALVES:
        dtype = _HALVES[what.args[1].op]
    return Field(name, what, what.over, dtype, what.block, what.value if what.over == "chosen" else 0.0)


def _read(field: Field) -> Node:
    """What `decode` sees of a field."""
    kind = "float" if "f" in field.dtype else "int"
    return Node("field", (), field.over, kind, field.block, field.part, field.name)


def composed(decoded: Node, fields: Mapping[str, Field]) -> Node:
    """What `decode` will find, in terms of what `encode` has."""

    @cache
    def said(node: Node) -> Node:
        if node.op == "field":
            field = fields[node.name]
            if field.over == "chosen":
                raise InputError("uses chosen values where they are not spread", field=node.name, valid="spread(...)")
            return field.node
        if node.op == "spread":
            field = fields[node.args[1].name] if node.args[1].op == "field" else None
            if field is None or field.node.op != "take":
                raise InputError("spreads what was not chosen", field="spread", valid="m['index'] and a field of take(...)")
            # `kept`: whether the pass that collects the chosen numbers has taken this one.
            return Node("where", (Node("kept", kind="bool"), field.node.args[1], _zero()))
        if not node.args:
            return node
        return Node(node.op, tuple(map(said, node.args)), node.over, node.kind, node.block, node.value, node.name)

    return said(decoded)


def _zero() -> Node:
    return Node("constant", over="constant")


def chosen_by(node: Node) -> Node | None:
    """The test of a chosen value."""
    if node.op == "take":
        return node.args[0]
    return next((found for arg in node.args if (found := chosen_by(arg))), None)


@cache
def depth(node: Node) -> int:
    """Passes that must have ended before a value is known."""
    below = max((depth(arg) for arg in node.args), default=0)
    return below + (is_barrier(node))


def is_barrier(node: Node) -> bool:
    """Whether a value is known only when all numbers have been seen."""
    return node.op in {"threshold", "agreed"} or (node.op in REDUCTIONS and not node.block)


def barriers(nodes: list[Node]) -> list[Node]:
    """Every statistic of whole gradients on which some values depend, each once, those first that others need."""
    found: dict[int, Node] = {}

    def visit(node: Node) -> None:
        for arg in node.args:
            visit(arg)
        if is_barrier(node):
            found.setdefault(id(node), node)

    for node in nodes:
        visit(node)
    return sorted(found.values(), key=depth)


def walk(node: Node) -> list[Node]:
    """A value and all it is made of, operands first, each once."""
    found: dict[int, Any] = {}

    def visit(one: Node) -> None:
        if id(one) not in found:
            for arg in one.args:
                visit(arg)
            found[id(one)] = one

    visit(node)
    return list(found.values())
