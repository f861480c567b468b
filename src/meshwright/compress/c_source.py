"""C from a program: one function that encodes a gradient, pass after pass, and one that decodes.

Each pass goes through the gradient in tiles that stay in the first cache. In a tile, statistics of a block are found first,
then one loop has everything that is left, which a compiler vectorises.
"""

from __future__ import annotations

from importlib.resources import files

from meshwright.compress.language import REDUCTIONS, Node
from meshwright.compress.program import (
    ENOUGH,
    ROUNDS,
    RUN,
    SMALLEST,
    Field,
    Pass,
    Program,
    depth,
    is_barrier,
    untaken,
    walk,
)

TILE = 1024  # numbers, where blocks do not say otherwise
_TYPES = {"f32": "float", "i32": "int32_t", "i8": "int8_t", "i16": "int16_t", "u8": "uint8_t", "u16": "uint16_t"}
_SYMBOLS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "and": "&",
    "or": "|",
}
_FUNCTIONS = {"floor": "floorf", "round": "rintf", "sqrt": "sqrtf", "abs": "fabsf"}
_C = {"float": "float", "int": "int32_t", "bool": "int32_t"}


def c_source(program: Program, number: str) -> str:
    """The whole file; `number` is the type of gradients: f32, f16 or bf16."""
    head = [
        f"#define NUMBER {'float' if number == 'f32' else 'uint16_t'}",
        f"#define FROM(x) from_{number}(x)",
        f"#define TO(x) to_{number}(x)",
        files("meshwright.compress").joinpath("native.h").read_text(),
    ]
    return "\n".join([*head, Encoder(program).text(), Decoder(program).text(), _ENTRIES]) + "\n"


class Writer:
    """Lines of C, and how each value is called in them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.unit = program.block or TILE
        self.lines: list[str] = []
        self._names: dict[int, tuple[Node, str]] = {}

    def line(self, *lines: str) -> None:
        self.lines.extend(lines)

    def name(self, node: Node) -> str:
        """What stands for a value where it is used."""
        if node.op == "constant":
            return str(int(node.value)) if node.kind == "int" else f"{float(node.value).hex()}f"
        plain = {"gradient": "v[i]", "index": "(int32_t)(base + i)", "count": "(int32_t)n", "kept": "keep[i]"}
        if node.op in plain:
            return plain[node.op]
        if node.op == "field":
            return self.field_name(node)
        if node.op == "spread":
            return f"{self._own(node, 'x')}[i]"
        if node.over == "constant":
            return f"({self.formula(node)})"
        return self._own(node, node.over[0] if node.over != "number" else "x")

    def field_name(self, node: Node) -> str:
        raise NotImplementedError

    def _own(self, node: Node, letter: str) -> str:
        return self._names.setdefault(id(node), (node, f"{letter}{len(self._names)}"))[1]

    def formula(self, node: Node) -> str:
        """The C of one operation."""
        args = [self.name(arg) for arg in node.args]
        if node.op == "uniform":
            return "uniform_at((uint32_t)(base + i), seed)"
        if node.op in _SYMBOLS:
            return f"{args[0]} {_SYMBOLS[node.op]} {args[1]}"
        if node.op in _FUNCTIONS and node.kind == "float":
            return f"{_FUNCTIONS[node.op]}({args[0]})"
        if node.op in {"min", "max"}:
            cast = f"({_C[node.kind]})"
            one, other = cast + args[0], cast + args[1]
            return f"{one} {'<' if node.op == 'min' else '>'} {other} ? {one} : {other}"
        return {
            "div": "(float){0} / (float){1}",
            "neg": "-{0}",
            "not": "!{0}",
            "abs": "{0} < 0 ? -{0} : {0}",
            "where": "{0} ? {1} : {2}",
            "float": "(float){0}",
            "int": "(int32_t){0}",
            "half": "from_f16(to_f16({0}))",
            "bfloat": "from_bf16(to_bf16({0}))",
        }.get(node.op, "{0}").format(*args)

    def declared(self, node: Node) -> str:
        return f"const {_C[node.kind]} {self.name(node)} = {self.formula(node)};"

    def loop(self, targets: list[tuple[str, Node]], over: str = "number", limit: str = "m") -> None:
        """One loop for several results; each target has {} where its value goes."""
        self.line(f"for (int64_t i = 0; i < {limit}; i++) {{")
        seen: set[int] = set()
        for _, root in targets:
            for node in self.computed(root, over):
                if id(node) not in seen:
                    seen.add(id(node))
                    self.line(self.declared(node))
        self.line(*(target.format(self.name(root)) for target, root in targets), "}")

    def computed(self, root: Node, over: str) -> list[Node]:
        """What must be computed anew for each number (or block, or chosen number), operands first."""
        leaves = {"gradient", "index", "count", "kept", "constant", "field", "spread"}
        found = _until_barriers(root)
        return [node for node in found if node.over == over and node.op not in leaves and not (is_barrier(node))]

    def blocks(self, roots: list[Node]) -> None:
        """Statistics of the block that is in the tile, and what follows from them."""
        wanted = {id(node): node for root in roots for node in _until_barriers(root) if node.over == "block"}
        for node in sorted(wanted.values(), key=lambda one: len(walk(one))):
            if node.op in REDUCTIONS:
                array = "e" if node.kind == "float" else "w"
                first = {"total": "0", "largest": f"{array}[0]", "smallest": f"{array}[0]"}[node.op]
                self.loop([(f"{array}[i] = {{}};", node.args[0])])
                kind = _C[node.kind]
                self.line(f"const {kind} {self.name(node)} = ({kind}){node.op}_{node.kind}({array}, m, {first});")
            elif node.op != "field":
                self.line(self.declared(node))


def _until_barriers(root: Node) -> list[Node]:
    """What a value is made of, operands first, without what whole gradients' statistics are made of."""
    found: dict[int, Node] = {}

    def visit(node: Node) -> None:
        if id(node) not in found:
            for arg in () if is_barrier(node) or node.over == "gradient" else node.args:
                visit(arg)
            found[id(node)] = node

    visit(root)
    return list(found.values())


