"""The C function that encodes one gradient, pass after pass."""

from __future__ import annotations

from meshwright.compress.c_writer import C_TYPES, Writer, places, type_, word
from meshwright.compress.language import REDUCTIONS, Node
from meshwright.compress.program import ENOUGH, ROUNDS, RUN, SMALLEST, Field, Pass, depth, is_barrier, untaken, walk


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
            *places(program.fields),
            "if (!n) { *agreed = 0; if (mode != 1) memset(msg, 0, (size_t)end); return; }",
            "int zero = mode == 2 ? *was_bad : 0;",
        )
        late = _sees_part(program.encoding[0])
        if late:
            self.line("if (feed && mode != 2) zero = any_bad(flat, res, n); /* the last pass changes the residual */")
        scalars = self._scalars()
        for node in scalars:
            self.line(f"{C_TYPES[node.kind]} {self.name(node)} = 0;")
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
                self.line(f"{self.name(node)} = ({C_TYPES[node.kind]})a_{self.name(node)};")
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
                self.line(f"(({type_(one)} *)(msg + at{i}))[0] = {word(one, self.name(one.node))};")
        assert last.result is not None
        if chosen:
            self.line(f"const int64_t all = capacity(n, {chosen[0][1].part.hex()}); int64_t chosen = 0;")
        self._tiles()
        roots = [one.node for _, one in numbers] + [one.node for one in last.fields if one.over == "block"]
        roots += [last.result, *(node for _, _, node in chosen), *([last.choice] if last.choice is not None else [])]
        self.blocks(roots)
        for i, one in enumerate(last.fields):
            if one.over == "block":
                self.line(f"(({type_(one)} *)(msg + at{i}))[base / {self.unit}] = {word(one, self.name(one.node))};")
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
        return f"(({type_(one)} *)(msg + at{i}))[base + i] = {word(one, '{}')};"

    def _chosen(self, choice: Node, chosen: list[tuple[int, Field, Node]]) -> None:
        self.loop([("keep[i] = (uint8_t){};", choice)])
        self.line("const int64_t here = collected(keep, m, all - chosen, places);", "if (here) {")
        for i, one, node in chosen:
            array = "e" if node.kind == "float" else "w"
            self.loop([(f"{array}[i] = {{}};", node)])
            taken = word(one, f"{array}[places[j]]")
            self.line(f"for (int64_t j = 0; j < here; j++) (({type_(one)} *)(msg + at{i}))[chosen + j] = {taken};")
        self.line("chosen += here; }")


def _sees_part(first: Pass) -> bool:
    """Whether a bad number may be met only by the last pass."""
    return not any(node.op in REDUCTIONS or (node.op == "threshold" and node.every == 1) for node in first.reductions)
