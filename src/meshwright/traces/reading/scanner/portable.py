"""Scan without a compiler: NumPy finds the ends of events, msgspec parses them; the same columns, slower."""

from __future__ import annotations

import re
from array import array
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.traces.reading.columns import (
    COUNTS,
    EVERYWHERE,
    INNER,
    NONE,
    OUTER,
    TABLES,
    Columns,
    Kind,
    Scanned,
    keys_of,
    widths_of,
)
from meshwright.traces.reading.scanner.careful import items, members, said
from meshwright.traces.reading.scanner.compiled import WIDTHS, Status
from meshwright.traces.reading.scanner.splitting import split

COMPLETE, QUOTE, END = ord("X"), ord('"'), ord("]")
LARGEST = int(np.iinfo(np.int64).max)
NUMBER = re.compile(rb'"?(-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"?')


Event = msgspec.defstruct(
    "Event",
    [(f"s{slot}", msgspec.Raw, msgspec.Raw()) for slot in range(len(OUTER))],
    rename={f"s{slot}": key.word for slot, key in enumerate(OUTER)},
    gc=False,
)
_events: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[Event])  # type: ignore[valid-type]
_args = msgspec.json.Decoder(dict[str, msgspec.Raw])
LINK, EXTERNAL = (key.word for key in EVERYWHERE)
IN_TABLES = {key.word: key for key in INNER if key.table >= 0}
KEYS = [keys_of(table).values() for table in TABLES]


class PortableScanner:
    """Scanner with the interface of `CompiledScanner`."""

    def __init__(self) -> None:
        self._columns = [_column(width) for width in WIDTHS]
        self._tables = [[_column(width) for width in widths_of(table)] for table in TABLES]
        self._texts: dict[bytes, int] = {b"": 0}
        self._lists: dict[bytes, int] = {b"": 0}
        self._tracks: dict[tuple[bytes, bytes], int] = {}
        self._counts = dict.fromkeys(COUNTS, 0)

    def scan(self, data: NDArray[np.uint8], start: int, end: int) -> tuple[int, Status]:
        """Take the complete events in data[start:end]; return the position and why it stopped."""
        found = split(data[start:end])
        whole = start + max(found.stop, 0)
        if found.done and data[whole] != END:
            return self._carefully(data, start, end)
        try:
            events = _events.decode(b"[%s]" % data[start:whole].tobytes().strip(b" \t\r\n,"))
        except (msgspec.DecodeError, RecursionError):
            return self._carefully(data, start, end)
        for event in events:
            self._append(event)
        return (whole + 1, Status.DONE) if found.done else self._carefully(data, whole, end)

    def _carefully(self, data: NDArray[np.uint8], start: int, end: int) -> tuple[int, Status]:
        """Take events one by one, if there is something unusual among them, or an incomplete one."""
        found, place, status = items(data[start:end].tobytes())
        for event in found:
            if event is None:
                self._counts["not_objects"] += 1
            else:
                self._append(Event(*(event.get(key.word, b"") for key in OUTER)))
        return start + place, status

    def _append(self, event: Any) -> None:
        ts, dur, phase = number(event.s5, 3), number(event.s6, 3), _phase(event.s0)
        if phase == COMPLETE:
            if ts == NONE:
                self._counts["without_time"] += 1
                return
            self._counts["without_duration"] += dur == NONE
        self._counts["negative"] += NONE < dur < 0
        args = _args_of(bytes(event.s8))
        track = self._tracks.setdefault((bytes(event.s3), bytes(event.s4)), len(self._tracks))
        link = number(args.get(LINK, b""), 0)
        row = (
            phase,
            self._intern(event.s1),
            self._intern(event.s2),
            track,
            ts,
            max(dur, 0),
            number(event.s7, 0) if link == NONE else link,
            number(args.get(EXTERNAL, b""), 0),
        )
        if found := IN_TABLES.keys() & args.keys():
            self._to_tables({key: args[key] for key in found})
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def _to_tables(self, args: dict[str, Any]) -> None:
        values: dict[str, int] = {}
        for word, raw in args.items():
            kind, text = IN_TABLES[word].kind, bytes(raw)
            if kind is Kind.WHOLE:
                values[word] = number(raw, 0)
            elif kind is Kind.LIST and text[:1] in (b"[", b'"'):
                values[word] = self._lists.setdefault(text, len(self._lists))
            elif kind is Kind.TEXT and _is_text(text):
                values[word] = self._intern(raw)
        for table in {IN_TABLES[word].table for word, value in values.items() if value != NONE}:
            row, *columns = self._tables[table]
            row.append(len(self._columns[0]))
            for key, column in zip(KEYS[table], columns, strict=True):
                column.append(values.get(key.word, NONE if key.kind is Kind.WHOLE else 0))

    def _intern(self, raw: Any) -> int:
        text = bytes(raw)
        if not _is_text(text):
            return 0
        return self._texts.setdefault(text[1:-1] if text[0] == QUOTE else text, len(self._texts))

    def rows(self) -> int:
        return len(self._columns[0])

    def scanned(self) -> Scanned:
        columns: list[Any] = [_as_array(column) for column in self._columns]
        tables = (tuple(_as_array(column) for column in table) for table in self._tables)
        texts, lists, tracks = tuple(self._texts), tuple(self._lists), tuple(self._tracks)
        return Scanned(Columns(*columns), tuple(tables), texts, lists, tracks, self._counts)


def _column(width: Any) -> array[int]:
    return array({1: "B", 4: "i", 8: "q"}[np.dtype(width).itemsize])


def _as_array(column: array[int]) -> NDArray[Any]:
    """Return a NumPy array over the same memory."""
    width = np.dtype(column.typecode)
    return np.frombuffer(column, width) if column else np.zeros(0, width)


def _is_text(text: bytes) -> bool:
    """Return True for strings and for whole numbers as written: groups are named in both ways."""
    return text[:1] == b'"' or text.removeprefix(b"-").isdigit()


def _args_of(text: bytes) -> dict[str, Any]:
    if text[:1] != b"{":
        return {}
    try:
        return _args.decode(text)
    except (ValueError, RecursionError):
        return members(text, of_event=False)[0]


def _phase(raw: Any) -> int:
    text = bytes(raw)
    if len(text) == 3:
        return text[1] if text[0] == QUOTE and 33 <= text[1] <= 126 else 0
    if text[:1] != b'"':
        return 0
    letter = said(text[1:-1])
    return ord(letter) if len(letter) == 1 and "!" <= letter <= "~" else 0


def number(raw: Any, power: int) -> int:
    """Return a JSON number, also one in quotes, times 10**power, rounded half away from zero; NONE if it is none.

    >>> number(b"1712195495520870.9265", 3)
    1712195495520870927
    >>> number(b'"1.5e3"', 0), number(b"null", 0) == NONE
    (1500, True)
    """
    text = bytes(raw)
    if not text:
        return NONE
    whole, _, thousandths = text.partition(b".")
    if whole.isdigit() and len(whole) < 16:
        if not thousandths:
            return int(whole) * int(10**power)
        if power == 3 and len(thousandths) == 3 and thousandths.isdigit():
            return int(whole + thousandths)
    found = NUMBER.fullmatch(text)
    if not found:
        return NONE
    exact = Decimal(found[1].decode())
    if exact and not -30 < exact.adjusted() < 30:
        return NONE if exact.adjusted() > 0 else 0
    value = int(exact.scaleb(power).to_integral_value(ROUND_HALF_UP))
    return value if abs(value) <= LARGEST else NONE
