"""Points in a code object at which to look: after lines that can change something, found once, from the bytecode.

Most lines cannot change an attribute, and a line that only stores `self.x` changes no other. So a watched call pays
only for the lines that matter. Other changes (a property that writes when read, an operator with side effects, another
thread) are found by the next look, at the latest when the call ends.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType
from typing import Any, NamedTuple


def _ops(names: Iterable[str]) -> frozenset[int]:
    return frozenset(dis.opmap[name] for name in names if name in dis.opmap)


JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
BACKWARD = _ops(name for name in dis.opmap if "BACKWARD" in name)
_ENDS = _ops(("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"))  # nothing follows them,
_LEADS_AWAY = BACKWARD | _ops(("JUMP_FORWARD",))  # nor these
_ANYTHING = _ops(
    ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR", "BINARY_SUBSCR", "FOR_ITER",
     "BINARY_SLICE", "BEFORE_WITH", "BEFORE_ASYNC_WITH", "LOAD_SPECIAL", "WITH_EXCEPT_START", "SEND", "IMPORT_NAME")
)  # fmt: skip
_ATTRIBUTE = _ops(("STORE_ATTR", "DELETE_ATTR"))
_LOCAL = _ops(("STORE_FAST", "DELETE_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST"))
_CELL = _ops(("STORE_DEREF", "DELETE_DEREF"))
_GLOBAL = _ops(("STORE_GLOBAL", "DELETE_GLOBAL"))
_VARIABLE = _LOCAL | _CELL | _GLOBAL
_MATTERS = _ATTRIBUTE | _VARIABLE | _ANYTHING
_LOADS_LAST = _ops(("LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "STORE_FAST_LOAD_FAST"))
_LOADS = _ops(("LOAD_FAST", "LOAD_FAST_BORROW"))
_IN_PLACE = frozenset(i for i, (_, text) in enumerate(getattr(dis, "_nb_ops", ())) if text.endswith("="))
_BINARY, _COPY, _SWAP = dis.opmap["BINARY_OP"], dis.opmap["COPY"], dis.opmap["SWAP"]
_LOAD_ATTR, _PUSH_EXC_INFO, _RERAISE = dis.opmap["LOAD_ATTR"], dis.opmap["PUSH_EXC_INFO"], dis.opmap["RERAISE"]
Holds = Callable[[str], bool]


class Instruction(NamedTuple):
    start: int  # byte of its first EXTENDED_ARG, or its own
    at: int  # byte
    end: int  # byte after its caches
    op: int
    arg: int

    def target(self) -> int:
        """Return the byte that a jump leads to."""
        return self.end + 2 * (-self.arg if self.op in BACKWARD else self.arg)


class Point(NamedTuple):
    """Point before an instruction, at which values may differ from those before `line`."""

    line: int | None  # None: the line that raised the exception being handled
    stored: tuple[str, ...]  # attributes of the first argument that it stores or deletes
    frame: bool  # followed local or global variables are stored
    whole: bool  # anything may have changed

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a plain tuple: watched code may be loaded where meshwright is missing."""
        return tuple, (tuple(self),)


@dataclass(frozen=True, slots=True)
class Points:
    at: dict[int, Point]  # by the `start` of the instruction
    frames: bool  # True if local or global variables can change at all


def decode(code: CodeType) -> tuple[Instruction, ...]:
    """Decode the instructions, each with its EXTENDED_ARGs and caches.

    >>> [dis.opname[one.op] for one in decode((lambda: None).__code__)][0]
    'RESUME'
    """
    return _decoded(code.co_code)


@functools.lru_cache(maxsize=4)  # the search for points and the insertion of calls ask for the same code
def _decoded(raw: bytes) -> tuple[Instruction, ...]:
    extended, start, found = 0, -1, list[Instruction]()
    ops, args = raw[::2] + b"\xff", raw[1::2]
    i, count, make = 0, len(args), tuple.__new__
    while i < count:
        op, arg, at = ops[i], args[i] | extended, 2 * i
        i += 1
        if op == dis.EXTENDED_ARG:
            extended, start = arg << 8, at if start < 0 else start
            continue
        while not ops[i]:  # a cache
            i += 1
        found.append(make(Instruction, (at if start < 0 else start, at, 2 * i, op, arg)))
        extended, start = 0, -1
    return tuple(found)


def points_of(
    code: CodeType, body: Sequence[Instruction], *, attributes: Holds, names: Holds, globals_: Holds
) -> Points:  # fmt: skip
    """Return the points at which to look for followed names."""
    effects = _Effects(code, body, attributes, names, globals_)
    found: dict[int, Point] = {}
    frames, i = False, 0
    for end, line in _runs(code):
        first = i
        while i < len(body) and body[i].at < end:
            i += 1
        if i > first:
            frames |= _points_of_run(body, first, i, line, effects, found)
    for before, one in pairwise(body if code.co_exceptiontable else ()):
        if before.op == _PUSH_EXC_INFO:
            found[one.start] = Point(None, (), frame=True, whole=True)
            frames = True
    return Points(found, frames)


