"""The language of codecs: arithmetic on the numbers of a gradient, traced once and compiled for every kind of device.

An algorithm is two functions. `encode` gets the gradient and returns what is sent, by name; `decode` gets that back and
returns the gradient. Each value belongs to every number, to every block of numbers, to the whole gradient, or to chosen
numbers. Arithmetic expands the coarser to the finer.

>>> def encode(g):
...     return {"positive": pack(g >= 0, bits=1), "scale": mean(magnitude(g))}
>>> def decode(m):
...     return where(m["positive"] > 0, m["scale"], -m["scale"])
>>> sent = encode(gradient())
>>> sent["scale"].over, sent["positive"].bits
('gradient', 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError

Fields = Mapping[str, "Node"]  # input of `decode`
Sent = Mapping[str, "Node | Packed"]  # result of `encode`
ORDER = ("constant", "gradient", "block", "number")  # from coarse to fine; "chosen" mixes only with the first two
ELEMENTWISE = frozenset(
    ["add", "sub", "mul", "div", "min", "max", "lt", "le", "gt", "ge", "eq", "and", "or", "not", "neg", "abs", "floor",
     "round", "sqrt", "where", "float", "int", "half", "bfloat"]
)  # fmt: skip
BOOLEAN = frozenset(["lt", "le", "gt", "ge", "eq", "and", "or", "not"])
SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "and": "&",
           "or": "|"}  # fmt: skip  # in C and in Python
REDUCTIONS = frozenset(["total", "largest", "smallest"])


@dataclass(frozen=True, eq=False)
class Node:
    """Value that the compiled program will hold; tracing an algorithm computes nothing."""

    op: str
    args: tuple[Node, ...] = ()
    over: str = "number"  # number, block, gradient, chosen, constant
    kind: str = "float"  # float, int, bool
    block: int = 0  # numbers of a block, if it belongs to blocks
    value: float = 0.0  # of a constant; the share of a threshold or choice
    name: str = ""  # of a field that is read
    every: int = 1  # of a threshold: one in this many runs of numbers is examined

    def __add__(self, other: Any) -> Node:
        return _two("add", self, other)

    def __radd__(self, other: Any) -> Node:
        return _two("add", other, self)

    def __sub__(self, other: Any) -> Node:
        return _two("sub", self, other)

    def __rsub__(self, other: Any) -> Node:
        return _two("sub", other, self)

    def __mul__(self, other: Any) -> Node:
        return _two("mul", self, other)

    def __rmul__(self, other: Any) -> Node:
        return _two("mul", other, self)

    def __truediv__(self, other: Any) -> Node:
        return _two("div", self, other)

    def __rtruediv__(self, other: Any) -> Node:
        return _two("div", other, self)

    def __neg__(self) -> Node:
        return _made("neg", self)

    def __abs__(self) -> Node:
        return _made("abs", self)

    def __pow__(self, power: Any) -> Node:
        if power != 2:
            raise InputError(f"is {power!r}", field="a power", valid="2; x * x * x and root(x) for others")
        return _two("mul", self, self)

    def __lt__(self, other: Any) -> Node:
        return _two("lt", self, other)

    def __le__(self, other: Any) -> Node:
        return _two("le", self, other)

    def __gt__(self, other: Any) -> Node:
        return _two("gt", self, other)

    def __ge__(self, other: Any) -> Node:
        return _two("ge", self, other)

    def __and__(self, other: Any) -> Node:
        return _two("and", self, other)

    def __or__(self, other: Any) -> Node:
        return _two("or", self, other)

    def __invert__(self) -> Node:
        return _made("not", self)

    def __getitem__(self, place: Any) -> Node:
        raise InputError(
            "a traced value has no places", field="codec", valid="choose(test, part).take(x) for some numbers"
        )

    def __len__(self) -> int:
        raise InputError("a traced value has no length of its own", field="codec", valid="count()")

    def __bool__(self) -> bool:
        raise InputError("a traced value has no truth of its own", field="codec", valid="where(condition, one, other)")


@dataclass(frozen=True, eq=False)
class Packed:
    """Small integers of a few bits each, one for every number of the gradient."""

    node: Node
    bits: int
    signed: bool = False


@dataclass(frozen=True, eq=False)
class Choice:
    """First numbers, in order, that pass a test, at most a given share of all."""

    mask: Node
    part: float

    def take(self, node: Node) -> Node:
        """Return a value of the chosen numbers."""
        if node.over not in {"number", "block"}:
            raise InputError(f"a value of every {node.over} cannot be taken", field="take", valid="one of every number")
        return Node("take", (self.mask, node), "chosen", node.kind, value=self.part)

    @property
    def index(self) -> Node:
        """Indices of the chosen numbers."""
        return self.take(index())


def gradient() -> Node:
    """Return the numbers to encode."""
    return Node("gradient")


def index() -> Node:
    """Return the indices 0, 1, 2 ... of a gradient's numbers."""
    return Node("index", kind="int")


