"""Triton kernels as text, from a program: one function for each pass over the numbers, whatever the algorithm.

Every kernel handles one tile of one gradient. Its first part reads the numbers (and the residual) and replaces bad ones by
zero; then come the values that are wanted, each once, in the order of their operands; then what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import indent

from meshwright.compress.language import REDUCTIONS, Node
from meshwright.compress.program import Field, Pass, Program, is_barrier, walk
from meshwright.errors import InputError

COLUMNS = 128  # numbers of a row where there are no blocks: one warp scans a row
FIXED = 6  # of a gradient: where it begins, numbers, where its message is, first tile, tiles, room for chosen ones
TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "i32": "int32", "u8": "uint8", "u16": "uint16",
         "i8": "int8", "i16": "int16"}  # fmt: skip
_INFIX = {"add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "and": "&", "or": "|"}
_CALLS = {"min": "tl.minimum", "max": "tl.maximum", "abs": "tl.abs", "floor": "tl.floor", "round": "nearest",
          "sqrt": "tl.sqrt_rn", "where": "tl.where"}  # fmt: skip
_LEAST = {"total": "0", "largest": 'float("-inf")', "smallest": 'float("inf")'}
_LEAST_INT = {"total": "0", "largest": "-2147483648", "smallest": "2147483647"}
_REDUCE = {"total": "tl.sum", "largest": "tl.max", "smallest": "tl.min"}
_CLOSED = frozenset(["add", "sub", "neg", "min", "max", "where"])  # whole numbers stay so, and small
_ARGUMENTS = "flat, residual, message, agreed, tiles, segments, sample, partial, stats, found, base, seed, many"
_FLAGS = "FLAG: tl.constexpr, RESIDUAL: tl.constexpr, ALIGNED: tl.constexpr"


@dataclass
class Shape:
    """How a program sees its tiles."""

    program: Program
    size: int  # numbers of a tile
    stats: dict[int, int]  # place of each statistic of a gradient

    @property
    def sampled(self) -> int:
        """Numbers of a tile of what a threshold looks at: more, since the counts of a tile cost as much as many numbers."""
        return max(self.size, min(4 * self.size, 16384))

    @property
    def columns(self) -> int:
        return self.program.block or COLUMNS

    @property
    def width(self) -> int:
        """Facts of a gradient in the table of them."""
        return FIXED + len(self.program.fields)


@dataclass
class Body:
    """Lines of one kernel, and the names of what they have computed."""

    shape: Shape
    lines: list[str] = field(default_factory=list)
    _texts: dict[str, str] = field(default_factory=dict)
    _known: dict[tuple[int, str], str] = field(default_factory=dict)

    def full(self, node: Node, kind: str = "") -> str:
        """The text of a value, one for every number."""
        kind = kind or node.kind
        text = self.of(node, kind)
        if node.over in {"number", "chosen"}:
            return text
        return self.let(f"{text} + zero{'.to(tl.float32)' if kind == 'float' else ''}")

    def let(self, text: str) -> str:
        """A name for a value, the same for the same text."""
        if text not in self._texts:
            self._texts[text] = f"v{len(self._texts)}"
            self.lines.append(f"{self._texts[text]} = {text}")
        return self._texts[text]

    def of(self, node: Node, kind: str = "") -> str:
        """The text of a value, converted to a kind."""
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
        """A small whole number without a conversion, where it was a float before."""
        if node.op == "int":
            return self.of(node.args[0], "float")
        if node.op == "field":
            return self.let(f"{self.of(node)}.to(tl.float32)")
        return self._operation(node, "float")

    def _value(self, node: Node) -> str:
        if node.op in REDUCTIONS and node.block:
            least = (_LEAST_INT if node.kind == "int" else _LEAST)[node.op]
            return self.let(f"{_REDUCE[node.op]}(hide({self.of(node.args[0])}, inside, {least}, WHOLE), 1, keep_dims=True)")
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
            return self.let(f"tl.where({self.of(node.args[0], 'bool')}, {', '.join(self.of(a, kind) for a in node.args[1:])})")
        wanted = kind
        if kind == "bool" and op not in {"and", "or", "not"}:
            wanted = "float" if any(arg.kind == "float" for arg in node.args) else "int"
        args = [self.of(arg, wanted) for arg in node.args]
        if op in _INFIX:
            return self.let(f"{args[0]} {_INFIX[op]} {args[1]}")
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
        """Exact for a gradient; for every number a product with the reciprocal, which is off by two roundings at most."""
        top, below = self.of(one, "float"), self.of(other, "float")
        overs = {one.over, other.over}
        if overs <= {"gradient", "constant"}:
            return self.let(f"tl.div_rn({top}, {below})")
        if not overs & {"number", "chosen"} or other.over in {"number", "chosen"}:
            return self.let(f"{top} / {below}")
        return self.let(f"{top} * {self.let(f'1.0 / {below}')}")


def whole(node: Node) -> bool:
    """Whether a float has no part below one."""
    if node.op in {"floor", "round"} or node.kind != "float":
        return True
    if node.op == "constant":
        return node.value == int(node.value) and abs(node.value) < 2**20
    if node.op in _CLOSED | {"abs", "float"}:
        return all(whole(arg) for arg in (node.args[1:] if node.op == "where" else node.args))
    return False


def small_whole(node: Node) -> bool:
    """Whether an integer is exact as a float all the way: codes of a message and what is added to them."""
    if node.op == "constant":
        return abs(node.value) < 2**20
    if node.op == "int":
        return node.args[0].kind == "float" and whole(node.args[0])
    if node.op == "field":
        return node.over == "number"
    return node.op in _CLOSED and all(small_whole(arg) for arg in (node.args[1:] if node.op == "where" else node.args))


def source(shape: Shape) -> str:
    """The text of all kernels."""
    program = shape.program
    texts = [reducing(shape, one) for one in program.encoding if sums(one)]
    for one in program.encoding:
        texts += [text for node in one.reductions if node.op == "threshold" for text in trying(shape, node)]
    if program.agrees is not None:
        texts.append(agreeing(shape, program.agrees))
    last = program.encoding[-1]
    if last.choice is None:
        texts.append(writing(shape, last))
    else:
        texts += [counting(shape, last.choice), collecting(shape, last)]
    texts.append(reading(shape))
    return "\n\n".join(texts)


def sums(one: Pass) -> list[Node]:
    """Statistics that one look at every number gives."""
    return [node for node in one.reductions if node.op in REDUCTIONS]


def reducing(shape: Shape, one: Pass) -> str:
    """A pass that leaves the statistics of every tile, and a kernel that puts those of a gradient together."""
    body, after = Body(shape), []
    for node in sums(one):
        slot = shape.stats[id(node)]
        least = (_LEAST_INT if node.kind == "int" else _LEAST)[node.op]
        value = body.full(node.args[0], node.kind)
        reduced = f"{_REDUCE[node.op]}(hide({value}, inside, {least}, WHOLE))"
        place = _partial(slot + 1, node.kind)
        body.lines.append(f"tl.store({place} + tile, {reduced})")
        made = f"{node.op}_of({place} + first, tiles{'' if node.op == 'total' else f', {least}'})"
        after.append(f"tl.store({body.shape_of_stat(node)}, {made})")
    finish = f"""
