"""Traces read from text in memory, and the same by json.loads: what tests hold against each other."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from meshwright.traces.reading.building import build
from meshwright.traces.reading.categories import category
from meshwright.traces.reading.columns import NAMES, NONE, TABLES, Kind, keys_of
from meshwright.traces.reading.reading import Document, Scanner, Window
from meshwright.traces.reading.scanner.compiled import CompiledScanner
from meshwright.traces.reading.scanner.portable import PortableScanner
from meshwright.traces.reading.trace import Trace

SCANNERS: list[Callable[[], Scanner]] = [PortableScanner, CompiledScanner]
LARGEST = 2**63 - 1


def read_text(text: str | bytes, scanner: Scanner, chunk: int = 1 << 16) -> Trace:
    data = text.encode() if isinstance(text, str) else text
    document = Document(Window(io.BytesIO(data), chunk), scanner)
    document.read()
    return build("memory.json", document.header, scanner.scanned(), document.notes(), document.size())


def damage(trace: Trace) -> list[str]:
    """What was wrong with the text: not that an event does not say what it is, as most of those made here."""
    return [str(note) for note in trace.notes if not note.what.startswith("in no figure")]


def rows(trace: Trace) -> list[dict[str, Any]]:
    """Each event as a table, texts and tracks as themselves, values that are not there left out."""
    names = ("phase", "category", "name", "track", "ts", "dur", "link", "external")
    columns = [getattr(trace.events, name).tolist() for name in names]
    made: list[dict[str, Any]] = []
    for values in zip(*columns, strict=True):
        row: dict[str, Any] = dict(zip(names, values, strict=True))
        track = trace.tracks[row.pop("track")]
        made.append(row | {"name": trace.texts[row["name"]], "pid": track.pid, "tid": track.tid})
    for table_name, kind in zip(NAMES, TABLES, strict=True):
        table, keys = getattr(trace, table_name), keys_of(kind)
        for column, key in keys.items():
            for place, value in zip(table.row.tolist(), getattr(table, column).tolist(), strict=True):
                made[place][key.word] = value if key.kind is Kind.WHOLE else trace.texts[value]
                if key.kind is Kind.LIST:
                    made[place][key.word] = _as_list(trace.texts[value])
    return made


def plainly(text: str | bytes) -> list[dict[str, Any]]:
    """What `rows` must be, by json.loads."""
    loaded = json.loads(text, parse_float=Decimal, strict=False)
    events = loaded["traceEvents"] if isinstance(loaded, dict) else loaded
    made = [_row(event) for event in events if isinstance(event, dict)]
    return [row for row in made if row["phase"] != ord("X") or row["ts"] != NONE]


def _row(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args") if isinstance(event.get("args"), dict) else {}
    phase, link = event.get("ph"), whole(args.get("correlation"))
    row = {
        "phase": ord(phase) if isinstance(phase, str) and len(phase) == 1 and "!" <= phase <= "~" else 0,
        "category": int(category(_text(event.get("cat")) or "")),
        "name": _text(event.get("name")) or "",
        "pid": _place(event.get("pid")),
        "tid": _place(event.get("tid")),
        "ts": whole(event.get("ts"), 1000),
        "dur": max(whole(event.get("dur"), 1000), 0),
        "link": whole(event.get("id")) if link == NONE else link,
        "external": whole(args.get("External id")),
    }
    for kind in TABLES:
        values = {key.word: READ[key.kind](args.get(key.word)) for key in keys_of(kind).values()}
        if any(value is not None and value != NONE for value in values.values()):
            row |= {key: "" if value is None else value for key, value in values.items()}
    return row


def whole(value: Any, scale: int = 1) -> int:
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?", value):
        value = Decimal(value)
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return NONE
    if isinstance(value, Decimal) and not -30 < value.adjusted() < 30:
        return 0 if not value or value.adjusted() < 0 else NONE
    exact = (
        int((Decimal(value) * scale).to_integral_value(ROUND_HALF_UP)) if isinstance(value, Decimal) else value * scale
    )
    return exact if abs(exact) <= LARGEST else NONE


def _text(value: Any) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None


def _list(value: Any) -> Any:
    return _as_list(value) if isinstance(value, str) else value if isinstance(value, list) else None


def _as_list(text: str) -> Any:
    """What JSON says, since blanks in it mean nothing; a text that is none, as it is."""
    try:
        return json.loads(text, parse_float=Decimal, strict=False)
    except ValueError:
        return text


READ: dict[Kind, Callable[[Any], Any]] = {Kind.WHOLE: whole, Kind.TEXT: _text, Kind.LIST: _list}


def _place(value: Any) -> Any:
    if isinstance(value, Decimal):
        return float(value)
    return value if isinstance(value, int | str) and not isinstance(value, bool) else None
