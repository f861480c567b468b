"""A trace's columns kept beside it, in Parquet: the second reading costs a tenth of the first.

`FILE.meshwright/` holds a Parquet file for each table, for SQL and other programs as much as for us, and `texts.parquet`
with what else makes the trace. It is used as long as size and time of the trace's file are those that it was made from;
anything wrong with it, and the trace itself is read again.
"""

from __future__ import annotations

import json
import os
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from meshwright.observe.traces.categories import Category
from meshwright.observe.traces.columns import INNER, NAMES
from meshwright.observe.traces.ranks import rank_of
from meshwright.observe.traces.reading import read_trace
from meshwright.observe.traces.trace import Note, Trace, Track

VERSION = 1  # of how a trace is read: another one makes every cache out of date
# Columns and categories as well: a further one needs no further thought here.
FORMAT = f"{VERSION}.{zlib.crc32(repr((INNER, [kind.name for kind in Category])).encode()):08x}"
ROWS = 1 << 18  # written at once: bounds the memory that it takes
TABLES = ("events", *NAMES)
FILES = tuple(f"{name}.parquet" for name in (*TABLES, "texts"))
KEY = b"meshwright"

# Measured on 527,000 events: 2.4 MB where ids and times are kept as differences, and written in a third of the time that
# dictionaries of them take. (Splitting into bytes is smaller for durations, but SQL engines of 2024 do not read it.)


def read_cached(path: str | Path) -> Trace:
    """The trace in a file as `read_trace` gives it: from its cache, which is made where there is none.

    Where none can be made, a note says why; without pyarrow there is none and nothing is said.

    >>> import shutil, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = shutil.copy("tests/data/traces/hta/triton_example.json.gz", folder)
    ...     once, again = read_cached(file), read_cached(file)
    ...     sorted(path.name for path in Path(f"{file}.meshwright").iterdir())[:3]
    ['collectives.parquet', 'events.parquet', 'labels.parquet']
    >>> len(again.events) == len(once.events), again.texts == once.texts
    (True, True)
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return read_trace(path)
    folder = folder_of(path)
    try:
        source = _stamp(path)
        with _returning_memory():
            found = _read(folder, source, str(path)) if folder.is_dir() else None
    except Exception:  # what a damaged file makes readers of Parquet say is without end
        found = None
    if found:
        return found
    trace = read_trace(path)
    try:
        with _returning_memory():
            _write(folder, trace, source)
    except OSError as error:
        note = Note(f"not kept in Parquet beside the file: {error.strerror or error}")
        return replace(trace, notes=(*trace.notes, note))
    return trace


def folder_of(path: str | Path) -> Path:
    """Where a trace's cache is.

    >>> folder_of("runs/rank0.json.gz").name
    'rank0.json.gz.meshwright'
    """
    return Path(f"{path}.meshwright")


def parquet_of(path: str | Path, spare: str | Path) -> Path:
    """The folder that holds a trace as Parquet: its cache, or one that is made in `spare` where there is none."""
    try:
        if (_read_told(folder_of(path)) or {}).get("source") == _stamp(path):
            return folder_of(path)
    except Exception:  # as above
        pass
    folder = Path(spare) / f"{zlib.crc32(str(path).encode()):08x}.{Path(path).name}"
    _write(folder, read_trace(path), _stamp(path))
    return folder


def _read_told(folder: Path) -> dict[str, Any] | None:
    """What a cache says of itself, None where it is of another version."""
    told: dict[str, Any] = json.loads(_opened(folder / "texts.parquet").schema_arrow.metadata[KEY])
    return told if told["format"] == FORMAT else None


@contextmanager
def _returning_memory() -> Iterator[None]:
    """Arrow's own allocator keeps what it once had, 20 to 40 MiB here, in every process that reads traces."""
    import pyarrow as pa

    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def _stamp(path: str | Path) -> dict[str, int]:
    found = os.stat(path)
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns}


def _read(folder: Path, source: dict[str, int], path: str) -> Trace | None:
    """The trace that a cache holds, None where that is another one."""
    from meshwright.observe.traces.arrow import events_from, table_from

    told = _read_told(folder)
    if told is None or told["source"] != source:
        return None
    words = _columns(folder / "texts.parquet")("text").to_pylist()
    number_of = {word: number for number, word in enumerate(words)}
    tables = {}
    for name in NAMES:
        tables[name] = table_from(name, _columns(folder / f"{name}.parquet"), number_of)
    rank, rank_from = rank_of(told["header"], path)  # the file may have another name by now
    return Trace(
        path=path,
        rank=rank,
        rank_from=rank_from,
        header=told["header"],
        texts=tuple(words),
        tracks=tuple(Track(pid, tid) for pid, tid in told["tracks"]),
        categories=told["categories"],
        events=events_from(_columns(folder / "events.parquet"), number_of),
        **tables,
        notes=tuple(Note(**note) for note in told["notes"]),
        text_bytes=told["text_bytes"],
    )


def _opened(file: Path) -> Any:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(file, page_checksum_verification=True)


def _columns(file: Path) -> Callable[[str], Any]:
    """What reads one column of a file: never all at once, which would hold everything twice."""
    opened = _opened(file)
    return lambda name: opened.read([name], use_threads=False)[name]


def _write(folder: Path, trace: Trace, source: dict[str, int]) -> None:
    """All files, in a folder of another name until they are whole."""
    import pyarrow as pa

    told = {
        "format": FORMAT,
        "source": source,
        "header": trace.header,
        "tracks": [[track.pid, track.tid] for track in trace.tracks],
        "categories": trace.categories,
        "notes": [asdict(note) for note in trace.notes],
        "text_bytes": trace.text_bytes,
    }
    texts = pa.table({"text": pa.array(trace.texts, pa.string())}, metadata={KEY: json.dumps(told)})
    made = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    made.mkdir()
    try:
        for name in TABLES:
            _write_table(made / f"{name}.parquet", trace, name)
        with _writer(made / "texts.parquet", texts.schema) as writer:
            writer.write_table(texts)
        _remove(folder)
        made.rename(folder)
    finally:
        _remove(made)


def _write_table(file: Path, trace: Trace, name: str) -> None:
    from meshwright.observe.traces.arrow import rows_in, to_arrow

    first = to_arrow(trace, name, 0, ROWS)
    with _writer(file, first.schema) as writer:
        writer.write_table(first)
        for start in range(ROWS, rows_in(trace, name), ROWS):
            writer.write_table(to_arrow(trace, name, start, start + ROWS))


def _writer(file: Path, schema: Any) -> Any:
    from pyarrow.parquet import ParquetWriter
    from pyarrow.types import is_dictionary, is_integer

    numbers = [field.name for field in schema if is_integer(field.type)]
    return ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=[field.name for field in schema if is_dictionary(field.type)],
        column_encoding={name: "PLAIN" if name == "dur" else "DELTA_BINARY_PACKED" for name in numbers},
        write_statistics=False,
        write_page_checksum=True,
    )


def _remove(folder: Path) -> None:
    """A folder of ours; one that holds something else as well is not removed, which is an OSError."""
    if folder.is_dir():
        for file in FILES:
            (folder / file).unlink(missing_ok=True)
        folder.rmdir()
