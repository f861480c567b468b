"""Insert calls into bytecode of Python 3.11.

Only 3.11 needs this: later versions have `sys.monitoring`. Existing bytes are not changed, only split where something
is inserted. Only jumps, the exception table and the position table are adjusted. Jumps of 3.11 are all relative, so
that most do not even change.
"""

from __future__ import annotations

import dis
import functools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from types import CodeType

from meshwright.watcher.hooks.points import BACKWARD, JUMPS, Instruction

OP = dis.opmap
_CACHES = getattr(dis, "_inline_cache_entries", ())
_ROW = re.compile(rb"[\x80-\xff][\x00-\x7f]*", re.DOTALL)  # a row of the position table: only its first byte is marked
_LEAST = 6  # stack slots for the deepest insertion: an exception, what it hides, its position, a call


class Added:
    """Code inserted before one instruction: `after` runs only after the previous one, `before` also after a jump."""

    __slots__ = ("after", "before")

    def __init__(self) -> None:
        self.after = self.before = b""

    def __len__(self) -> int:
        return len(self.after) + len(self.before)


def call(constant: int, *loads: tuple[int, int]) -> bytes:
    """Return a call of the function among the constants, with what `loads` (op, arg) push; its result is dropped."""
    pushed = b"".join([_bytes(op, arg) for op, arg in loads])
    return _NULL + _bytes(OP["LOAD_CONST"], constant) + pushed + _called(len(loads))


@functools.cache
def _called(count: int) -> bytes:
    return b"".join(_bytes(OP[name], arg) for name, arg in (("PRECALL", count), ("CALL", count), ("POP_TOP", 0)))


def _bytes(op: int, arg: int) -> bytes:
    caches = bytes(2 * _CACHES[op])
    if arg < 256:
        return bytes((op, arg)) + caches
    extended = [bytes((dis.EXTENDED_ARG, arg >> shift & 0xFF)) for shift in (24, 16, 8) if arg >> shift]
    return b"".join(extended) + bytes((op, arg & 0xFF)) + caches


_NULL = _bytes(OP["PUSH_NULL"], 0)