def _places(fields: tuple[Field, ...]) -> list[str]:
    """Where the fields of a message begin."""
    lines, at = [], "16"
    for i, one in enumerate(fields):
        lines.append(f"const int64_t at{i} = {at};")
        length = {"number": "n", "block": f"((n + {one.block or 1} - 1) / {one.block or 1})", "gradient": "1"}
        many = length.get(one.over, f"capacity(n, {one.part.hex()})")
        at = f"at{i} + aligned(({many} * {one.bits} + 7) / 8)" if one.sent else f"at{i}"
    return [*lines, f"const int64_t end = {at};"]


def _sees_part(first: Pass) -> bool:
    """Whether a bad number may be met only by the last pass."""
    return not any(node.op in REDUCTIONS or (node.op == "threshold" and node.every == 1) for node in first.reductions)


def _type(one: Field) -> str:
    return "uint8_t" if one.bits < 8 else _TYPES.get(one.dtype, "uint16_t")


class Encoder(Writer):
    """The function that encodes one gradient."""

    def text(self) -> str:
        program = self.program
        self.line(
            "INLINE void encode_one(const NUMBER *flat, float *res, uint8_t *msg, int64_t n, uint32_t seed, float *agreed,",
            "                       int32_t *was_bad, const int mode, const int feed) {",
            f"float v[{self.unit + 64}], e[{self.unit + 64}];",
            f"int32_t w[{self.unit + 64}], places[{self.unit + 64}];",
            f"uint8_t keep[{self.unit + 64}], codes[{self.unit + 64}];",
            "(void)e; (void)w; (void)places; (void)keep; (void)codes; (void)seed;",
            *_places(program.fields),
            "if (!n) { *agreed = 0; if (mode != 1) memset(msg, 0, (size_t)end); return; }",
            "int zero = mode == 2 ? *was_bad : 0;",
        )
        late = _sees_part(program.encoding[0])
        if late:
            self.line("if (feed && mode != 2) zero = any_bad(flat, res, n); /* the last pass changes the residual */")
        scalars = self._scalars()
        for node in scalars:
            self.line(f"{_C[node.kind]} {self.name(node)} = 0;")
        self.line("again:;", "int bad = zero;")
        self._level(scalars, 0)
        for one in program.encoding[:-1]:
            self.line("{" if self._after_agreement(one) else "if (mode != 2) {")
            self._reductions(one)
            self.line("}")
            if not one.level:
                self.line("if (bad && !zero) { zero = 1; goto again; }")
            self._agree(one)
            self._level(scalars, one.level + 1)
        self.line("if (mode == 1) return;")
        self._message(program.encoding[-1])
        if late:
            self.line("if (bad && !zero) { zero = 1; goto again; }")
        self.line("((uint32_t *)msg)[0] = (uint32_t)zero;", "}")
        return "\n".join(self.lines)

    def _scalars(self) -> list[Node]:
        """Values of the whole gradient, those first that others need."""
        last = self.program.encoding[-1]
        roots = [*(one.node for one in last.fields), *([last.result] if last.result is not None else [])]
        roots += [node for one in self.program.encoding for node in one.reductions]
        if last.choice is not None:
            roots.append(last.choice)
        found = {id(node): node for root in roots for node in walk(root)}
        return [node for node in found.values() if node.over == "gradient" and node.op not in {"count", "constant"}]

    def _level(self, scalars: list[Node], level: int) -> None:
        """What follows from statistics, as soon as those are known."""
        for node in scalars:
            if not is_barrier(node) and depth(node) == level:
                self.line(f"{self.name(node)} = {self.formula(node)};")

    def _after_agreement(self, one: Pass) -> bool:
        """Whether a pass finds what is still needed once processes have agreed."""
        agrees = self.program.agrees
        if agrees is None or one.level >= depth(agrees):
            return True
        reached: set[int] = set()
        queue = [one.node for one in self.program.fields]
        while queue:
            node = queue.pop()
            reached.add(id(node))
            queue += () if node is agrees else node.args
        return any(id(node) in reached and node is not agrees for node in one.reductions)

    def _agree(self, one: Pass) -> None:
        if self.program.agrees is not None and any(node is self.program.agrees for node in one.reductions):
            mine, of = self.name(self.program.agrees), self.name(self.program.agrees.args[0])
            self.line(f"if (mode != 2) {{ *agreed = (float){of}; *was_bad = zero; }}", f"{mine} = *agreed;")

    def _tiles(self, unit: str = "", step: str = "1") -> None:
        unit = unit or str(self.unit)
        self.line(
            f"for (int64_t base = 0; base < n; base += {unit} * {step}) {{",
            f"const int64_t m = least({unit}, n - base);",
            "bad |= loaded(flat + base, feed ? res + base : 0, v, m, zero);",
        )

    def _reductions(self, one: Pass) -> None:
        plain = [node for node in one.reductions if node.op in REDUCTIONS]
        if plain:
            for node in plain:
                kind = (
                    "double"
                    if node.kind == "float" and node.op == "total"
                    else "int64_t"
                    if node.kind == "int"
                    else "float"
                )
                first = {"total": "0", "largest": "-INFINITY", "smallest": "INFINITY"}[node.op]
                if node.kind == "int" and node.op != "total":
                    first = "INT32_MIN" if node.op == "largest" else "INT32_MAX"
                self.line(f"{kind} a_{self.name(node)} = {first};")
            self._tiles()
            self.blocks([node.args[0] for node in plain])
            for node in plain:
                array = "e" if node.kind == "float" else "w"
                self.loop([(f"{array}[i] = {{}};", node.args[0])])
                sum_ = f"a_{self.name(node)}"
                self.line(f"{sum_} = {node.op}_{node.kind}({array}, m, {sum_});")
            self.line("}")
            for node in plain:
                self.line(f"{self.name(node)} = ({_C[node.kind]})a_{self.name(node)};")
        for node in one.reductions:
            if node.op == "threshold":
                self._threshold(node)

    def _threshold(self, node: Node) -> None:
        self.line(
            "{ float low = 0, high = -INFINITY, tries[15]; int64_t counts[15], some = 0, seen = 0;",
            f"int64_t step = least({node.every}, n / {ENOUGH}); if (step < 1) step = 1;",
            f"const int64_t unit = step > 1 ? {RUN} : {self.unit};",
        )
        self._tiles("unit", "step")
        self.blocks([node.args[0]])
        self.loop([("e[i] = {};", node.args[0])])
        self.line("high = largest_float(e, m, high); some += positive(e, m); seen += m; }")
        self.line(
            f"const int64_t k = capacity(seen, {node.value.hex()});",
            "if (bad && !zero) { zero = 1; goto again; }",
            f"if (some <= k) high = {SMALLEST.hex()}f;",
            f"else for (int turn = 0; turn < {ROUNDS}; turn++) {{",
            "attempts(low, high, turn, tries); memset(counts, 0, sizeof counts);",
        )
        self._tiles("unit", "step")
        self.blocks([node.args[0]])
        self.loop([("e[i] = {};", node.args[0])])
        self.line("reached(e, m, tries, counts); }", "narrowed(&low, &high, tries, counts, k); }")
        self.line(f"{self.name(node)} = high; }}")

    def _message(self, last: Pass) -> None:
        # Only what follows the codes in the last 16 bytes of a field would be left from an earlier message.
        self.line("memset(msg, 0, 16);")
        for i, _one in enumerate(last.fields):
            after = f"at{i + 1}" if i + 1 < len(last.fields) else "end"
            self.line(f"if ({after} > at{i}) memset(msg + {after} - 16, 0, 16);")
        numbers = [(i, one) for i, one in enumerate(last.fields) if one.over == "number"]
        chosen = [(i, one, untaken(one.node)) for i, one in enumerate(last.fields) if one.over == "chosen"]
        for i, one in enumerate(last.fields):
            if one.over == "gradient" and one.sent:
                self.line(f"(({_type(one)} *)(msg + at{i}))[0] = {_word(one, self.name(one.node))};")
        assert last.result is not None
        if chosen:
            self.line(f"const int64_t all = capacity(n, {chosen[0][1].part.hex()}); int64_t chosen = 0;")
        self._tiles()
        roots = [one.node for _, one in numbers] + [one.node for one in last.fields if one.over == "block"]
        roots += [last.result, *(node for _, _, node in chosen), *([last.choice] if last.choice is not None else [])]
        self.blocks(roots)
        for i, one in enumerate(last.fields):
            if one.over == "block":
                self.line(f"(({_type(one)} *)(msg + at{i}))[base / {self.unit}] = {_word(one, self.name(one.node))};")
        if last.choice is not None:
            self._chosen(last.choice, chosen)
        # A number that is rounded where it is stored need not be rounded before.
        plain = [one.node.args[0] if one.dtype in {"f16", "bf16"} else one.node for _, one in numbers]
        targets = [(self._stored(i, one), node) for (i, one), node in zip(numbers, plain, strict=True)]
        self.line("if (feed && !zero) {")
        self.loop([*targets, ("res[base + i] = v[i] - {};", last.result)])
        self.line("} else {")
        self.loop(targets)
        self.line("}")
        for i, one in numbers:
            if one.bits < 8:
                self.line(f"pack_{one.bits}(codes, m, msg + at{i} + base * {one.bits} / 8);")
        self.line("}")
        if chosen:
            self.line("((uint32_t *)msg)[1] = (uint32_t)chosen;")
            for i, one, _ in chosen:  # places that were not needed
                after = f"at{i + 1}" if i + 1 < len(last.fields) else "end"
                used = f"at{i} + chosen * {one.bits // 8}"
                self.line(f"memset(msg + {used}, 0, (size_t)({after} - ({used})));")

    def _stored(self, i: int, one: Field) -> str:
        if one.bits < 8:
            return "codes[i] = (uint8_t){};"
        word = _word(one, "{}")
        return f"(({_type(one)} *)(msg + at{i}))[base + i] = {word};"

    def _chosen(self, choice: Node, chosen: list[tuple[int, Field, Node]]) -> None:
        self.loop([("keep[i] = (uint8_t){};", choice)])
        self.line("const int64_t here = collected(keep, m, all - chosen, places);", "if (here) {")
        for i, one, node in chosen:
            array = "e" if node.kind == "float" else "w"
            self.loop([(f"{array}[i] = {{}};", node)])
            word = _word(one, f"{array}[places[j]]")
            self.line(f"for (int64_t j = 0; j < here; j++) (({_type(one)} *)(msg + at{i}))[chosen + j] = {word};")
        self.line("chosen += here; }")


