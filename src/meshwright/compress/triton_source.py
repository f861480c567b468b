"""Triton kernels as text, from a program: one function for each pass over the numbers, whatever the algorithm.

Every kernel handles one tile of one gradient. Its first part reads the numbers (and the residual) and replaces bad ones by
zero; then come the values that are wanted, each once, in the order of their operands; then what is done with them.
"""

from __future__ import annotations

from textwrap import indent

from meshwright.compress.language import REDUCTIONS, Node
from meshwright.compress.program import Field, Pass, walk
from meshwright.compress.triton_reading import reading
from meshwright.compress.triton_values import FIXED, LEAST, LEAST_INT, REDUCE, TILE, TYPES, Body, Shape
from meshwright.errors import InputError

_ARGUMENTS = "flat, residual, message, agreed, tiles, segments, sample, partial, stats, found, base, seed, many"
_MOST = 3.4028234663852886e38  # a number that is not less or equal is infinite or none
_FLAGS = "FLAG: tl.constexpr, RESIDUAL: tl.constexpr, ALIGNED: tl.constexpr"


def source(shape: Shape) -> str:
    """The text of all kernels.

    >>> from meshwright.compress import codec
    >>> text = source(Shape(codec("fp16").program, 4096, {}))
    >>> "def write_message(" in text, "def decode(" in text
    (True, True)
    """
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
        least = (LEAST_INT if node.kind == "int" else LEAST)[node.op]
        value = body.full(node.args[0], node.kind)
        reduced = f"{REDUCE[node.op]}(hide({value}, inside, {least}, WHOLE))"
        place = _partial(slot + 1, node.kind)
        body.lines.append(f"tl.store({place} + tile, {reduced})")
        made = f"{node.op}_of({place} + first, tiles, {'' if node.op == 'total' else f'{least}, '}WIDE)"
        after.append(f"tl.store({body.shape_of_stat(node)}, {made})")
    finish = f"""
@triton.jit(do_not_specialize=["many"])
def finish_{one.level}(message, segments, partial, stats, many, FLAG: tl.constexpr, WIDE: tl.constexpr):
    segment = tl.program_id(0)
    facts = segments + segment * {shape.width}
    first, tiles = tl.load(facts + 3), tl.load(facts + 4).to(tl.int32)
{indent(chr(10).join(after), "    ")}
    if FLAG:
        head(message, tl.load(facts + 2), largest_of(partial + first, tiles, 0.0, WIDE), 0)
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
    before, body = Body(shape), Body(shape)
    fields = [(i, one) for i, one in enumerate(last.fields) if one.sent]
    first = [line for i, one in fields if one.over != "chosen" for line in _stored(shape, before, one, i)]
    lines = [line for i, one in fields if one.over == "chosen" for line in _stored(shape, body, one, i)]
    rest = body.further()
    if last.result is not None:
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
        rest = body.further()
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
    # Each kernel over all numbers can be the first, which looks for bad ones.
    reads = not sampled or any("x" in _words(line) for line in lines)
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
{indent(TILE.format(size=size), "    ")}
    if length == {size}:
        {name}_tile({passed}, True)
    else:
        {name}_tile({passed}, False)
"""


_LOADING = [
    "x = read(flat + at + offset, inside, WHOLE).to(tl.float32)",
    "old, seen = x, x",
    "if RESIDUAL:",
    "    old = read(residual + at + offset, inside, WHOLE)",
    "    seen = x + old",
    f"    old = tl.where(tl.abs(old) <= {_MOST}, old, 0.0)  # else it would be bad for ever",
    "    x += old",
    "if FLAG:",
    "    none = tl.sum(seen * 0.0)  # not 0 if a number is bad; nothing is cheaper",
    f"good = tl.abs(x) <= {_MOST}",
    "x = tl.where(good, x, 0.0)",
]


def _words(line: str) -> list[str]:
    return "".join(c if c.isalnum() or c == "_" else " " for c in line).split()