def unless(error: int, missed: int) -> bytes:
    """Return the handler for an exception of a hook that was itself handling one.

    The stack is [..., exception handled before, the program's exception, the hook's exception]. An error of the kind
    `error`, among the constants, is dropped: the list `missed` gets one more item, and the program's exception goes on.
    Any other (an interrupt) replaces it.
    """
    drop = (
        _all(("POP_TOP", 0), ("LOAD_CONST", missed), ("LOAD_CONST", error), ("LIST_APPEND", 1), ("POP_TOP", 0)) + _AGAIN
    )
    other = _all(("SWAP", 3), ("POP_EXCEPT", 0), ("POP_TOP", 0), ("RERAISE", 1))
    ask = _all(("LOAD_CONST", error), ("CHECK_EXC_MATCH", 0), ("POP_JUMP_FORWARD_IF_TRUE", len(other) // 2))
    return ask + other + drop


def _all(*instructions: tuple[str, int]) -> bytes:
    return b"".join(_bytes(OP[name], arg) for name, arg in instructions)


# The exception continues as it came: restore the one handled before, and raise without a new traceback line. The frame
# keeps the line where the exception came from.
_AGAIN = _all(("SWAP", 2), ("POP_EXCEPT", 0), ("RERAISE", 1))


def put_together(
    code: CodeType,
    body: Sequence[Instruction],
    added: dict[int, Added],
    constants: tuple[object, ...],
    on_raise: bytes,
    otherwise: bytes = b"",
) -> CodeType:
    """Return the code with insertions, keyed by the start of an instruction.

    An exception that leaves the code passes `on_raise`, and `otherwise` if that raises itself.
    """
    jumps = [one for one in body if one.op in JUMPS]
    moved = _Moved(added, jumps)
    old, edges = code.co_code, [*moved.places, len(code.co_code)]
    raw = bytearray(old[: edges[0]])
    for start, stop in pairwise(edges):
        if start in added:
            raw += added[start].after + added[start].before
        raw += bytes(2 * moved.wider.get(start, 0)) + old[start:stop]
    for one in jumps:
        _write_jump(raw, one, moved)
    end = len(raw)
    table = _handlers(code, moved)
    if on_raise:
        raw += _bytes(OP["PUSH_EXC_INFO"], 0) + on_raise + _AGAIN + otherwise
        first = moved.label(next(one.end for one in body if one.op == OP["RESUME"]))
        gaps = _gaps(first, end, sorted((start, stop) for start, stop, *_ in table))
        table += [(start, stop, end, 0, True) for start, stop in gaps]
        called = end + 2 + len(on_raise)
        table += [(end + 2, called, called + len(_AGAIN), 3, False)] if otherwise else []
    return code.replace(
        co_code=bytes(raw),
        co_consts=constants,
        co_stacksize=code.co_stacksize + _LEAST,
        co_exceptiontable=b"".join(_entry(*row) for row in sorted(table)),
        co_linetable=_positions(code.co_linetable, moved, (len(raw) - end) // 2),
    )


class _Moved:
    """Positions of old bytes in the new code; a jump that gets longer may need room for its argument."""

    def __init__(self, added: dict[int, Added], jumps: list[Instruction]) -> None:
        self._after = {start: len(one.after) for start, one in added.items()}
        self.wider: dict[int, int] = {}  # start of a jump -> number of EXTENDED_ARGs before it
        while True:
            self.sizes = {start: len(one) for start, one in added.items()}
            for start, count in self.wider.items():
                self.sizes[start] = self.sizes.get(start, 0) + 2 * count
            self.places = sorted(self.sizes)
            self._sums = [0, *accumulate(self.sizes[start] for start in self.places)]
            before = dict(self.wider)
            for one in jumps:
                more = max(0, self.argument(one).bit_length() - 1) // 8 - (one.at - one.start) // 2
                if more > self.wider.get(one.start, 0):
                    self.wider[one.start] = more
            if before == self.wider:
                return

    def label(self, start: int) -> int:
        """Return the target of a jump to the instruction."""
        return start + self._sums[bisect_left(self.places, start)] + self._after.get(start, 0)

    def own(self, start: int, byte: int) -> int:
        """Return the new position of a byte of the instruction that starts at `start`."""
        return byte + self._sums[bisect_right(self.places, start)]

    def argument(self, one: Instruction) -> int:
        distance = self.label(one.target()) - self.own(one.start, one.end)
        return (-distance if one.op in BACKWARD else distance) // 2


def _write_jump(raw: bytearray, one: Instruction, moved: _Moved) -> None:
    at, arg = moved.own(one.start, one.at), moved.argument(one)
    raw[at + 1] = arg & 0xFF
    for i in range(1, (one.at - one.start) // 2 + moved.wider.get(one.start, 0) + 1):
        raw[at - 2 * i], raw[at - 2 * i + 1] = dis.EXTENDED_ARG, arg >> 8 * i & 0xFF


def _handlers(code: CodeType, moved: _Moved) -> list[tuple[int, int, int, int, bool]]:
    if not code.co_exceptiontable:
        return []
    return [
        (moved.label(entry.start), moved.label(entry.end), moved.label(entry.target), entry.depth, entry.lasti)
        for entry in dis._parse_exception_table(code)  # type: ignore[attr-defined]
    ]


def _gaps(start: int, end: int, covered: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the parts of [start, end) that no (sorted) range covers."""
    for low, high in covered:
        if start < low:
            yield start, low
        start = max(start, high)
    if start < end:
        yield start, end


def _entry(start: int, stop: int, target: int, depth: int, lasti: bool) -> bytes:
    """Return one row of the exception table: numbers of 6-bit digits, highest first; the first byte is marked."""
    raw = bytearray()
    for number in (start // 2, (stop - start) // 2, target // 2, depth << 1 | lasti):
        digits = [number & 63]
        while number := number >> 6:
            digits.append(number & 63 | 64)
        raw += bytes(reversed(digits))
    raw[0] |= 128
    return bytes(raw)


def _positions(table: bytes, moved: _Moved, more: int) -> bytes:
    """Return the position table, whose rows hold for up to 8 code units. Insertions get the line before them."""
    found, at = bytearray(), 0  # in code units of the old code
    passed, copied = 0, 0  # in bytes of the table
    cuts = iter([(start // 2, moved.sizes[start] // 2) for start in moved.places] + [(1 << 60, 0)])
    cut, units = next(cuts)
    for row in _ROW.findall(table):
        end, passed = at + (row[0] & 7) + 1, passed + len(row)
        if cut >= end:
            at = end
            continue
        found += table[copied : passed - len(row)]
        copied = passed
        while cut < end:
            if cut > at:
                found += bytes((row[0] & 0xF8 | cut - at - 1,)) + row[1:]
                row, at = _again(row), cut
            found += _same_line(units)
            cut, units = next(cuts)
        found += bytes((row[0] & 0xF8 | end - at - 1,)) + row[1:]
        at = end
    return bytes(found) + table[copied:] + _same_line(more)


@functools.lru_cache(maxsize=256)
def _same_line(units: int) -> bytes:
    rows = [8] * (units // 8) + [units % 8] * (units % 8 > 0)
    return b"".join(bytes((128 | 13 << 3 | n - 1, 0)) for n in rows)


def _again(row: bytes) -> bytes:
    """Return a row with the same position for what follows, without a step to another line."""
    kind = row[0] >> 3 & 15
    if kind == 14:  # its first number, of 6-bit digits, is the step between lines
        rest = row[1:]
        while rest[0] & 64:
            rest = rest[1:]
        return row[:1] + b"\0" + rest[1:]
    if kind == 13:
        return row[:1] + b"\0"
    return bytes((128 | 10 << 3 | row[0] & 7,)) + row[1:] if kind in (11, 12) else row
