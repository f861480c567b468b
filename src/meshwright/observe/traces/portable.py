"""Scanning without a compiler: NumPy finds where events end, msgspec takes them apart; the same columns, slower."""

from __future__ import annotations

import json
import re
from array import array
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.observe.traces.columns import (
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
)
from meshwright.observe.traces.compiled import WIDTHS, Status
from meshwright.observe.traces.splitting import split

COMPLETE, QUOTE = ord("X"), ord('"')
LARGEST = int(np.iinfo(np.int64).max)
NUMBER = re.compile(rb'"?(-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"?')
# Strings, and what some writers print for numbers that are none.
DOUBTFUL = re.compile(rb'"(?:[^"\\]|\\.)*"|(?<=[:,\[\s])[-+]?(?:inf|nan|infinity)(?=[\s,}\]])', re.I | re.S)
UNKNOWN_ESCAPE = re.compile(rb'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})(?=.)|(\\.)', re.S)


Event = msgspec.defstruct(
    "Event",
    [(f"s{slot}", msgspec.Raw, msgspec.Raw()) for slot in range(len(OUTER))],
    rename={f"s{slot}": key.word for slot, key in enumerate(OUTER)},
    gc=False,
)
_events: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[Event])  # type: ignore[valid-type]
_event: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Event)
_args = msgspec.json.Decoder(dict[str, msgspec.Raw])
LINK, EXTERNAL = (key.word for key in EVERYWHERE)
IN_TABLES = {key.word: key for key in INNER if key.table >= 0}
KEYS = [keys_of(table).values() for table in TABLES]


class PortableScanner:
    """Takes events from text, as `CompiledScanner` does."""

    def __init__(self) -> None:
        self._wants_comma = False
        self._columns = [array({1: "B", 4: "i", 8: "q"}[np.dtype(width).itemsize]) for width in WIDTHS]
        self._tables = [array("q") for _ in TABLES]
        self._texts: dict[bytes, int] = {b"": 0}
        self._lists: dict[bytes, int] = {b"": 0}
        self._tracks: dict[tuple[bytes, bytes], int] = {}
        self._counts = dict.fromkeys(COUNTS, 0)

    def scan(self, data: NDArray[np.uint8], start: int, end: int) -> tuple[int, Status]:
        """Take the whole events in data[start:end]; where it came to, and why it stopped."""
        found = split(data[start:end])
        if found.stop < 0:
            return start, Status.MORE
        text = data[start : start + found.stop].tobytes()
        whole = text.strip(b" \t\r\n")
        whole = whole[1:] if self._wants_comma and whole.startswith(b",") else whole
        try:
            events = _events.decode(b"[%s]" % whole.removesuffix(b","))
        except msgspec.DecodeError:
            bad = self._one_by_one(text, found.spans)
            if bad >= 0:
                return start + bad, Status.BAD
        else:
            for event in events:
                self._append(event)
        self._wants_comma = True
        return start + found.stop + found.done, Status.DONE if found.done else Status.MORE

    def _one_by_one(self, text: bytes, spans: NDArray[np.int64]) -> int:
        """Take events with something unusual among them; the place of what is no JSON, -1 where all is."""
        last = 0
        for first, after in [*spans.tolist(), (len(text), len(text))]:
            between = text[last:first].strip(b" \t\r\n,")
            try:
                self._counts["not_objects"] += len(json.loads(b"[%s]" % between))
                if text[first:after].startswith(b"{"):
                    self._append(_lenient(text[first:after]))
                elif first < after:
                    self._counts["not_objects"] += 1
            except ValueError:  # also msgspec's
                return last if between else first
            last = after
        return -1

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
            self._tables[table].append(len(self._columns[0]))
            self._tables[table].extend(
                values.get(key.word, NONE if key.kind is Kind.WHOLE else 0) for key in KEYS[table]
            )

    def _intern(self, raw: Any) -> int:
        text = bytes(raw)
        if not _is_text(text):
            return 0
        return self._texts.setdefault(text[1:-1] if text[0] == QUOTE else text, len(self._texts))

    def rows(self) -> int:
        return len(self._columns[0])

    def scanned(self) -> Scanned:
        columns: list[Any] = [np.array(column, width) for column, width in zip(self._columns, WIDTHS, strict=True)]
        tables = (
            np.array(data, np.int64).reshape(-1, len(kind.__dataclass_fields__))
            for data, kind in zip(self._tables, TABLES, strict=True)
        )
        texts, lists, tracks = tuple(self._texts), tuple(self._lists), tuple(self._tracks)
        return Scanned(Columns(*columns), tuple(tables), texts, lists, tracks, self._counts)


def _is_text(text: bytes) -> bool:
    """Strings are, and whole numbers as they are written: groups are named so or so."""
    return text[:1] == b'"' or text.removeprefix(b"-").isdigit()


def _args_of(text: bytes) -> dict[str, Any]:
    if text[:1] != b"{":
        return {}
    try:
        return _args.decode(text)
    except ValueError:  # a key that is no UTF-8
        return _args.decode(_repaired(text))


def _lenient(text: bytes) -> Any:
    """An event in which something is no JSON that can be told what it means."""
    try:
        return _event.decode(text)
    except msgspec.DecodeError:
        return _event.decode(_repaired(text))


def _repaired(text: bytes) -> bytes:
    r"""JSON whose numbers may be `inf`, and whose strings may hold control characters, unknown escapes and other bytes.

    >>> print(_repaired(rb'{"a": -nan, "b": "nan\q"}').decode())
    {"a": null, "b": "nan\\q"}
    """

    def one(found: re.Match[bytes]) -> bytes:
        if found[0][:1] != b'"':
            return b"null"
        known = UNKNOWN_ESCAPE.sub(lambda escape: escape[1] or rb"\\", found[0])
        return b"".join(b"\\u%04x" % byte if byte < 32 else bytes([byte]) for byte in known)

    return DOUBTFUL.sub(one, text.decode("utf-8", "replace").encode())


def _phase(raw: Any) -> int:
    text = bytes(raw)
    if len(text) == 3:
        return text[1] if text[0] == QUOTE and 33 <= text[1] <= 126 else 0
    if text[:1] != b'"':
        return 0
    letter = (
        json.loads(text.decode("utf-8", "replace"), strict=False) if b"\\" in text else text[1:-1].decode("latin-1")
    )
    return ord(letter) if len(letter) == 1 and "!" <= letter <= "~" else 0


def number(raw: Any, power: int) -> int:
    """A JSON number, also one in quotes, times ten to the power, rounded half away from zero; NONE where it is none.

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
