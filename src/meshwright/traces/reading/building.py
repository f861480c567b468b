"""Build a trace from a scanner's columns: decode texts, map categories, note what was left out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import shorten
from meshwright.traces.reading.ascend import is_ascend, refined
from meshwright.traces.reading.categories import category
from meshwright.traces.reading.columns import NAMES, TABLES, Events, Kind, Scanned, keys_of
from meshwright.traces.reading.ranks import rank_of
from meshwright.traces.reading.trace import Note, Trace, Track

T = TypeVar("T", str, Track)
PIECE = 1 << 16  # rows per chunk


def build(path: str, header: dict[str, Any], scanned: Scanned, notes: list[Note], text_bytes: int) -> Trace:
    """Build the trace of a file from its header and columns."""
    columns = scanned.columns
    decoded = [_decoded(raw) for raw in scanned.texts] + [_list(raw) for raw in scanned.lists]
    texts, number_of = _distinct([text for text, _ in decoded])
    tracks, track_of = _distinct([Track(_value(pid), _value(tid)) for pid, tid in scanned.tracks])
    wrong = _wrong(scanned, [number for number, (_, right) in enumerate(decoded) if not right])
    words, categories = _categories(columns.category, [text for text, _ in decoded])
    rank, rank_from = rank_of(header, path)
    told = header.get("distributedInfo")
    if isinstance(told, dict) and told.get("rank") is not None and rank_from != "distributedInfo":
        notes = [*notes, Note(f"distributedInfo tells no rank, but {shorten(repr(told['rank']), 20)}")]
    tables = [
        _table(kind, table, number_of, len(scanned.texts)) for kind, table in zip(TABLES, scanned.tables, strict=True)
    ]
    counts: dict[str, int] = {}
    for number in np.flatnonzero(words):
        counts[decoded[number][0]] = counts.get(decoded[number][0], 0) + int(words[number])
    events = Events(
        phase=columns.phase,
        category=categories,
        name=_renumbered(columns.name, number_of),
        track=_renumbered(columns.track, track_of),
        ts=columns.ts,
        dur=columns.dur,
        link=columns.link,
        external=columns.external,
    )
    trace = Trace(
        path=path,
        rank=rank,
        rank_from=rank_from,
        header=header,
        texts=texts,
        tracks=tracks,
        categories=counts,
        events=events,
        **dict(zip(NAMES, tables, strict=True)),
        notes=(*notes, *_notes(scanned, wrong)),
        text_bytes=text_bytes,
    )
    if is_ascend(trace):
        return refined(trace)
    return replace(trace, notes=(*trace.notes, *_untold(scanned, [text for text, _ in decoded])))


def _wrong(scanned: Scanned, numbers: list[int]) -> int:
    """Return how many of these texts are used by events: a dropped event may have brought some as well."""
    if not numbers:
        return 0
    used = np.zeros(len(scanned.texts) + len(scanned.lists), np.bool_)
    used[scanned.columns.name], used[scanned.columns.category] = True, True
    for kind, columns in zip(TABLES, scanned.tables, strict=True):
        for key, column in zip(keys_of(kind).values(), columns[1:], strict=True):
            if key.kind is not Kind.WHOLE:
                used[column + len(scanned.texts) * (key.kind is Kind.LIST)] = True
    return int(used[numbers].sum())


def _notes(scanned: Scanned, wrong: int) -> list[Note]:
    found = [
        Note("left out: a complete event without a time", scanned.counts["without_time"]),
        Note("left out: an item of the list that is no event", scanned.counts["not_objects"]),
        Note("taken as 0: a negative duration", scanned.counts["negative"]),
        Note("taken as 0: the missing duration of a complete event", scanned.counts["without_duration"]),
        Note("replaced: characters of a name that is no UTF-8 or has an unknown escape", wrong),
    ]
    return [note for note in found if note.count]


def _untold(scanned: Scanned, texts: list[str]) -> list[Note]:
    """Return notes on events without a category: nothing counts them."""
    columns = scanned.columns
    no_phase, complete = int((columns.phase == 0).sum()), columns.phase == ord("X")
    unnamed = np.array([not text for text in texts], np.bool_)
    no_category = sum(
        int((unnamed[columns.category[piece]] & complete[piece]).sum()) for piece in _pieces(len(complete))
    )
    found = [
        Note("in no figure: an event without a phase (ph)", no_phase),
        Note("in no figure: a complete event without a category (cat)", no_category),
    ]
    return [note for note in found if note.count]


def _table(kind: type[Any], columns: tuple[NDArray[Any], ...], number_of: NDArray[np.int32], lists: int) -> Any:
    """Return a table with final text numbers; those of lists start at `lists`."""
    row, *others = columns
    made: dict[str, NDArray[Any]] = {"row": row}
    for (name, key), column in zip(keys_of(kind).items(), others, strict=True):
        if key.kind is Kind.WHOLE:
            made[name] = column
        else:
            made[name] = _renumbered(column, number_of[lists:] if key.kind is Kind.LIST else number_of)
    return kind(**made)


def _pieces(rows: int) -> list[slice]:
    """Return chunks of rows: NumPy's indices are 8 bytes wide, and columns may fill the memory."""
    return [slice(start, start + PIECE) for start in range(0, rows, PIECE)]


def _renumbered(column: NDArray[np.int32], number_of: NDArray[np.int32]) -> NDArray[np.int32]:
    """Renumber a column in place."""
    if not np.array_equal(number_of, np.arange(len(number_of))):
        for piece in _pieces(len(column)):
            column[piece] = number_of[column[piece]]
    return column


def _categories(column: NDArray[np.int32], texts: list[str]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the number of events of each category text, and the Category of each event."""
    code_of = np.array([category(text) for text in texts], np.uint8)
    words, codes = np.zeros(len(texts), np.int64), np.empty(len(column), np.uint8)
    for piece in _pieces(len(column)):
        words += np.bincount(column[piece], minlength=len(texts))
        codes[piece] = code_of[column[piece]]
    return words, codes


def _distinct(values: list[T]) -> tuple[tuple[T, ...], NDArray[np.int32]]:
    """Return distinct values, and the index of each among them: two spellings may mean one text."""
    places: dict[T, int] = {}
    order = [places.setdefault(value, len(places)) for value in values]
    return tuple(places), np.array(order, np.int32)


def _decoded(raw: bytes) -> tuple[str, bool]:
    """Return the text of raw JSON, and False if it is none."""
    try:
        text = raw.decode()
        if "\\" not in text:
            return text, "\ufffd" not in text
        text = json.loads(f'"{text}"', strict=False)
        text.encode()  # half of a surrogate pair cannot be printed
        return text, True
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode(), False
    except ValueError:
        return raw.decode("utf-8", "replace"), False


def _list(raw: bytes) -> tuple[str, bool]:
    """Return a list as JSON; a string that contains a list becomes that."""
    if raw[:1] == b'"':
        return _decoded(raw[1:-1])
    text = raw.decode("utf-8", "replace")
    return text, "\ufffd" not in text


def _value(raw: bytes) -> int | float | str | None:
    """Return a pid or tid."""
    if not raw or raw[:1] in b"[{":
        return None
    if raw[:1] == b'"':
        return _decoded(raw[1:-1])[0]
    try:
        value = json.loads(raw)
    except ValueError:
        return raw.decode("utf-8", "replace")
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