def _word(one: Field, value: str) -> str:
    """A value as it lies in a message."""
    return f"to_{one.dtype}({value})" if one.dtype in {"f16", "bf16"} else f"({_type(one)}){value}"


class Decoder(Writer):
    """The function that decodes one gradient."""

    def text(self) -> str:
        result = self.program.decoding.result
        assert result is not None
        self.line(
            "INLINE void decode_one(const uint8_t *msg, NUMBER *out, int64_t n, const float *agreed, const int add) {",
            *_places(self.program.fields),
            "if (!n) return;",
            "(void)agreed; (void)end;",
        )
        self._fields()
        scalars = [node for node in walk(result) if node.over == "gradient" and node.op not in {"field", "count"}]
        self.line(*(self.declared(node) for node in scalars))
        if result.op == "spread":
            self.line("if (!add) memset(out, 0, (size_t)n * sizeof(NUMBER));")
            self.line("int64_t i = 0;")
            self._scattered(result, "0", "n", "out[at] = TO(add ? FROM(out[at]) + {0} : {0});")
        else:
            self._tile(result)
        self.line("}")
        return "\n".join(self.lines)

    def _fields(self) -> None:
        for i, one in enumerate(self.program.fields):
            self.line(f"const {_type(one)} *f{i} = (const {_type(one)} *)(msg + at{i}); (void)f{i};")
        parts = [one.part for one in self.program.fields if one.over == "chosen"]
        if parts:
            self.line(
                f"const int64_t chosen = least((int64_t)((const uint32_t *)msg)[1], capacity(n, {parts[0].hex()}));"
            )

    def field_name(self, node: Node) -> str:
        i = next(i for i, one in enumerate(self.program.fields) if one.name == node.name)
        one = self.program.fields[i]
        if not one.sent:
            return "agreed[0]"
        if one.bits < 8:
            return f"u{i}[i]"
        place = {"number": "base + i", "block": f"base / {self.unit}", "gradient": "0", "chosen": "i"}[one.over]
        word = f"f{i}[{place}]"
        return f"from_{one.dtype}({word})" if one.dtype in {"f16", "bf16"} else word

    def _scattered(self, spread: Node, base: str, end: str, target: str) -> None:
        """Chosen values from the i-th on, written where they belong; a damaged message has places outside."""
        index, value = spread.args
        self.line("for (; i < chosen; i++) {")
        self.line(*(self.declared(node) for node in self.computed(index, "chosen")))
        self.line(f"const int64_t at = (int64_t){self.name(index)} - {base};", f"if (at >= {end}) break;")
        self.line(*(self.declared(node) for node in self.computed(value, "chosen")))
        self.line(f"if (at >= 0) {target.format(self.name(value))} }}")

    def _tile(self, result: Node) -> None:
        spreads = [node for node in walk(result) if node.op == "spread"]
        for node in spreads:
            self.line(f"float {self._own(node, 'x')}[{self.unit}]; int64_t next_{self._own(node, 'x')} = 0;")
        for i, one in enumerate(self.program.fields):
            if one.bits < 8:
                self.line(f"uint8_t u{i}[{self.unit + 64}];")
        self.line(
            f"for (int64_t base = 0; base < n; base += {self.unit}) {{",
            f"const int64_t m = least({self.unit}, n - base);",
        )
        self.blocks([result])
        for i, one in enumerate(self.program.fields):
            if one.bits < 8:
                self.line(f"unpack_{one.bits}(f{i} + base * {one.bits} / 8, m, u{i});")
        for node in spreads:
            self._spread_tile(node)
        self.loop([("out[base + i] = TO(add ? FROM(out[base + i]) + {0} : {0});", result)])
        self.line("}")

    def _spread_tile(self, node: Node) -> None:
        name = self._own(node, "x")
        self.line(f"memset({name}, 0, sizeof {name});", f"{{ int64_t i = next_{name};")
        self._scattered(node, "base", "m", f"{name}[at] = {{0}};")
        self.line(f"next_{name} = i; }}")


_ENTRIES = """
void encode(const NUMBER *flat, float *res, uint8_t *msg, const int64_t *table, int64_t many, uint32_t seed, float *agreed,
            int32_t *bad, int mode) {
    for (int64_t s = 0; s < many; s++) {
        const int64_t n = table[3 * s], start = table[3 * s + 1], place = table[3 * s + 2];
        if (res) encode_one(flat + start, res + start, msg + place, n, seed, agreed + s, bad + s, mode, 1);
        else encode_one(flat + start, 0, msg + place, n, seed, agreed + s, bad + s, mode, 0);
    }
}
void decode(const uint8_t *msg, NUMBER *out, const int64_t *table, int64_t many, const float *agreed, int add) {
    for (int64_t s = 0; s < many; s++) {
        const int64_t n = table[3 * s], start = table[3 * s + 1], place = table[3 * s + 2];
        if (add) decode_one(msg + place, out + start, n, agreed + s, 1);
        else decode_one(msg + place, out + start, n, agreed + s, 0);
    }
}
"""
