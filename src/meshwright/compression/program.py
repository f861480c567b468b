"""Compile a traced algorithm to a few passes over the gradient, and lay out its message.

- Statistics of a whole gradient must be known before they are used, so each costs a pass; all that can be done in one
  pass is done in one.
- Statistics of blocks cost none: a block stays in a cache while it is reduced and used.
- With error feedback, the result of `decode` is composed with `encode` symbolically (codes are not packed and
  unpacked). So the residual is one more result of the last pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.compression.language import REDUCTIONS, Node, Packed, Sent, gradient
from meshwright.errors import InputError

_HALVES = {"half": "f16", "bfloat": "bf16"}
ALIGN = 16  # bytes: every part of a message starts at a multiple of it, so that wide loads work

# Search of a threshold: the bracket starts as [0, largest]. The first round tries largest / 2, / 4 ... / 2^15, since
# magnitudes span decades, the others lo + (hi - lo) * j / 16 (one product, one sum, float32). Each keeps the narrowest
# bracket whose lower end is reached by more than k numbers. The result is the upper end.
ROUNDS = 3
SMALLEST = 2.0**-126  # the result if fewer than k numbers are positive
RUN = 32  # numbers of a run; a sampled threshold examines one run in `every`
ENOUGH = 65536  # minimum numbers of a sample, except for one run in so many that are left out in addition


@dataclass(frozen=True, eq=False)
class Field:
    """Part of a message. Code `i` of `b` bits starts at bit `i * b` of it, low bits first."""

    name: str
    node: Node  # stored value
    over: str  # number (packed), block, gradient, chosen
    dtype: str  # f32, i32, f16, bf16; u1, u2, u4, u8, u16, i8, i16 of packed codes
    block: int = 0
    part: float = 0.0  # maximum share of the numbers that are chosen

    @property
    def bits(self) -> int:
        return int(self.dtype.removeprefix("bf").lstrip("ufi"))

    @property
    def sent(self) -> bool:
        """Return True if it is in the message: agreed values are not, as every rank has them already."""
        return self.node.op != "agreed"

    def length(self, numbers: int) -> int:
        """Return the count of its values, for a gradient of this size."""
        if self.over == "number":
            return numbers
        if self.over == "block":
            return -(-numbers // self.block)
        return capacity(numbers, self.part) if self.over == "chosen" else 1

    def bytes(self, numbers: int) -> int:
        return -(-self.length(numbers) * self.bits // 8) if self.sent else 0


def capacity(numbers: int, part: float) -> int:
    """Return the maximum count of chosen numbers of a gradient: a share of them, at least one.

    >>> capacity(1000, 0.01), capacity(3, 0.01), capacity(0, 0.01)
    (10, 1, 0)
    """
    return min(numbers, max(1, int(numbers * part)))


def sampling(numbers: int, every: int) -> tuple[int, int]:
    """Return the stride of runs that a sampled threshold examines, and the count of its numbers.

    It is odd: rows of a matrix often have a power of two of numbers, and an even stride would see few of its columns.

    >>> sampling(100_000, 64), sampling(1 << 20, 64), sampling(1 << 20, 1)
    ((1, 100000), (17, 61696), (1, 1048576))
    """
    step = max(1, min(every, numbers // ENOUGH)) | 1
    runs, short = divmod(numbers, RUN)
    whole = -(-runs // step)
    return step, whole * RUN + (short if runs % step == 0 else 0)


@dataclass(frozen=True, eq=False)
class Pass:
    """One loop over the numbers of every gradient."""

    level: int
    reductions: tuple[Node, ...] = ()  # statistics of whole gradients that it computes; thresholds take several passes
    fields: tuple[Field, ...] = ()  # parts of the message that it writes
    choice: Node | None = None  # test whose passing numbers it collects
    result: Node | None = None  # decoded numbers, or with error feedback what the message will contain of each


@dataclass(frozen=True, eq=False)
class Program:
    """Algorithm, compiled to passes."""

    fields: tuple[Field, ...]
    encoding: tuple[Pass, ...]
    decoding: Pass
    agrees: Node | None  # a statistic on which ranks agree before the last passes
    block: int  # numbers per block, 0 without blocks
    sums: str  # type in which messages can be added before decoding, or ""

    def layout(self, numbers: int) -> dict[str, int]:
        """Return the offset of each field in one gradient's message, in bytes; "" is the end.

        The first four bytes are the flag, nonzero if a number was infinite or NaN; the next four count the chosen
        numbers.

        >>> from meshwright.compression import language as l
        >>> program = compiled(lambda g: {"up": l.pack(g > 0, 1), "scale": l.largest(g)}, lambda m: m["up"] * m["scale"])
        >>> program.layout(1000)
        {'up': 16, 'scale': 144, '': 160}
        """
        at, found = ALIGN, {}
        for field in self.fields:
            found[field.name] = at
            at += -(-field.bytes(numbers) // ALIGN) * ALIGN
        return found | {"": at}


class _Fields(dict[str, Node]):
    """Fields that `decode` may read."""

    def __missing__(self, name: str) -> Node:
        raise InputError(f"reads '{name}', which encode does not send", field="decode", valid=", ".join(self))


def compiled(encode: Callable[[Node], Sent], decode: Callable[[Mapping[str, Node]], Node]) -> Program:
    """Trace both functions and arrange them in passes."""
    same = Same()
    sent = encode(gradient())
    if not isinstance(sent, Mapping) or not sent:
        raise InputError("returns no fields", field="encode", valid="a dict of what is sent, by name")
    fields = tuple(_field(name, what, same) for name, what in sent.items())
    decoded = decode(_Fields({field.name: _read(field) for field in fields}))
    _check_decoded(decoded)
    said = same.of(composed(decoded, {field.name: field for field in fields}))
    stops = barriers([field.node for field in fields])
    passes = [Pass(level, tuple(node for node in stops if depth(node) - 1 == level)) for level in range(_last(stops))]
    tests = {id(mask): mask for field in fields if (mask := chosen_by(field.node)) is not None}
    if len(tests) > 1:
        raise InputError(
            "chooses by several tests", field="encode", valid="one choose(...), whose .take(...) give values"
        )
    last = Pass(_last(stops), (), fields, next(iter(tests.values()), None), said)
    if any(arg.op == "drawn" for root in fields for one in walk(root.node) if one.op != "take" for arg in one.args):
        raise InputError("computes with what was drawn", field="draw", valid="choice.index and choice.take(...)")
    agreed = [node for node in stops if node.op == "agreed"]
    if len(agreed) > 1:
        raise InputError("agrees on several values", field="encode", valid="one agreed(...)")
    blocks = {node.block for root in [said, *(field.node for field in fields)] for node in walk(root) if node.block}
    if len(blocks) > 1:
        raise InputError(f"has blocks of {sorted(blocks)}", field="encode", valid="blocks of one size")
    if any(node.op == "threshold" and node.every > 1 and any(one.block for one in walk(node)) for node in stops):
        raise InputError("samples what needs whole blocks", field="threshold", valid="every=1")
    agrees = agreed[0] if agreed else None
    block = max(blocks, default=0)
    return Program(fields, (*passes, last), Pass(0, result=decoded), agrees, block, _sums(fields, decoded))


def _check_decoded(decoded: Any) -> None:
    if not isinstance(decoded, Node):
        raise InputError(f"returns {type(decoded).__name__}", field="decode", valid="a value of every number")
    if decoded.over not in {"number", "block", "gradient", "constant"} or decoded.kind == "bool":
        raise InputError(
            f"returns a {decoded.kind} of every {decoded.over}",
            field="decode",
            valid="a float of every number; chosen ones are put there by spread(...)",
        )
    for node in walk(decoded):
        if node.op in {"gradient", "uniform", "take", "threshold", "agreed"} or node.op in REDUCTIONS:
            raise InputError(f"uses {node.op}", field="decode", valid="fields of the message, arithmetic and spread")


def _last(stops: list[Node]) -> int:
    return max((depth(node) for node in stops), default=0)


def _field(name: str, what: Node | Packed, same: Same) -> Field:
    if isinstance(what, Packed):
        return Field(name, same.of(what.node), "number", f"{'i' if what.signed else 'u'}{what.bits}")
    if not isinstance(what, Node):
        raise InputError(f"is {type(what).__name__}", field=name, valid="pack(...), half(...), or a value")
    if what.over == "constant" or what.kind == "bool" or (what.over == "number" and what.kind != "float"):
        raise InputError(f"is a {what.kind} of every {what.over}", field=name, valid="pack(...), half(...), or a float")
    node = same.of(what)
    dtype = _HALVES.get(what.op, "f32" if what.kind == "float" else "i32")
    if what.op == "take" and what.args[1].op in _HALVES:
        dtype = _HALVES[what.args[1].op]
    parts = {one.value for one in walk(node) if one.op == "take"} if what.over == "chosen" else {0.0}
    if len(parts) > 1:
        raise InputError(f"takes parts of {sorted(parts)}", field=name, valid="one choose(...)")
    return Field(name, node, what.over, dtype, what.block, parts.pop())


def _read(field: Field) -> Node:
    """Return the node that `decode` reads for a field."""
    kind = "float" if "f" in field.dtype else "int"
    return Node("field", (), field.over, kind, field.block, field.part, field.name)


def composed(decoded: Node, fields: Mapping[str, Field]) -> Node:
    """Return the result of `decode` in terms of the values of `encode`."""

    def found(node: Node, args: tuple[Node, ...]) -> Node:
        if node.op == "field":
            return untaken(fields[node.name].node)
        if node.op == "spread":
            # `kept`: True if the pass that collects the chosen numbers has taken this one.
            return Node("where", (Node("kept", kind="bool"), args[1], Node("constant", over="constant")))
        return _with(node, args)

    return rebuilt(decoded, found)


def untaken(node: Node) -> Node:
    """Return a chosen value as one of every number."""
    return rebuilt(node, lambda one, args: args[1] if one.op == "take" else _with(one, args))


def _with(node: Node, args: tuple[Node, ...]) -> Node:
    if all(one is other for one, other in zip(args, node.args, strict=True)):
        return node
    over = "number" if node.over == "chosen" else node.over
    block = max([node.block, *(arg.block for arg in args)])
    return Node(node.op, args, over, node.kind, block, node.value, node.name, node.every)


def rebuilt(root: Node, made: Callable[[Node, tuple[Node, ...]], Node]) -> Node:
    """Rebuild a value with every node, operands first, replaced."""
    new: dict[int, Node] = {}
    for node in walk(root):
        new[id(node)] = made(node, tuple(new[id(arg)] for arg in node.args))
    return new[id(root)]


class Same:
    """Factory that makes one node of equal ones, so that nothing is computed twice."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Node] = {}

    def of(self, root: Node) -> Node:
        return rebuilt(root, self._one)

    def _one(self, node: Node, args: tuple[Node, ...]) -> Node:
        facts = (node.over, node.kind, node.block, node.value, node.name, node.every)
        key = (node.op, tuple(map(id, args)), *facts)
        return self._known.setdefault(key, Node(node.op, args, *facts))