def count() -> Node:
    """Return the count of a gradient's numbers."""
    return Node("count", over="gradient", kind="int")


def uniform() -> Node:
    """Return a random number from [0, 1) per number: a hash of its index and the seed, the same on every device."""
    return Node("uniform")


def constant(value: float) -> Node:
    if not isinstance(value, int | float) or not abs(value) < (2**31 if isinstance(value, int) else 2.0**128):
        raise InputError(f"is {value!r}", field="a constant", valid="a traced value, or a number that 32 bits can hold")
    whole = isinstance(value, int) and not isinstance(value, bool)
    return Node("constant", over="constant", kind="int" if whole else "float", value=float(value))


def magnitude(x: Node) -> Node:
    return _made("abs", x)


def floor(x: Node) -> Node:
    """Round down to a whole number, still a float."""
    return _made("floor", x)


def nearest(x: Node) -> Node:
    """Round to the nearest whole number, ties to even, still a float."""
    return _made("round", x)


def root(x: Node) -> Node:
    return _made("sqrt", x)


def smaller(x: Any, y: Any) -> Node:
    return _two("min", x, y)


def larger(x: Any, y: Any) -> Node:
    return _two("max", x, y)


def where(condition: Node, one: Any, other: Any) -> Node:
    """Return `one` where the condition holds, `other` elsewhere."""
    return _made("where", condition, _node(one), _node(other))


def equal(x: Any, y: Any) -> Node:
    """Compare for equality; `==` does not, as it is the identity of traced values."""
    return _two("eq", x, y)


def half(x: Node, *, bfloat: bool = False) -> Node:
    """Round to 16 bits; if sent, it is stored as such."""
    return _made("bfloat" if bfloat else "half", x)


def total(x: Node, block: int = 0) -> Node:
    """Return the sum over the gradient, or over every block of `block` numbers."""
    return _reduced("total", x, block)


def largest(x: Node, block: int = 0) -> Node:
    return _reduced("largest", x, block)


def smallest(x: Node, block: int = 0) -> Node:
    return _reduced("smallest", x, block)


def mean(x: Node) -> Node:
    """Return the mean over the gradient."""
    return total(x) / count()


def agreed(x: Node) -> Node:
    """Return a value's maximum over all ranks, which they exchange before anything is encoded."""
    if x.over != "gradient":
        raise InputError(f"belongs to every {x.over}", field="agreed", valid="one value of the whole gradient")
    return Node("agreed", (x,), "gradient", x.kind)


def threshold(x: Node, part: float, every: int = 1) -> Node:
    """Return the value that about `part` of the (positive) numbers reach; more do only if many are equal.

    With `every`, one in so many runs of 32 numbers is examined, as long as there are enough of them: a much cheaper
    estimate.
    """
    if x.over != "number" or x.kind != "float":
        raise InputError(f"of {x.kind}s of every {x.over}", field="threshold", valid="floats, one of every number")
    if not 0 < part <= 1:
        raise InputError(f"is {part}", field="part", valid="more than 0, at most 1")
    if every < 1:
        raise InputError(f"is {every}", field="every", valid="1 or more")
    return Node("threshold", (x,), "gradient", value=part, every=every)


