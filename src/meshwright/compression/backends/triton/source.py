"""Triton kernels as text, from a program: one function for each pass over the numbers, for any algorithm.

Every kernel handles one tile of one gradient. It reads the numbers (and the residual) and replaces bad ones by zero.
Then it computes the wanted values, each once, operands first, and stores the results.
"""

from __future__ import annotations

from dataclasses import replace
from textwrap import indent

from meshwright.compression.backends.triton.decoder import reading
from meshwright.compression.backends.triton.kernel import TOLD, kernel, stored
from meshwright.compression.backends.triton.random_selection import drawing
from meshwright.compression.backends.triton.selection import choosing
from meshwright.compression.backends.triton.threshold_search import refining, searching
from meshwright.compression.backends.triton.values import LARGER, LEAST, LEAST_INT, REDUCE, Body, Shape
from meshwright.compression.language import REDUCTIONS, Node
from meshwright.compression.program import Pass

_LEFT = ["if FLAG:", "    tl.store(partial + tile, tl.where(none == 0.0, 0.0, 1.0))"]


def source(shape: Shape) -> str:
    """Return the text of all kernels.

    >>> from meshwright.compression import codec
    >>> text = source(Shape(codec("fp16").program, 4096, {}))
    >>> "def write_message(" in text, "def decode(" in text
    (True, True)
    """
    program = shape.program
    texts = [reducing(shape, one) for one in program.encoding if sums(one)]
    for one in program.encoding:
        thresholds = [node for node in one.reductions if node.op == "threshold"]
        texts += [searching(shape, node) for node in thresholds]
        texts += [refining(shape, node) for node in thresholds if node.every == 1]
    if program.agrees is not None:
        texts.append(agreeing(shape, program.agrees))
    last = program.encoding[-1]
    return "\n\n".join([*texts, _last(shape, last), reading(shape)])


def _last(shape: Shape, last: Pass) -> str:
    if last.choice is None:
        return writing(shape, last)
    return drawing(shape, last) if last.choice.op == "drawn" else choosing(shape, last)


def sums(one: Pass) -> list[Node]:
    """Return the statistics that one look at every number gives."""
    return [node for node in one.reductions if node.op in REDUCTIONS]


def reducing(shape: Shape, one: Pass) -> str:
    """Return a pass that stores the statistics of every tile, and a kernel that combines those of a gradient.

    Tiles are larger than elsewhere: the fewer there are, the sooner the kernel ends for which all wait.
    """
    large = replace(shape, size=LARGER * shape.size)
    body, after = Body(large), []
    body.lines += _LEFT
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
def finish_{one.level}(message, segments, partial, stats, many, FLAG: tl.constexpr, WIDE: tl.constexpr, CHAIN: tl.constexpr):
    segment = tl.program_id(0)
    facts = segments + segment * {shape.width}
    first, tiles = tl.load(facts + 7), tl.load(facts + 8).to(tl.int32)
    follow(CHAIN)
{indent(chr(10).join(after), "    ")}
    if FLAG:
        bad = largest_of(partial + first, tiles, 0.0, WIDE)
        head(message, tl.load(facts + 2), bad, tl.load(facts + 5).to(tl.int32))
"""
    return kernel(large, f"reduce_{one.level}", body) + finish


def _partial(slot: int, kind: str) -> str:
    at = f"(partial + {slot} * many.to(tl.int64))"
    return f"{at}.to(tl.pointer_type(tl.int32))" if kind == "int" else at


def agreeing(shape: Shape, node: Node) -> str:
    body = Body(shape)
    value = body.of(node.args[0], "float")
    return f"""
@triton.jit
def agree(agreed, segments, stats, CHAIN: tl.constexpr):
    segment = tl.program_id(0)
    facts = segments + segment * {shape.width}
    follow(CHAIN)
{indent(chr(10).join(body.lines), "    ")}
    tl.store(agreed + segment, tl.where(tl.load(facts + 1) > 0, {value}, 0.0))
"""


def writing(shape: Shape, last: Pass) -> str:
    """Return the pass that writes the message, and the residual of every number."""
    body = Body(shape)
    body.lines += TOLD
    for i, one in enumerate(last.fields):
        if one.sent:
            body.lines += stored(shape, body, one, i)
    if last.result is not None:
        rest = body.further()
        said = rest.of(last.result, "float")
        rest.lines.append(f"write(residual + at + offset, tl.where(good, x - {said}, old), inside, WHOLE)")
        body.lines += ["if RESIDUAL:", *("    " + line for line in rest.lines)]
    return kernel(shape, "write_message", body, back=any(sums(one) for one in shape.program.encoding))