def _sums(fields: tuple[Field, ...], decoded: Node) -> str:
    """Return the signed type in which messages can be added, or "": decoding must only scale them."""
    dtypes = {field.dtype for field in fields if field.sent}
    words = {"i8", "i16", "f16", "bf16", "f32"}
    held = {field.name for field in fields if field.sent}
    if len(dtypes) != 1 or not dtypes <= words or any(field.sent and field.over != "number" for field in fields):
        return ""
    return dtypes.pop() if _linear(decoded, held) else ""


def _linear(node: Node, held: set[str]) -> bool:
    free = [not any(one.op == "field" and one.name in held for one in walk(arg)) for arg in node.args]
    if node.op == "field":
        return node.name in held
    if node.op == "mul":
        return any(free[1 - i] and _linear(node.args[i], held) for i in (0, 1))
    if node.op == "div":
        return free[1] and _linear(node.args[0], held)
    return node.op in {"add", "sub", "neg"} and all(_linear(arg, held) for arg in node.args)


def chosen_by(node: Node) -> Node | None:
    """Return the test of a chosen value."""
    return next((one.args[0] for one in walk(node) if one.op == "take"), None)


def depth(node: Node) -> int:
    """Return how many passes must have ended before a value is known."""
    depths: dict[int, int] = {}
    for one in walk(node):
        depths[id(one)] = max((depths[id(arg)] for arg in one.args), default=0) + is_barrier(one)
    return depths[id(node)]


def is_barrier(node: Node) -> bool:
    """Return True if a value is known only when all numbers have been seen."""
    return node.op in {"threshold", "agreed"} or (node.op in REDUCTIONS and not node.block)


def barriers(nodes: list[Node]) -> list[Node]:
    """Return the statistics of whole gradients on which some values depend, each once, in order of dependence."""
    found = {id(node): node for root in nodes for node in walk(root) if is_barrier(node)}
    return sorted(found.values(), key=depth)


def walk(node: Node) -> list[Node]:
    """Return a value and all its operands, operands first, each once."""
    found: dict[int, Node] = {}

    def visit(one: Node) -> None:
        if id(one) not in found:
            for arg in one.args:
                visit(arg)
            found[id(one)] = one

    visit(node)
    return list(found.values())