def choose(mask: Node, part: float) -> Choice:
    """Choose the first numbers that pass a test, at most `part` of all (at least one)."""
    if mask.kind != "bool" or mask.over != "number":
        raise InputError("is no test of every number", field="choose", valid="such as magnitude(g) >= 0.1")
    if not 0 < part <= 1:
        raise InputError(f"is {part}", field="part", valid="more than 0, at most 1")
    return Choice(mask, part)


def draw(part: float) -> Choice:
    """Choose `part` of the numbers (at least one) at random: one in every run of about 1 / part.

    A hash of the run's index and the seed decides. Numbers of a run are equally likely, and every seed chooses others.
    """
    if not 0 < part <= 1:
        raise InputError(f"is {part}", field="part", valid="more than 0, at most 1")
    return Choice(Node("drawn", kind="bool"), part)


def pack(x: Node, bits: int, *, signed: bool = False) -> Packed:
    """Pack integers from 0 to 2^bits - 1, or tests (1 bit); others are clipped.

    With `signed` (8 or 16 bits) magnitudes are less than 2^(bits - 1), and messages can be added.
    """
    widths = (8, 16) if signed else (1, 2, 4, 8, 16)
    if not isinstance(x, Node) or x.over != "number" or bits not in widths:
        of = f"every {x.over}" if isinstance(x, Node) else "a plain value"
        raise InputError(f"{bits} bits of {of}", field="pack", valid=f"{widths} bits of every number")
    if x.kind == "bool":
        return Packed(_made("int", x), bits, signed)
    most = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
    return Packed(_made("int", smaller(larger(x, -most if signed else 0), most)), bits, signed)


def spread(index: Node, value: Node) -> Node:
    """Return chosen values at their indices, and zero elsewhere."""
    if index.over != "chosen" or value.over != "chosen":
        raise InputError(
            "spreads what was not chosen", field="spread", valid="m['index'] and a value of choice.take(...)"
        )
    if index.kind != "int":
        raise InputError("has places that are no whole numbers", field="spread", valid="spread(m['index'], m['value'])")
    return Node("spread", (index, value))


def _node(x: Any) -> Node:
    return x if isinstance(x, Node) else constant(x)


def _two(op: str, x: Any, y: Any) -> Node:
    return _made(op, _node(x), _node(y))


def _made(op: str, *args: Node) -> Node:
    """Return an elementwise operation; its result is as fine as its finest operand."""
    if not all(isinstance(arg, Node) for arg in args):
        raise InputError(
            "has an operand that was not traced", field=op, valid="traced values; equal(x, y) instead of =="
        )
    if op in {"and", "or", "not"} and any(arg.kind != "bool" for arg in args):
        raise InputError("combines what are no tests", field=op, valid="tests, such as g > 0")
    overs = {arg.over for arg in args}
    if "chosen" in overs and overs & {"number", "block"}:
        raise InputError("mixes chosen numbers with all of them", field=op, valid="choice.take(...) first")
    over = "chosen" if "chosen" in overs else max(overs, key=ORDER.index)
    blocks = {arg.block for arg in args if arg.block}
    if len(blocks) > 1:
        raise InputError(f"mixes blocks of {sorted(blocks)}", field=op, valid="blocks of one size")
    values = args[1:] if op == "where" else args
    whole = all(arg.kind != "float" for arg in values) and op not in {"div", "sqrt", "float", "half", "bfloat"}
    kind = "bool" if op in BOOLEAN else "int" if op == "int" or whole else "float"
    return Node(op, args, over, kind, max(blocks, default=0))


def _reduced(op: str, x: Node, block: int) -> Node:
    if x.over != "number":
        raise InputError(f"a value of every {x.over} is reduced", field=op, valid="one of every number")
    if block and (not 32 <= block <= 16384 or block & (block - 1)):
        raise InputError(f"is {block}", field="block", valid="a power of two from 32 to 16384")
    return Node(op, (x,), "block" if block else "gradient", x.kind if x.kind == "int" else "float", block)
