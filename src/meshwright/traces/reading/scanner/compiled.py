"""Scan with scanner.c and the files below it, built on first use."""

from __future__ import annotations

import ctypes
import weakref
from enum import IntEnum
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.base.native import packaged
from meshwright.traces.reading.columns import COUNTS, INNER, OUTER, TABLES, Columns, Scanned, widths_of

WIDTHS = (np.uint8, np.int32, np.int32, np.int32, np.int64, np.int64, np.int64, np.int64)  # of the columns in scanner.c


class Status(IntEnum):
    """Reason why scanning stopped; as in event.c."""

    MORE = 0  # the loaded text is used up
    DONE = 1  # the list has ended
    BAD = 2  # invalid JSON
    NO_MEMORY = 3


class CompiledScanner:
    """Scanner in C; about 500 MB/s on one core."""

    def __init__(self) -> None:
        self._library = _library()
        self._scanner = self._library.begin()
        if not self._scanner:
            raise MemoryError
        # Kept alive: the scanner points into them.
        self._words = [ctypes.create_string_buffer(key.word.encode()) for key in OUTER + INNER]
        for slot, (key, word) in enumerate(zip(OUTER + INNER, self._words, strict=True)):
            self._library.want(self._scanner, word, slot, key.kind, slot >= len(OUTER), key.table)

    def __del__(self) -> None:
        if getattr(self, "_scanner", None):
            self._library.finish(self._scanner)

    def scan(self, data: NDArray[np.uint8], start: int, end: int) -> tuple[int, Status]:
        """Take the complete events in data[start:end], which is zero-padded; return the position and why it stopped."""
        place = self._library.scan(self._scanner, data.ctypes.data, start, end)
        status = Status(self._library.status(self._scanner))
        if status is Status.NO_MEMORY:
            raise MemoryError
        return place, status

    def rows(self) -> int:
        return int(self._library.rows(self._scanner))

    def scanned(self) -> Scanned:
        """Return the columns and hand over their memory: nothing is held twice, and nothing more can be scanned."""
        rows = self.rows()
        columns: list[Any] = [
            self._own(self._library.column(self._scanner, which), rows, width) for which, width in enumerate(WIDTHS)
        ]
        words = self._texts(1)
        pairs = [np.frombuffer(pair, np.int32) for pair in self._texts(2)]
        return Scanned(
            columns=Columns(*columns),
            tables=tuple(self._table(table, kind) for table, kind in enumerate(TABLES)),
            texts=self._texts(0),
            lists=self._texts(3),
            tracks=tuple((words[pid], words[tid]) for pid, tid in pairs),
            counts={what: self._library.counted(self._scanner, which) for which, what in enumerate(COUNTS)},
        )

    def _table(self, table: int, kind: type[Any]) -> tuple[NDArray[Any], ...]:
        rows = self._library.table_rows(self._scanner, table)
        return tuple(
            self._own(self._library.table_column(self._scanner, table, which), rows, width)
            for which, width in enumerate(widths_of(kind))
        )

    def _own(self, address: int | None, count: int, width: Any) -> NDArray[Any]:
        """Return an array over memory of the scanner, freed with it."""
        if not address:
            return np.zeros(0, width)
        memory = (ctypes.c_char * (count * np.dtype(width).itemsize)).from_address(address)
        weakref.finalize(memory, self._library.release, address)
        return np.frombuffer(memory, width)

    def _texts(self, which: int) -> tuple[bytes, ...]:
        count, starts = ctypes.c_int64(), ctypes.c_void_p()
        data = self._library.texts_of(self._scanner, which, ctypes.byref(count), ctypes.byref(starts))
        if not count.value:
            return ()
        places = np.frombuffer(ctypes.string_at(starts.value or 0, 8 * (count.value + 1)), np.int64)
        everything = ctypes.string_at(data, int(places[-1])) if data else b""
        return tuple(everything[a:b] for a, b in pairwise(places.tolist()))


@cache
def _library() -> Any:
    made = packaged("meshwright.traces.reading.scanner._scanner")
    pointer, many, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    for name, result, arguments in (
        ("begin", pointer, []),
        ("want", None, [pointer, ctypes.c_char_p, whole, whole, whole, whole]),
        ("scan", many, [pointer, pointer, many, many]),
        ("status", whole, [pointer]),
        ("rows", many, [pointer]),
        ("column", pointer, [pointer, whole]),
        ("table_column", pointer, [pointer, whole, whole]),
        ("table_rows", many, [pointer, whole]),
        ("release", None, [pointer]),
        ("texts_of", pointer, [pointer, whole, pointer, pointer]),
        ("counted", many, [pointer, whole]),
        ("finish", None, [pointer]),
    ):
        function = getattr(made, name)
        function.restype, function.argtypes = result, arguments
    return made