@triton.jit(do_not_specialize=["many"])
def finish_{one.level}(message, segments, partial, stats, many, FLAG: tl.constexpr):
    segment = tl.program_id(0)
    facts = segments + segment * {shape.width}
    first, tiles = tl.load(facts + 3), tl.load(facts + 4).to(tl.int32)
{indent(chr(10).join(after), "    ")}
    if FLAG:
        head(message, tl.load(facts + 2), largest_of(partial + first, tiles, 0.0), 0)
"""
    return kernel(shape, f"reduce_{one.level}", body) + finish


def _partial(slot: int, kind: str) -> str:
    at = f"(partial + {slot} * many.to(tl.int64))"
    return f"{at}.to(tl.pointer_type(tl.int32))" if kind == "int" else at


def trying(shape: Shape, node: Node) -> list[str]:
    """Two passes over a sample: its largest number, and how many numbers reach each candidate."""
    name = f"{shape.stats[id(node)]}"
    if any(one.block for one in walk(node.args[0])):
        raise InputError("depends on blocks", field="threshold", valid="a value without statistics of blocks")
    top, tries = Body(shape), Body(shape)
    value = top.let(f"hide({top.full(node.args[0])}, inside, 0.0, WHOLE)")
    top.lines.append(f"tl.store({_partial(0, 'float')} + tile, tl.max({value}))")
    value = tries.let(f"hide({tries.full(node.args[0])}, inside, -1.0, WHOLE)")
    tries.lines += [
        "mine = base + segment * 32",
        "place = found + (segment * seed_copies + tile % seed_copies) * 16",
        "for j in tl.static_range(1 - FLAG, 16):  # floats: a comparison that gives 1.0 or 0.0 is one instruction",
        f"    many = tl.sum(tl.where({value} >= tl.load(mine + j), 1.0, 0.0))",
        '    tl.atomic_add(place + j, many.to(tl.int32), sem="relaxed")',
    ]
    return [kernel(shape, f"top_{name}", top, sampled=True), kernel(shape, f"try_{name}", tries, sampled=True)]


def agreeing(shape: Shape, node: Node) -> str:
    body = Body(shape)
    value = body.of(node.args[0], "float")
    return f"""
