"""Bytecode of Python 3.11 taken apart and put together again with calls in between.

Only 3.11 comes here: later versions have `sys.monitoring`. Jumps of 3.11 are all relative, so that an instruction's new
place follows from the sizes of those before it; the tables of exceptions and positions are written anew.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType

OP = dis.opmap
_CACHES: dict[int, int] = {
    op: n for op, n in enumerate(getattr(dis, "_inline_cache_entries", ())) if isinstance(n, int) and n
}
_BACKWARD = {op for name, op in OP.items() if "JUMP_BACKWARD" in name}
_JUMPS = set(dis.hasjrel)
Position = tuple[int | None, int | None, int | None, int | None]  # line, last line, column, last column


@dataclass(slots=True)
class Instruction:
    op: int
    arg: int = 0
    start: int = -1  # byte in the old code, of its first EXTENDED_ARG; -1 for what was added
    target: int = -1  # byte in the old code that a jump leads to
    position: Position = (None, None, None, None)
    before: list[Instruction] = field(default_factory=list)  # also run when something jumps here
    after: list[Instruction] = field(default_factory=list)  # run only after this one


def take_apart(code: CodeType) -> list[Instruction]:
    raw, positions = code.co_code, list(code.co_positions())
    found, extended, start, at = [], 0, 0, 0
    while at < len(raw):
        op, arg = raw[at], raw[at + 1] | extended << 8
        if op == dis.EXTENDED_ARG:
            extended, at = arg, at + 2
            continue
        target = at + 2 + 2 * (-arg if op in _BACKWARD else arg) if op in _JUMPS else -1
        found.append(Instruction(op, arg, start, target, positions[at // 2]))
        at += 2 + 2 * _CACHES.get(op, 0)
        extended, start = 0, at
    return found


def call(constant: int, *loads: tuple[int, int]) -> list[Instruction]:
    """Call the function among the constants with what `loads` (op, arg) push, and forget what it returns."""
    n = len(loads)
    return [
        Instruction(OP["PUSH_NULL"]),
        Instruction(OP["LOAD_CONST"], constant),
        *(Instruction(op, arg) for op, arg in loads),
        Instruction(OP["PRECALL"], n),
        Instruction(OP["CALL"], n),
        Instruction(OP["POP_TOP"]),
    ]


def put_together(
    code: CodeType, body: list[Instruction], constants: tuple[object, ...], on_raise: list[Instruction]
) -> CodeType:
    """The code with what was added; what leaves it as an exception passes `on_raise` first."""
    flat: list[Instruction] = []
    label: dict[int, int] = {}  # byte in the old code -> number of the instruction
    first = 0
    for one in body:
        label[one.start] = len(flat)
        for extra in (*one.before, one, *one.after):
            flat.append(extra)
            if extra is not one:
                extra.position = (one.position[0], one.position[0], None, None)
        if one.op == OP["RESUME"] and one.arg == 0:
            first = len(flat) - len(one.after)
    end = label[len(code.co_code)] = len(flat)
    if on_raise:
        flat += [Instruction(OP["PUSH_EXC_INFO"]), *on_raise]
        # the exception goes on as it came: restore what was handled before, and raise without a new traceback line
        flat += [Instruction(OP["SWAP"], 2), Instruction(OP["POP_EXCEPT"]), Instruction(OP["RERAISE"], 0)]
    places = _places(flat, label)
    table = [
        (places[label[entry.start]], places[label[entry.end]], places[label[entry.target]], entry.depth, entry.lasti)
        for entry in dis._parse_exception_table(code)  # type: ignore[attr-defined]
    ]
    if on_raise:
        gaps = _gaps(places[first], places[end], sorted((start, stop) for start, stop, *_ in table))
        table += [(start, stop, places[end], 0, False) for start, stop in gaps]
    return code.replace(
        co_code=_bytes(flat, places),
        co_consts=constants,
        co_stacksize=code.co_stacksize + 6,  # deepest of what is added: the handler's exception, what it hides, a call
        co_exceptiontable=b"".join(_entry(*row) for row in sorted(table)),
        co_linetable=_lines(code.co_firstlineno, flat, places),
    )


def _places(flat: list[Instruction], label: dict[int, int]) -> list[int]:
    """Byte of every instruction (and of the end); arguments of jumps are set. Grows until nothing has to move."""
    sizes = [_size(one.op, 0 if one.target >= 0 else one.arg) for one in flat]
    while True:
        places = [0]
        for size in sizes:
            places.append(places[-1] + size)
        moved = False
        for i, one in enumerate(flat):
            if one.target >= 0:
                distance = places[label[one.target]] - places[i + 1]  # jumps have no caches in 3.11
                one.arg = abs(distance) // 2
                size = max(sizes[i], _size(one.op, one.arg))
                moved, sizes[i] = moved or size != sizes[i], size
        if not moved:
            return places


def _size(op: int, arg: int) -> int:
    return 2 * (1 + (arg > 0xFF) + (arg > 0xFFFF) + (arg > 0xFFFFFF) + _CACHES.get(op, 0))


def _bytes(flat: list[Instruction], places: list[int]) -> bytes:
    raw = bytearray()
    for i, one in enumerate(flat):
        caches = _CACHES.get(one.op, 0)
        extra = (places[i + 1] - places[i]) // 2 - 1 - caches
        for shift in range(extra, 0, -1):
            raw += bytes((dis.EXTENDED_ARG, one.arg >> 8 * shift & 0xFF))
        raw.append(one.op)
        raw.append(one.arg & 0xFF)
        if caches:
            raw += bytes(2 * caches)
    return bytes(raw)


def _gaps(start: int, end: int, covered: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Parts of [start, end) that no (sorted) range covers."""
    for low, high in covered:
        if start < low:
            yield start, low
        start = max(start, high)
    if start < end:
        yield start, end


def _entry(start: int, stop: int, target: int, depth: int, lasti: bool) -> bytes:
    """One row of the table of exceptions: numbers of 6-bit digits, the highest first; the first byte is marked."""
    raw = bytearray()
    for number in (start // 2, (stop - start) // 2, target // 2, depth << 1 | lasti):
        digits = [number & 63]
        while number := number >> 6:
            digits.append(number & 63 | 64)
        raw += bytes(reversed(digits))
    raw[0] |= 128
    return bytes(raw)


def _lines(line: int, flat: list[Instruction], places: list[int]) -> bytes:
    """The table of positions: rows of up to 8 code units; numbers of 6-bit digits, the lowest first."""
    raw = bytearray()
    i = 0
    while i < len(flat):
        one, j = flat[i], i + 1
        while j < len(flat) and flat[j].position == one.position:
            j += 1
        units, i = (places[j] - places[i]) // 2, j
        now, last, column, until = one.position
        while units > 0:
            here, units = min(units, 8), units - 8
            if now is None:
                raw.append(128 | 15 << 3 | here - 1)
                continue
            step, line = now - line, now
            signed = -step << 1 | 1 if step < 0 else step << 1
            whole = last is not None and column is not None and until is not None
            raw.append(128 | (14 if whole else 13) << 3 | here - 1)
            raw += _digits([signed, (last or 0) - now, (column or 0) + 1, (until or 0) + 1] if whole else [signed])
    return bytes(raw)


def _digits(numbers: Iterable[int]) -> bytes:
    raw = bytearray()
    for number in numbers:
        while number >= 64:
            raw.append(number & 63 | 64)
            number >>= 6
        raw.append(number)
    return bytes(raw)