def _runs(code: CodeType) -> Iterator[tuple[int, int]]:
    """Yield (byte after the last, line) of runs on one line; instructions without a line belong to the run before."""
    last, line = 0, code.co_firstlineno
    for start, end, here in code.co_lines():
        if here is not None and here != line:
            yield start, line
            line = here
        last = end
    yield last, line


def _points_of_run(
    body: Sequence[Instruction], first: int, end: int, line: int, effects: _Effects, found: dict[int, Point]
) -> bool:
    """Find the points of one line, before each of its exits; return True if variables may change after it."""
    stored: list[str] = []
    frame, whole, inner, ever = False, False, False, False
    for i in range(first, end):
        one = body[i]
        if one.op in JUMPS or one.op == _RERAISE:  # the latter leaves a `finally`: the exception is of another line
            if one.op in JUMPS and body[first].start <= one.target() <= body[end - 1].start:
                inner = True
            elif stored or frame or whole:
                found[one.start] = Point(line, tuple(dict.fromkeys(stored)), frame, whole)
                ever |= frame or whole
                if not inner:  # every exit has passed that point
                    stored, frame, whole = [], False, False
        if one.op not in _MATTERS:
            continue
        name, in_frame, anything = effects.of(body, i, first)
        stored += [name] if name else []
        frame, whole = frame or in_frame, whole or anything
    last = body[end - 1].op
    if (stored or frame or whole) and end < len(body) and last not in _ENDS and last not in _LEADS_AWAY:
        found[body[end].start] = Point(line, tuple(dict.fromkeys(stored)), frame, whole)
    return ever or frame or whole


class _Effects:
    """Effects of single instructions on followed names."""

    def __init__(
        self, code: CodeType, body: Sequence[Instruction], attributes: Holds, names: Holds, globals_: Holds
    ) -> None:
        self._code, self._attributes, self._names, self._globals = code, attributes, names, globals_
        moved = any(one.op in _LOCAL and 0 in _places(one) for one in body)
        self._first = code.co_argcount > 0 and not moved and code.co_varnames[0] not in code.co_cellvars

    def of(self, body: Sequence[Instruction], i: int, first: int) -> tuple[str, bool, bool]:
        """Return (attribute of the first argument that it stores, True if it stores a variable, True if all may change)"""
        one = body[i]
        if one.op in _ATTRIBUTE:
            if not self._first or not _of_first(body, i, first):
                return "", False, True  # of an object that may be the same
            name = self._code.co_names[one.arg]
            return name if self._attributes(name) else "", False, False
        if one.op in _VARIABLE:
            # x += 1: an attribute may hold the object x too
            return "", self._variable(one), one.op in _LOCAL and i > first and _in_place(body[i - 1])
        return "", False, one.op in _ANYTHING

    def _variable(self, one: Instruction) -> bool:
        """Return True if it stores or deletes a followed variable."""
        if one.op in _LOCAL:
            return any(self._names(self._code.co_varnames[i]) for i in _places(one))
        if one.op in _CELL:
            return any(map(self._names, (*self._code.co_cellvars, *self._code.co_freevars)))  # one of these
        return self._globals(self._code.co_names[one.arg])


def _places(one: Instruction) -> tuple[int, ...]:
    """Return the numbers of the local variables that it stores."""
    name = dis.opname[one.op]
    if name == "STORE_FAST_STORE_FAST":
        return one.arg >> 4, one.arg & 15
    return (one.arg >> 4,) if name == "STORE_FAST_LOAD_FAST" else (one.arg,)


def _of_first(body: Sequence[Instruction], i: int, first: int) -> bool:
    if i > first and _loads_first(body[i - 1]):
        return True
    if i < first + 5 or body[i - 1].op != _SWAP or not _in_place(body[i - 2]):
        return False
    for j in range(i - 3, first + 1, -1):  # self.x += ...: self is loaded once, and copied
        if body[j].op == _LOAD_ATTR and body[j - 1].op == _COPY:
            return _loads_first(body[j - 2])
    return False


def _loads_first(one: Instruction) -> bool:
    """Return True if the first argument is on top of the stack after it."""
    return (one.op in _LOADS and one.arg == 0) or (one.op in _LOADS_LAST and one.arg & 15 == 0)


def _in_place(one: Instruction) -> bool:
    return one.op == _BINARY and one.arg in _IN_PLACE
