"""Convert a trace's columns to Arrow tables and back, for SQL and Parquet.

Texts are words in dictionary columns, and missing values (also the empty text) are null, so that the tables can be read
by themselves. Tables other than `events` refer to events by `row`. Only this file and its users need pyarrow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from meshwright.traces.reading.categories import Category
from meshwright.traces.reading.columns import NAMES, NONE, TABLES, Events, Kind, keys_of
from meshwright.traces.reading.trace import Trace

LETTERS = ["", *map(chr, range(1, 128))]
CATEGORIES = [kind.name.lower() for kind in Category]
NUMBERS = ("ts", "dur", "link", "external")


def to_arrow(trace: Trace, name: str = "events", start: int = 0, stop: int | None = None) -> pa.Table:
    """Return a table of a trace: `events`, or one with further columns; rows from start to stop.

    >>> from meshwright.traces.reading import read_trace
    >>> table = to_arrow(read_trace("tests/data/traces/hta/triton_example.json.gz"))
    >>> table.slice(2, 1).select(["category", "name", "pid", "dur"]).to_pylist()
    [{'category': 'operator', 'name': 'Torch-Compiled Region: 0/0', 'pid': '1670242', 'dur': 1352964}]
    """
    part = slice(start, stop)
    if name == "events":
        return _events(trace, part)
    table, kind = getattr(trace, name), TABLES[NAMES.index(name)]
    columns = {"row": _array(table.row[part])}
    for column, key in keys_of(kind).items():
        values = getattr(table, column)[part]
        columns[column] = _numbers(values) if key.kind is Kind.WHOLE else _words(values, trace.texts)
    return pa.table(columns)


def rows_in(trace: Trace, name: str) -> int:
    """Return the number of rows of a table."""
    return len(trace.events) if name == "events" else len(getattr(trace, name).row)


def _events(trace: Trace, part: slice) -> pa.Table:
    events = trace.events
    pids = ["" if track.pid is None else str(track.pid) for track in trace.tracks]
    tids = ["" if track.tid is None else str(track.tid) for track in trace.tracks]
    return pa.table(
        {
            "row": _array(np.arange(*part.indices(len(events)))),
            "phase": _words(events.phase[part], LETTERS),
            "category": _words(events.category[part], CATEGORIES),
            "name": _words(events.name[part], trace.texts),
            "pid": _words(events.track[part], pids),
            "tid": _words(events.track[part], tids),
            "track": _array(events.track[part]),
        }
        | {name: _numbers(getattr(events, name)[part]) for name in NUMBERS}
    )


def _numbers(values: NDArray[np.int64]) -> pa.Array:
    missing = values == NONE
    return _array(values, missing if missing.any() else None)


def _array(values: NDArray[Any], missing: NDArray[np.bool_] | None = None) -> pa.Array:
    """Return whole numbers, with null for missing ones.

    pa.array would load more of NumPy, which takes 8 ms.
    """
    valid = None if missing is None else pa.py_buffer(np.packbits(~missing, bitorder="little"))
    buffers = [valid, pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


def text_array(texts: Sequence[str]) -> pa.StringArray:
    """Return texts as an array.

    pa.array would load pandas if it is installed, to check for its types.
    """
    coded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, coded)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(texts), pa.py_buffer(ends), pa.py_buffer(b"".join(coded)))


def _words(numbers: NDArray[Any], words: Sequence[str]) -> pa.DictionaryArray:
    """Return numbers of words as a dictionary array of only the words that are used."""
    places: dict[str, int] = {}
    place = np.zeros(len(words), np.int32)
    for number in np.flatnonzero(np.bincount(numbers)).tolist():
        place[number] = places.setdefault(words[number], len(places))
    indices = place.take(numbers)
    missing = indices == places[""] if "" in places else None
    return pa.DictionaryArray.from_arrays(_array(indices, missing), text_array(list(places)))


Column = Callable[[str], pa.ChunkedArray]


def events_from(column: Column, number_of: dict[str, int]) -> Events:
    """Return the events of a table; `column` returns its columns by name."""
    phases = {letter: code for code, letter in enumerate(LETTERS)}
    categories = {word: code for code, word in enumerate(CATEGORIES)} | {"": 0}
    return Events(
        phase=_back(column("phase"), np.uint8, phases),
        category=_back(column("category"), np.uint8, categories),
        name=_back(column("name"), np.int32, number_of),
        track=_back(column("track"), np.int32),
        **{name: _back(column(name), np.int64) for name in NUMBERS},
    )


def table_from(name: str, column: Column, number_of: dict[str, int]) -> Any:
    """Return one of the tables with further columns."""
    kind = TABLES[NAMES.index(name)]
    made = {"row": _back(column("row"), np.int64)}
    for field, key in keys_of(kind).items():
        whole = key.kind is Kind.WHOLE
        made[field] = _back(column(field), np.int64) if whole else _back(column(field), np.int32, number_of)
    return kind(**made)


def _back(column: pa.ChunkedArray, width: Any, number_of: dict[str, int] | None = None) -> NDArray[Any]:
    """Return a column as numbers, each chunk having a dictionary of its own."""
    made = np.empty(len(column), width)
    start = 0
    for chunk in filter(len, column.chunks):
        end = start + len(chunk)
        if number_of is None:
            made[start:end] = _filled(chunk, NONE)
        else:
            words = chunk.dictionary.to_pylist()
            numbers = np.array([*(number_of[word] for word in words), number_of[""]], width)
            made[start:end] = numbers[_filled(chunk.indices, len(words))]
        start = end
    return made


def _filled(chunk: pa.Array, missing: int) -> NDArray[Any]:
    """Return whole numbers, with `missing` for null.

    Arrow's own fill_null loads all of its functions, which takes 50 ms.
    """
    valid, data = chunk.buffers()
    part = slice(chunk.offset, chunk.offset + len(chunk))
    values = np.frombuffer(data, chunk.type.to_pandas_dtype())[part]
    if not chunk.null_count:
        return values
    known = np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")[part]
    return np.where(known, values, missing)