@triton.jit
def agree(agreed, segments, stats):
    segment = tl.program_id(0)
    facts = segments + segment * {shape.width}
{indent(chr(10).join(body.lines), "    ")}
    tl.store(agreed + segment, tl.where(tl.load(facts + 1) > 0, {value}, 0.0))
"""


def counting(shape: Shape, choice: Node) -> str:
    """How many numbers of every tile are chosen, and one bit for each number that is. Those that are not chosen stay in the
    residual as they are; bad ones are never chosen."""
    body = Body(shape)
    rows = shape.size // shape.columns
    body.lines += [
        f"passing = hide({body.of(choice)} & good, inside, False, WHOLE).to(tl.int32)",
        "tl.store(found + tile, tl.sum(passing))",
        f"bits = message + tile.to(tl.int64) * {shape.size // 8}",
        f"put(bits, passing, {shape.size}, True, 1, {rows}, {shape.columns})",
        "if RESIDUAL:",
        "    write(residual + at + offset, tl.where(good, x, old), inside, WHOLE)",
    ]
    return kernel(shape, "count", body)


def collecting(shape: Shape, last: Pass) -> str:
    """Chosen numbers, one of each 32 in each turn: only they are read again."""
    if shape.program.block:
        raise InputError("chooses by blocks", field="choose", valid="a test without statistics of blocks")
    if any(one.over == "number" for one in last.fields):
        raise InputError("sends chosen numbers and all of them", field="encode", valid="one of both")
    before, body, rest = Body(shape), Body(shape), Body(shape)
    first, lines = ([line for i, one in enumerate(last.fields) if one.sent and (one.over == "chosen") == chosen
                     for line in _stored(shape, its, one, i)] for chosen, its in ((False, before), (True, body)))  # fmt: skip
    if last.result is not None:
        rest = Body(shape, [], body._texts.copy(), body._known.copy())
        rest.lines.append(f"tl.store(residual + at + number, x - {rest.of(last.result, 'float')}, mask=kept)")
    inner = [*body.lines, *lines, "if RESIDUAL:", *("    " + line for line in rest.lines)]
    return f"""
