"""Generate the C function that encodes one gradient, pass after pass."""

from __future__ import annotations

from meshwright.compression.backends.c.writer import C_TYPES, Writer, places, type_, word
from meshwright.compression.language import REDUCTIONS, Node
from meshwright.compression.program import ENOUGH, ROUNDS, RUN, SMALLEST, Field, Pass, depth, is_barrier, untaken, walk

# Accumulator of a whole gradient's reduction, and its initial value.
_KEPT = {
    ("total", "float"): ("double", "0"),
    ("largest", "float"): ("float", "-INFINITY"),
    ("smallest", "float"): ("float", "INFINITY"),
    ("total", "int"): ("int64_t", "0"),
    ("largest", "int"): ("int32_t", "INT32_MIN"),
    ("smallest", "int"): ("int32_t", "INT32_MAX"),
}


class Encoder(Writer):
    """Generator of the function that encodes one gradient."""

    def text(self) -> str:
        program, size = self.program, self.unit + 64
        self.line(
            "INLINE void encode_one(const NUMBER *flat, float *res, uint8_t *msg, int64_t n, uint32_t seed, float *agreed,",
            "                       const int mode, const int feed) {",
            f"float v[{size}], e[{size}], old[{size}];",
            f"int32_t w[{size}], places[{size}];",
            f"uint8_t keep[{size}], good[{size}];",
            *(f"uint8_t codes{i}[{size}];" for i, one in enumerate(program.fields) if one.bits < 8),
            *places(program.fields),
            "if (!n) { *agreed = 0; if (mode != MEASURE) memset(msg, 0, (size_t)end); return; }",
        )
        scalars = self._scalars()
        for node in scalars:
            self.line(f"{C_TYPES[node.kind]} {self.name(node)} = 0;")
        self._level(scalars, 0)
        for one in program.encoding[:-1]:
            self.line("{" if self._after_agreement(one) else "if (mode != REST) {")
            self._reductions(one)
            self.line("}")
            self._agree(one)
            self._level(scalars, one.level + 1)
        self.line("if (mode == MEASURE) return;")
        self._message(program.encoding[-1])
        self.line("((uint32_t *)msg)[0] = (uint32_t)bad;", "}")
        return "\n".join(self.lines)

    def _scalars(self) -> list[Node]:
        """Return values of the whole gradient in order of dependence."""
        last = self.program.encoding[-1]
        roots = [*(one.node for one in last.fields), *([last.result] if last.result is not None else [])]
        roots += [node for one in self.program.encoding for node in one.reductions]
        if last.choice is not None:
            roots.append(last.choice)
        found = {id(node): node for root in roots for node in walk(root)}
        return [node for node in found.values() if node.over == "gradient" and node.op not in {"count", "constant"}]

    def _level(self, scalars: list[Node], level: int) -> None:
        """Compute what follows from statistics as soon as those are known."""
        for node in scalars:
            if not is_barrier(node) and depth(node) == level:
                self.line(f"{self.name(node)} = {self.formula(node)};")

    def _after_agreement(self, one: Pass) -> bool:
        """Return True if a pass finds statistics that are still needed once ranks have agreed."""
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
            self.line(f"if (mode != REST) *agreed = (float){of};", f"{mine} = *agreed;")

    def _tiles(self, unit: str = "", step: str = "1") -> None:
        unit = unit or str(self.unit)
        self.line(
            f"for (int64_t base = 0; base < n; base += {unit} * {step}) {{",
            f"const int64_t m = least({unit}, n - base);",
            "const int ill = loaded(flat + base, feed ? res + base : 0, v, m, good, old);",
        )

    def _reductions(self, one: Pass) -> None:
        plain = [node for node in one.reductions if node.op in REDUCTIONS]
        if plain:
            for node in plain:
                kind, first = _KEPT[node.op, node.kind]
                self.line(f"{kind} all_{self.name(node)} = {first};")
            self._tiles()
            self.blocks([node.args[0] for node in plain])
            for node in plain:
                array, kept = "e" if node.kind == "float" else "w", f"all_{self.name(node)}"
                self.loop([(f"{array}[i] = {{}};", node.args[0])])
                self.line(f"{kept} = {node.op}_{node.kind}({array}, m, {kept});")
            self.line("}")
            self.line(*(f"{self.name(node)} = ({C_TYPES[node.kind]})all_{self.name(node)};" for node in plain))
        for node in one.reductions:
            if node.op == "threshold":
                self._threshold(node)

    def _threshold(self, node: Node) -> None:
        self.line(
            "{ float low = 0, high = -INFINITY, tries[15]; int64_t counts[15], some = 0, seen = 0;",
            f"int64_t step = least({node.every}, n / {ENOUGH}); if (step < 1) step = 1; step |= 1;",
            f"const int64_t unit = step > 1 ? {RUN} : {self.unit};",
        )
        self._tiles("unit", "step")
        self.blocks([node.args[0]])
        self.loop([("e[i] = {};", node.args[0])])
        self.line("high = largest_float(e, m, high); some += positive(e, m); seen += m; }")
        self.line(
            f"const int64_t k = capacity(seen, {node.value.hex()});",
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
        assert last.result is not None
        fields = list(enumerate(last.fields))
        numbers = [(i, one) for i, one in fields if one.over == "number"]
        chosen = [(i, one, untaken(one.node)) for i, one in fields if one.over == "chosen"]
        # Beyond the codes, the last 16 bytes of a field would keep data of an earlier message.
        self.line("memset(msg, 0, 16);")
        self.line(*(f"if ({self._after(i)} > at{i}) memset(msg + {self._after(i)} - 16, 0, 16);" for i, _ in fields))
        self._coarse("gradient", "0")
        if chosen:
            self.line(f"const int64_t room = capacity(n, {chosen[0][1].part.hex()}); int64_t chosen = 0;")
        self.line("int bad = 0;")
        self._tiles()
        self.line("bad |= ill;")
        self.blocks(
            [last.result, *(node for _, _, node in chosen), *(one.node for _, one in fields if one.over != "chosen")]
        )
        self._coarse("block", f"base / {self.unit}")
        if last.choice is not None:
            self._chosen(last.choice, chosen)
        self._numbers(numbers, last.result)
        self.line("}")
        if chosen:
            self.line("((uint32_t *)msg)[1] = (uint32_t)chosen;")
        for i, one, _ in chosen:  # unused indices
            used = f"at{i} + chosen * {one.bits // 8}"
            self.line(f"memset(msg + {used}, 0, (size_t)({self._after(i)} - ({used})));")

    def _after(self, i: int) -> str:
        return f"at{i + 1}" if i + 1 < len(self.program.fields) else "end"

    def _coarse(self, over: str, place: str) -> None:
        """Write the fields that have one value for every gradient or block."""
        for i, one in enumerate(self.program.fields):
            if one.over == over and one.sent:
                self.line(f"(({type_(one)} *)(msg + at{i}))[{place}] = {word(one, self.name(one.node))};")

    def _numbers(self, numbers: list[tuple[int, Field]], result: Node) -> None:
        """Write the fields that have one value for every number, and the residual, in one loop."""
        # A number rounded at storage need not be rounded before.
        plain = [one.node.args[0] if one.dtype in {"f16", "bf16"} else one.node for _, one in numbers]
        targets = [(self._stored(i, one), node) for (i, one), node in zip(numbers, plain, strict=True)]
        self.line("if (feed) {")
        self.loop([*targets, ("res[base + i] = v[i] - {};", result)])
        self.line("if (ill) for (int64_t i = 0; i < m; i++) if (!good[i]) res[base + i] = old[i];")
        self.line("} else {")
        self.loop(targets)
        self.line("}")
        for i, one in numbers:
            if one.bits < 8:
                self.line(f"pack_{one.bits}(codes{i}, m, msg + at{i} + base * {one.bits} / 8);")

    def _stored(self, i: int, one: Field) -> str:
        if one.bits < 8:
            return f"codes{i}[i] = (uint8_t){{}};"
        return f"(({type_(one)} *)(msg + at{i}))[base + i] = {word(one, '{}')};"

    def _chosen(self, choice: Node, chosen: list[tuple[int, Field, Node]]) -> None:
        if choice.op == "drawn":
            self.line("drawn(keep, base, m, n, room, seed);")
        else:
            self.loop([("keep[i] = (uint8_t){};", choice)])
            self.line("if (ill) for (int64_t i = 0; i < m; i++) keep[i] &= good[i];")
        self.line("const int64_t here = collected(keep, m, room - chosen, places);", "if (here) {")
        for i, one, node in chosen:
            array = "e" if node.kind == "float" else "w"
            self.loop([(f"{array}[i] = {{}};", node)])
            taken = word(one, f"{array}[places[j]]")
            self.line(f"for (int64_t j = 0; j < here; j++) (({type_(one)} *)(msg + at{i}))[chosen + j] = {taken};")
        self.line("chosen += here; }")
