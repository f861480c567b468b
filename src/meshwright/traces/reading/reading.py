"""Read a trace file: the document's keys one by one, its events with a scanner."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.base.native import BuildError
from meshwright.errors import InputError, shorten
from meshwright.traces.reading.building import build
from meshwright.traces.reading.columns import OUTER, Scanned
from meshwright.traces.reading.files import TextFile
from meshwright.traces.reading.scanner.compiled import CompiledScanner, Status
from meshwright.traces.reading.trace import Note, Trace

# The loaded part of a text: unused bytes move to the front, and more is read behind them.


CHUNK = 2 << 20  # bytes: bounds the memory for text, except for a single larger event
PADDING = 64  # zero bytes behind the text: scanners look at 16 bytes at once and stop at a zero


class Source(Protocol):
    def readinto(self, room: memoryview, /) -> int:
        """Fill `room` with the next text; return the number of bytes, 0 at the end."""
        ...


class Window:
    """Window of a text: `data[start:end]` is loaded; `offset` is the position of `data[0]` in the text.

    >>> import io
    >>> window = Window(io.BytesIO(b"abcdef"), chunk=4)
    >>> window.more(), bytes(window.text())
    (True, b'abcd')
    >>> window.start += 3
    >>> window.more(), bytes(window.text()), window.offset
    (True, b'def', 3)
    """

    def __init__(self, source: Source, chunk: int = CHUNK) -> None:
        self._source, self._chunk = source, chunk
        self.data: NDArray[np.uint8] = np.zeros(chunk + PADDING, np.uint8)
        self.start = self.end = self.offset = 0

    def text(self) -> memoryview:
        return self.data.data[self.start : self.end]

    def more(self) -> bool:
        """Load more text; return False at the end."""
        left = self.end - self.start
        if 2 * left > len(self.data) - PADDING:  # one value fills the window: enlarge it
            data = np.zeros(2 * len(self.data), np.uint8)
            data[:left] = self.data[self.start : self.end]
            self.data = data
        else:
            self.data[:left] = self.data[self.start : self.end].copy()
        self.offset += self.start
        self.start, self.end = 0, left
        last = len(self.data) - PADDING
        while self.end < last and (came := self._source.readinto(self.data.data[self.end : last])):
            self.end += came
        self.data[self.end : self.end + PADDING] = 0
        return self.end > left


LARGEST_VALUE = 64 << 20  # bytes of one value beside the events; groups of 10,000 ranks need a few MB
BLANKS = b" \t\r\n"
# The beginning of an event, as far as it can be found from inside another one: an object with one of an event's keys.
EVENT = re.compile(rb'\{[ \t\r\n]*"(?:%s)"[ \t\r\n]*:' % b"|".join(key.word.encode() for key in OUTER))
OVERLAP = 4096  # bytes that are searched again with the next piece of text, for an event's beginning that was cut
VALID = "JSON as torch.profiler exports it, plain, .gz or .zst"


class Scanner(Protocol):
    """Scanner that takes events from text."""

    def scan(self, data: NDArray[np.uint8], start: int, end: int) -> tuple[int, Status]: ...
    def scanned(self) -> Scanned: ...
    def rows(self) -> int: ...


class Ended(Exception):
    """Error: the text ended, or stopped being JSON, before the document was complete."""


def read_trace(path: str | Path, *, scanner: Scanner | None = None, chunk: int = CHUNK) -> Trace:
    """Read the trace in a file; if the file is truncated, the rest of it with a note.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix="_rank3.json") as file:
    ...     _ = file.write('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.5, "dur": 2}, {"ph"')
    ...     file.flush()
    ...     trace = read_trace(file.name)
    >>> trace.rank, len(trace.events), int(trace.events.ts[0]), trace.texts[trace.events.name[0]]
    (3, 1, 1500, 'gemm')
    >>> print(trace.notes[0])
    left out: what follows byte 84, where the text ends in the middle
    """
    scanner = scanner or best_scanner()
    with TextFile(Path(path)) as file:
        document = Document(Window(file, chunk), scanner)
        try:
            document.read()
        except InputError as error:
            raise (InputError(f"{error.problem}; {file.broken}", valid=error.valid) if file.broken else error).at(
                file=str(path)
            ) from None
        notes = document.notes()
        if file.broken:
            notes.insert(0, Note(file.broken))
    return build(str(path), document.header, scanner.scanned(), notes, document.size())


def best_scanner() -> Scanner:
    """Return the compiled scanner, or the portable one where the package was built without a compiler."""
    try:
        return CompiledScanner()
    except BuildError as error:
        warnings.warn(f"traces are read without compiled code, which is slower: {error}", stacklevel=2)
    from meshwright.traces.reading.scanner.portable import PortableScanner  # msgspec only where it is needed

    return PortableScanner()


class Document:
    """Document being read: `header` fills with its keys, events go to the scanner."""

    def __init__(self, window: Window, scanner: Scanner) -> None:
        self._window, self._scanner = window, scanner
        self.header: dict[str, Any] = {}
        self._has_events = False
        self.ended = ""  # why the document is incomplete, or ""
        self._stopped = -1  # the byte of its cause
        self.skipped, self.first_skipped = (
            0,
            -1,
        )  # reasons for leaving events out: count, and first byte

    def place(self) -> int:
        """Return the byte up to which the text was used."""
        return self._window.offset + self._window.start if self._stopped < 0 else self._stopped

    def notes(self) -> list[Note]:
        """Return notes on text that was left out."""
        found = []
        if self.skipped:
            which = "no JSON or does not end," + " for the first time" * (self.skipped > 1)
            found.append(
                Note(f"left out: what is {which} at byte {self.first_skipped}, up to the next event", self.skipped)
            )
        if self.ended:
            found.append(Note(f"left out: what follows byte {self.place()}, where {self.ended}"))
        return found

    def size(self) -> int:
        return self._window.offset + self._window.end

    def read(self) -> None:
        is_list = self._first() == b"["
        try:
            if is_list:
                self._list()
            else:
                self._members()
        except Ended as end:
            self.ended = str(end)
        if not self._has_events:
            why = f": {self.ended} at byte {self.place()}" if self.ended else ""
            raise InputError(f"has no traceEvents{why}", valid=VALID)
        if is_list and not self._scanner.rows():
            raise InputError("is a list, but has no events", valid=VALID)
        if not self.ended and self._next():
            self.ended = "the document is complete"

    def _first(self) -> bytes:
        """Read the bracket that the document begins with."""
        window = self._window
        window.more()
        begin = bytes(window.text()[:64])
        if not begin:
            raise InputError("is empty", valid=VALID)
        if begin[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in begin[:4]:
            raise InputError("is UTF-16 or UTF-32, or no text at all", valid="UTF-8")
        window.start += 3 * begin.startswith(b"\xef\xbb\xbf")
        first = self._next()
        if first not in (b"{", b"["):
            shown = shorten(begin.decode("utf-8", "replace"), 20)
            raise InputError(f"is no JSON object or list: begins with '{shown}'" if first else "is blank", valid=VALID)
        window.start += 1
        return first

    def _members(self) -> None:
        """Read every key of the document, and the bracket that ends it."""
        while (sign := self._next()) != b"}":
            if sign == b",":
                self._window.start += 1
                continue
            if sign != b'"':
                raise Ended("the text ends in the middle" if not sign else "it is no JSON")
            key = self._value()
            if self._next() != b":":
                raise Ended("it is no JSON" if self._next() else "the text ends in the middle")
            self._window.start += 1
            if self._next() == b"[" and key == "traceEvents":
                self._window.start += 1
                self._list()
            else:
                self.header[key] = self._value()
        self._window.start += 1

    def _list(self) -> None:
        """Read events, up to the end of their list."""
        window = self._window
        self._has_events = True
        while True:
            window.start, status = self._scanner.scan(window.data, window.start, window.end)
            if status is Status.DONE:
                return
            bad = status is Status.BAD or window.end - window.start > LARGEST_VALUE
            if bad or not window.more():
                self._skip("it is no JSON" if bad else "the text ends in the middle")

    def _skip(self, why: str) -> None:
        """Skip to the next event, if there is one."""
        window, bad = self._window, self.place()
        while True:
            text = window.text()
            for found in EVENT.finditer(text, 1):
                before = bytes(text[max(0, found.start() - OVERLAP) : found.start()]).rstrip(BLANKS)
                if before.endswith((b",", b"}")):  # otherwise it is a value, or the first in a list of values
                    window.start += found.start()
                    self.first_skipped = bad if self.first_skipped < 0 else self.first_skipped
                    self.skipped += 1
                    return
            window.start = max(window.start, window.end - OVERLAP)
            if not window.more():
                self._stopped = bad
                raise Ended(why)

    def _next(self) -> bytes:
        """Return the next character that is not blank, without consuming it; empty at the end."""
        window = self._window
        while True:
            for place in range(window.start, window.end):
                if window.data[place] not in BLANKS:
                    window.start = place
                    return bytes([window.data[place]])
            window.start = window.end
            if not window.more():
                return b""

    def _value(self) -> Any:
        """Read the next JSON value."""
        window, width = self._window, 4096
        while True:
            text = bytes(window.text()[:width])
            try:  # one byte is one character here: only the end matters
                _, stop = json.JSONDecoder(strict=False).raw_decode(text.decode("latin-1"))
            except (ValueError, RecursionError):
                stop = len(text)
            if stop < len(text):
                window.start += stop
                return json.loads(text[:stop].decode("utf-8", "replace"), strict=False)
            if width > LARGEST_VALUE or (width > len(window.text()) and not window.more()):
                raise Ended("a value does not end")
            width *= 8