@triton.jit(do_not_specialize=["seed"])
def collect(flat, residual, message, agreed, tiles, segments, stats, bits, base, seed, RESIDUAL: tl.constexpr):
    tile = tl.program_id(0)
    row = tiles + tile.to(tl.int64) * 4
    segment, start = tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
    facts = segments + segment * {shape.width}
    at, room = tl.load(facts), tl.load(facts + 5).to(tl.int32)
{indent(chr(10).join([*before.lines, *first]), "    ")}
    which = tl.arange(0, {shape.size // 32})
    word = tl.load(bits.to(tl.pointer_type(tl.int32)) + tile.to(tl.int64) * {shape.size // 32} + which)
    many = ones(word.to(tl.uint32, bitcast=True))
    place = tl.load(base + tile) + tl.cumsum(many, 0) - many
    left = tl.max(many, 0)
    while left > 0:
        lowest = (word & -word).to(tl.float32).to(tl.int32, bitcast=True)  # its exponent is the place of the bit
        number = start + which * 32 + ((lowest >> 23) & 255) - 127
        kept = (word != 0) & (place < room)
        zero = number * 0
        if RESIDUAL:
            x = tl.load(residual + at + number, mask=kept, other=0.0)
        else:
            x = tl.load(flat + at + number, mask=kept, other=0.0).to(tl.float32)
{indent(chr(10).join(inner), "        ")}
        word &= word - 1
        place += 1
        left -= 1
"""


def writing(shape: Shape, last: Pass) -> str:
    """The message, and what it does not say of every number."""
    body = Body(shape)
    for i, one in enumerate(last.fields):
        if one.sent:
            body.lines += _stored(shape, body, one, i)
    if last.result is not None:
        rest = Body(shape, [], body._texts.copy(), body._known.copy())
        said = rest.of(last.result, "float")
        rest.lines.append(f"write(residual + at + offset, tl.where(good, x - {said}, old), inside, WHOLE)")
        body.lines += ["if RESIDUAL:", *("    " + line for line in rest.lines)]
    return kernel(shape, "write_message", body)


def _stored(shape: Shape, body: Body, one: Field, place: int) -> list[str]:
    pointer = f"tl.multiple_of(tl.load(facts + {FIXED + place}), 16)"
    lines = [f"to = message + {pointer}"]
    kind = "float" if "f" in one.dtype else "int"
    value = body.full(one.node, kind) if one.over in {"number", "chosen"} else body.of(one.node, kind)
    if one.over == "number" and one.bits < 8:
        lines[0] += f" + start // {8 // one.bits}"
        code = f"hide({value}, inside, 0, WHOLE)"
        return [*lines, f"put(to, {code}, length, WHOLE, {one.bits}, {shape.size // shape.columns}, {shape.columns})"]
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


def kernel(shape: Shape, name: str, body: Body, *, sampled: bool = False) -> str:
    """A pass over tiles of the gradients, or of samples of them."""
    size, columns = (shape.sampled, 32) if sampled else (shape.size, shape.columns)
    lines = body.lines
    reads = name in {"write_message", "count"} or any("x" in _words(line) for line in lines)
    where = [f"rows = tl.arange(0, {size // columns})[:, None]", f"columns = tl.arange(0, {columns})[None, :]"]
    if sampled:  # runs of 32 numbers, one in so many
        where += [
            "step = tl.load(sample + segment * 4 + 3).to(tl.int32)",
            "number = (start // 32 + rows) * (step * 32) + columns",
            "offset = number",
            "inside = rows * 32 + columns < length",
        ]
    else:
        where += [f"offset = rows * {columns} + columns", "number = start + offset", "inside = offset < length"]
    where += ["zero = number * 0", f"facts = segments + segment * {shape.width}"]
    if reads:
        where += _LOADING
        if not sampled:
            where += [
                "if FLAG:",
                "    tl.store(partial + tile, tl.where(none == 0.0, 0.0, 1.0))",
            ]
    extra = ", seed_copies" if "seed_copies" in "".join(lines) else ""
    inner = indent("\n".join([*where, *lines]), "    ")
    passed = f"{_ARGUMENTS}{extra}, tile, at, segment, start, length, FLAG, RESIDUAL"
    return f"""
@triton.jit
def {name}_tile({_ARGUMENTS}{extra}, tile, at, segment, start, length, {_FLAGS.rpartition(",")[0]}, WHOLE: tl.constexpr):
{inner}


@triton.jit(do_not_specialize=["seed", "many"])
def {name}({_ARGUMENTS}{extra}, {_FLAGS}):
{indent(_TILE.format(size=size), "    ")}
    if length == {size}:
        {name}_tile({passed}, True)
    else:
        {name}_tile({passed}, False)
"""


_TILE = """tile = tl.program_id(0)
row = tiles + tile.to(tl.int64) * 4
at = tl.multiple_of(tl.load(row), ALIGNED)
segment = tl.load(row + 1).to(tl.int32)
start = tl.multiple_of(tl.load(row + 2).to(tl.int32), {size})
length = tl.load(row + 3).to(tl.int32)"""
_LOADING = [
    "x = read(flat + at + offset, inside, WHOLE).to(tl.float32)",
    "old = x",
    "if RESIDUAL:",
    "    old = read(residual + at + offset, inside, WHOLE)",
    "    x += old",
    "if FLAG:",
    "    none = tl.sum(x * 0.0)  # not 0 if a number is bad; nothing is cheaper",
    "good = tl.abs(x) <= 3.4028234663852886e38",
    "x = tl.where(good, x, 0.0)",
]


def _words(line: str) -> list[str]:
    return "".join(c if c.isalnum() or c == "_" else " " for c in line).split()


def reading(shape: Shape) -> str:
    """Decoding: every number from the message, or chosen numbers to their places."""
    result = shape.program.decoding.result
    assert result is not None
    if result.op == "spread":
        return _scattering(shape, result)
    if any(node.op == "spread" for node in walk(result)):
        raise InputError("computes with what it has spread", field="decode", valid="spread(...) of computed values, at last")
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
{indent(_TILE.format(size=shape.size), "    ")}
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
{indent(_TILE.format(size=shape.size), "    ")}
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
