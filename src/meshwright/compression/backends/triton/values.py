"""The values of a program as Triton expressions: each is computed once, in the kernel where it is wanted."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from meshwright.compression.language import REDUCTIONS, SYMBOLS, Node
from meshwright.compression.program import Program, is_barrier, walk

COLUMNS = 128  # numbers of a row without blocks: one warp scans a row
# Fields of a gradient: its offset, numbers, offset of its message, first tile, tiles, room for chosen ones, first group
# of tiles, first large tile, large tiles.
FIXED = 9
LARGER = 4  # size factor of tiles whose numbers are only reduced
TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "i32": "int32", "u8": "uint8", "u16": "uint16",
         "i8": "int8", "i16": "int16"}  # fmt: skip
_CALLS = {"min": "tl.minimum", "max": "tl.maximum", "abs": "tl.abs", "floor": "tl.floor", "round": "nearest",
          "sqrt": "tl.sqrt_rn", "where": "tl.where"}  # fmt: skip
LEAST = {"total": "0", "largest": 'float("-inf")', "smallest": 'float("inf")'}
LEAST_INT = {"total": "0", "largest": "-2147483648", "smallest": "2147483647"}
REDUCE = {"total": "tl.sum", "largest": "tl.max", "smallest": "tl.min"}
_CLOSED = frozenset(["add", "sub", "neg", "min", "max", "where"])  # operations that keep whole numbers whole and small

LISTED = 2048  # list entries that one program reads


TILE = """tile = {place}
row = tiles + tile.to(tl.int64) * 4
at = tl.multiple_of(tl.load(row), ALIGNED)
segment = tl.load(row + 1).to(tl.int32)
start = tl.multiple_of(tl.load(row + 2).to(tl.int32), {size})
length = tl.load(row + 3).to(tl.int32)"""


@dataclass
class Shape:
    """Tile layout of a program."""

    program: Program
    size: int  # numbers of a tile
    stats: dict[int, int]  # index of each statistic of a gradient

    @cached_property
    def cut(self) -> frozenset[int]:
        """Roundings whose results are used only after clipping to a code's range, as `pack` does."""
        steps = self.program.encoding
        roots = [node for one in steps for node in (*one.reductions, *(each.node for each in one.fields), one.choice)]
        found = {id(node): node for root in [*roots, steps[-1].result] if root is not None for node in walk(root)}
        users: dict[int, list[Node]] = {
            id(root): [root] for root in roots if root is not None
        }  # one more than there are
        for node in found.values():
            for arg in node.args:
                users.setdefault(id(arg), []).append(node)

        def is_cut(node: Node) -> bool:
            user = users[id(node)][0] if len(users[id(node)]) == 1 else node
            if user.op == "max" and _within(user):
                return len(users[id(user)]) == 1 and users[id(user)][0].op == "min" and _within(users[id(user)][0])
            return user is not node and user.op in {"add", "sub"} and _within(user) and is_cut(user)

        return frozenset(key for key, node in found.items() if node.op == "round" and is_cut(node))

    @property
    def slots(self) -> int:
        """Entries in the list of a tile's chosen numbers: at least twice as many as would fill the message."""
        part = max((one.part for one in self.program.fields if one.over == "chosen"), default=0.0)
        thresholds = [one for step in self.program.encoding for one in step.reductions if one.op == "threshold"]
        part = max([part, *(one.value for one in thresholds)])
        return min(self.size, 1 << max(5, int(2 * part * self.size).bit_length()))

    @property
    def listed(self) -> int:
        """Tiles whose lists one program reads."""
        return max(1, LISTED // self.slots)

    @property
    def columns(self) -> int:
        return self.program.block or COLUMNS

    @property
    def width(self) -> int:
        """Fields of a gradient in the table."""
        return FIXED + len(self.program.fields)


@dataclass
class Body:
    """Lines of one kernel, and the names of their results."""

    shape: Shape
    lines: list[str] = field(default_factory=list)
    _texts: dict[str, str] = field(default_factory=dict)
    _known: dict[tuple[int, str], str] = field(default_factory=dict)

    def further(self) -> Body:
        """Return a new body that knows the names of this one."""
        return Body(self.shape, [], self._texts.copy(), self._known.copy())

    def full(self, node: Node, kind: str = "") -> str:
        """Return the text of a value, one for every number."""
        kind = kind or node.kind
        text = self.of(node, kind)
        if node.over in {"number", "chosen"}:
            return text
        return self.let(f"{text} + zero{'.to(tl.float32)' if kind == 'float' else ''}")

    def let(self, text: str) -> str:
        """Return a name for an expression, the same for equal text."""
        if text not in self._texts:
            self._texts[text] = f"v{len(self._texts)}"
            self.lines.append(f"{self._texts[text]} = {text}")
        return self._texts[text]

    def of(self, node: Node, kind: str = "") -> str:
        """Return the text of a value, converted to a kind."""
        kind = kind or node.kind
        key = (id(node), kind)
        if key not in self._known:
            self._known[key] = self._converted(node, kind)
        return self._known[key]

    def _converted(self, node: Node, kind: str) -> str:
        if node.op == "constant":
            return repr(int(node.value) if kind == "int" else float(node.value))
        if kind == node.kind:
            return self._value(node)
        if kind == "float" and node.kind == "int" and small_whole(node):
            return self._as_float(node)
        if kind == "bool":
            return self.let(f"{self.of(node)} != 0")
        return self.let(f"{self.of(node)}.to(tl.{'float32' if kind == 'float' else 'int32'})")

    def _as_float(self, node: Node) -> str:
        """Return a small integer without a conversion, if it was a float before."""
        if node.op == "int":
            return self.of(node.args[0], "float")
        if node.op == "field":
            return self.let(f"{self.of(node)}.to(tl.float32)")
        return self._operation(node, "float")

    def _value(self, node: Node) -> str:
        if node.op in REDUCTIONS and node.block:
            least = (LEAST_INT if node.kind == "int" else LEAST)[node.op]
            return self.let(
                f"{REDUCE[node.op]}(hide({self.of(node.args[0])}, inside, {least}, WHOLE), 1, keep_dims=True)"
            )
        if node.op == "agreed":
            return self.let("tl.load(agreed + segment)")
        if is_barrier(node):
            return self.let(f"tl.load({self.shape_of_stat(node)})")
        if node.op in {"gradient", "kept"}:
            return {"gradient": "x", "kept": "kept"}[node.op]
        if node.op == "index":
            return "number"
        if node.op == "count":
            return self.let("tl.load(facts + 1).to(tl.int32)")
        if node.op == "uniform":
            return self.let("uniform(number, seed)")
        if node.op == "take":
            return self.of(node.args[1])
        return self._operation(node, node.kind)

    def shape_of_stat(self, node: Node) -> str:
        at = f"stats + segment * {len(self.shape.stats)} + {self.shape.stats[id(node)]}"
        return f"({at}).to(tl.pointer_type(tl.int32))" if node.kind == "int" else at

    def _operation(self, node: Node, kind: str) -> str:
        op = node.op
        if op in {"half", "bfloat"}:
            short = "float16" if op == "half" else "bfloat16"
            return self.let(f"cast({self.of(node.args[0], 'float')}, tl.{short}).to(tl.float32)")
        if op == "int":
            return self._whole(node.args[0])
        if op == "float":
            return self.of(node.args[0], "float")
        if op == "div":
            return self._quotient(*node.args)
        if op == "where":
            return self.let(
                f"tl.where({self.of(node.args[0], 'bool')}, {', '.join(self.of(a, kind) for a in node.args[1:])})"
            )
        wanted = kind
        if kind == "bool" and op not in {"and", "or", "not"}:
            wanted = "float" if any(arg.kind == "float" for arg in node.args) else "int"
        args = [self.of(arg, wanted) for arg in node.args]
        if op in SYMBOLS:
            return self.let(f"{args[0]} {SYMBOLS[op]} {args[1]}")
        if op == "round" and id(node) in self.shape.cut:
            return self.let(f"nearest_small({args[0]})")
        if op in {"neg", "not"}:
            return self.let(f"-{args[0]}" if op == "neg" else f"{args[0]} == 0")
        return self.let(f"{_CALLS[op]}({', '.join(args)})")

    def _whole(self, arg: Node) -> str:
        if arg.kind != "float":
            return self.of(arg, "int")
        text = self.of(arg)
        bounded = arg.op == "min" and arg.args[0].op == "max"  # as `pack` makes it
        return self.let(f"small({text})" if bounded and whole(arg) else f"{text}.to(tl.int32)")

    def _quotient(self, one: Node, other: Node) -> str:
        """Return a quotient: exact for a gradient; per number a product with the reciprocal, off by two roundings."""
        top, below = self.of(one, "float"), self.of(other, "float")
        overs = {one.over, other.over}
        if overs <= {"gradient", "constant"}:
            return self.let(f"tl.div_rn({top}, {below})")
        if not overs & {"number", "chosen"} or other.over in {"number", "chosen"}:
            return self.let(f"{top} / {below}")
        return self.let(f"{top} * {self.let(f'1.0 / {below}')}")


def _within(node: Node) -> bool:
    """Return True for an operation with a constant that is not large."""
    return any(arg.op == "constant" and abs(arg.value) < 2**20 for arg in node.args)


def whole(node: Node) -> bool:
    """Return True if a float is always whole."""
    if node.op in {"floor", "round"} or node.kind != "float":
        return True
    if node.op == "constant":
        return node.value == int(node.value) and abs(node.value) < 2**20
    if node.op in _CLOSED | {"abs", "float"}:
        return all(whole(arg) for arg in (node.args[1:] if node.op == "where" else node.args))
    return False


def small_whole(node: Node) -> bool:
    """Return True if an integer is always exact as a float: codes of a message and sums with them."""
    if node.op == "constant":
        return abs(node.value) < 2**20
    if node.op == "int":
        arg = node.args[0]
        return arg.kind == "bool" or (whole(arg) if arg.kind == "float" else small_whole(arg))
    if node.op == "field":
        return node.over == "number"
    return node.op in _CLOSED and all(small_whole(arg) for arg in (node.args[1:] if node.op == "where" else node.args))
