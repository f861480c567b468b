"""Generate the C function that decodes one gradient."""

from __future__ import annotations

from meshwright.compression.backends.c.writer import Writer, places, type_
from meshwright.compression.language import Node
from meshwright.compression.program import walk


class Decoder(Writer):
    """Generator of the function that decodes one gradient."""

    def text(self) -> str:
        result = self.program.decoding.result
        assert result is not None
        self.line(
            "INLINE void decode_one(const uint8_t *msg, NUMBER *out, int64_t n, const float *agreed, const int add) {",
            *places(self.program.fields),
            "if (!n) return;",
            "(void)agreed; (void)end;",
        )
        self._fields()
        self._coarse("gradient", "0")
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
            self.line(f"const {type_(one)} *f{i} = (const {type_(one)} *)(msg + at{i}); (void)f{i};")
        parts = [one.part for one in self.program.fields if one.over == "chosen"]
        if parts:
            self.line(
                f"const int64_t chosen = least((int64_t)((const uint32_t *)msg)[1], capacity(n, {parts[0].hex()}));"
            )

    def name(self, node: Node) -> str:
        return self._field(node) if node.op == "field" else super().name(node)

    def _field(self, node: Node) -> str:
        i = next(i for i, one in enumerate(self.program.fields) if one.name == node.name)
        one = self.program.fields[i]
        if one.over in {"gradient", "block"}:
            return f"s{i}"
        return f"u{i}[i]" if one.bits < 8 else self._read(i, "base + i" if one.over == "number" else "i")

    def _read(self, i: int, place: str) -> str:
        one = self.program.fields[i]
        word = f"f{i}[{place}]" if one.sent else "agreed[0]"
        return f"from_{one.dtype}({word})" if one.dtype in {"f16", "bf16"} else word

    def _coarse(self, over: str, place: str) -> None:
        """Read values of a gradient or block before the loops: in memory, they might change when loops write."""
        for i, one in enumerate(self.program.fields):
            if one.over == over:
                self.line(f"const {'float' if 'f' in one.dtype else 'int32_t'} s{i} = {self._read(i, place)};")

    def _scattered(self, spread: Node, base: str, end: str, target: str) -> None:
        """Write chosen values from the i-th on to their indices; a damaged message has indices out of range."""
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
        self._coarse("block", f"base / {self.unit}")
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
