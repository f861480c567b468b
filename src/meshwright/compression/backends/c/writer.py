"""Write values of a program in C: names, formulas, loops over a tile."""

from __future__ import annotations

from meshwright.compression.language import REDUCTIONS, SYMBOLS, Node
from meshwright.compression.program import Field, Program, is_barrier, walk

TILE = 1024  # numbers, unless blocks need another size
_TYPES = {"f32": "float", "i32": "int32_t", "i8": "int8_t", "i16": "int16_t", "u8": "uint8_t", "u16": "uint16_t"}
_FUNCTIONS = {"floor": "floorf", "round": "rintf", "sqrt": "sqrtf", "abs": "fabsf"}
C_TYPES = {"float": "float", "int": "int32_t", "bool": "int32_t"}


class Writer:
    """Lines of C, and the name of each value in them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.unit = program.block or TILE
        self.lines: list[str] = []
        self._names: dict[int, tuple[Node, str]] = {}

    def line(self, *lines: str) -> None:
        self.lines.extend(lines)

    def name(self, node: Node) -> str:
        """Return the C expression of a value at its use."""
        if node.op == "constant":
            return str(int(node.value)) if node.kind == "int" else f"{float(node.value).hex()}f"
        plain = {"gradient": "v[i]", "index": "(int32_t)(base + i)", "count": "(int32_t)n", "kept": "keep[i]"}
        if node.op in plain:
            return plain[node.op]
        if node.op == "spread":
            return f"{self._own(node, 'x')}[i]"
        if node.over == "constant":
            return f"({self.formula(node)})"
        return self._own(node, node.over[0] if node.over != "number" else "x")

    def _own(self, node: Node, letter: str) -> str:
        return self._names.setdefault(id(node), (node, f"{letter}{len(self._names)}"))[1]

    def formula(self, node: Node) -> str:
        """Return the C formula of one operation."""
        args = [self.name(arg) for arg in node.args]
        if node.op == "uniform":
            return "uniform_at((uint32_t)(base + i), seed)"
        if node.op in SYMBOLS:
            return f"{args[0]} {SYMBOLS[node.op]} {args[1]}"
        if node.op in _FUNCTIONS and node.kind == "float":
            return f"{_FUNCTIONS[node.op]}({args[0]})"
        if node.op in {"min", "max"}:
            cast = f"({C_TYPES[node.kind]})"
            one, other = cast + args[0], cast + args[1]
            return f"{one} {'<' if node.op == 'min' else '>'} {other} ? {one} : {other}"
        return {
            "div": "(float){0} / (float){1}",
            "neg": "-({0})",
            "not": "!{0}",
            "abs": "{0} < 0 ? -({0}) : {0}",
            "where": "{0} ? {1} : {2}",
            "float": "(float){0}",
            "int": "(int32_t){0}",
            "half": "from_f16(to_f16({0}))",
            "bfloat": "from_bf16(to_bf16({0}))",
        }.get(node.op, "{0}").format(*args)

    def declared(self, node: Node) -> str:
        return f"const {C_TYPES[node.kind]} {self.name(node)} = {self.formula(node)};"

    def loop(self, targets: list[tuple[str, Node]]) -> None:
        """Write one loop for several results; each target has {} in place of its value."""
        if not targets:
            return
        needed = {id(node): node for _, root in targets for node in self.computed(root, "number")}
        self.line("for (int64_t i = 0; i < m; i++) {", *map(self.declared, needed.values()))
        self.line(*(target.format(self.name(root)) for target, root in targets), "}")

    def computed(self, root: Node, over: str) -> list[Node]:
        """Return the values to compute for each number (or chosen number), operands first."""
        leaves = {"gradient", "index", "kept", "field", "spread"}
        return [node for node in until_barriers(root) if node.over == over and node.op not in leaves]

    def blocks(self, roots: list[Node]) -> None:
        """Write statistics of the block in the tile, and what follows from them."""
        wanted = {id(node): node for root in roots for node in until_barriers(root) if node.over == "block"}
        for node in sorted(wanted.values(), key=lambda one: len(walk(one))):
            if node.op in REDUCTIONS:
                array = "e" if node.kind == "float" else "w"
                first = {"total": "0", "largest": f"{array}[0]", "smallest": f"{array}[0]"}[node.op]
                self.loop([(f"{array}[i] = {{}};", node.args[0])])
                kind = C_TYPES[node.kind]
                self.line(f"const {kind} {self.name(node)} = ({kind}){node.op}_{node.kind}({array}, m, {first});")
            elif node.op != "field":
                self.line(self.declared(node))


def until_barriers(root: Node) -> list[Node]:
    """Return the operands of a value, in order, up to whole gradients' statistics."""
    found: dict[int, Node] = {}

    def visit(node: Node) -> None:
        if id(node) not in found:
            for arg in () if is_barrier(node) or node.over == "gradient" else node.args:
                visit(arg)
            found[id(node)] = node

    visit(root)
    return list(found.values())


def places(fields: tuple[Field, ...]) -> list[str]:
    """Return the offsets of a message's fields."""
    lines, at = [], "16"
    for i, one in enumerate(fields):
        lines.append(f"const int64_t at{i} = {at};")
        length = {"number": "n", "block": f"((n + {one.block or 1} - 1) / {one.block or 1})", "gradient": "1"}
        many = length.get(one.over, f"capacity(n, {one.part.hex()})")
        at = f"at{i} + aligned(({many} * {one.bits} + 7) / 8)" if one.sent else f"at{i}"
    return [*lines, f"const int64_t end = {at};"]


def type_(one: Field) -> str:
    return "uint8_t" if one.bits < 8 else _TYPES.get(one.dtype, "uint16_t")


def word(one: Field, value: str) -> str:
    """Return a value as it is stored in a message."""
    return f"to_{one.dtype}({value})" if one.dtype in {"f16", "bf16"} else f"({type_(one)}){value}"
