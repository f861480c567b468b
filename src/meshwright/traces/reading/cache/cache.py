"""Parquet cache of a trace's columns beside it: the second reading takes a tenth of the time.

`FILE.meshwright/` holds a Parquet file for each table, for SQL and other programs as well, and `texts.parquet` with the
rest of the trace. It is used as long as the trace file has the size and time that it was made from. If anything is
wrong with it, the trace itself is read again.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from meshwright.traces.reading.cache.arrow_memory import returning_memory
from meshwright.traces.reading.categories import Category
from meshwright.traces.reading.columns import INNER, NAMES
from meshwright.traces.reading.ranks import rank_of
from meshwright.traces.reading.reading import read_trace
from meshwright.traces.reading.trace import Note, Trace, Track

VERSION = 1  # version of reading: another one makes every cache out of date
# Includes columns and categories, so that new ones need no other change here.
FORMAT = f"{VERSION}.{zlib.crc32(repr((INNER, [kind.name for kind in Category])).encode()):08x}"
ROWS = 1 << 17  # rows per write: bounds its memory
TABLES = ("events", *NAMES)
FILES = tuple(f"{name}.parquet" for name in (*TABLES, "texts"))
KEY = b"meshwright"
Stamp = dict[str, int]

# Measured on 527,000 events: 2.4 MB if ids and times are stored as differences, and written in a third of the time of
# dictionaries. (Splitting into bytes is smaller for durations, but SQL engines of 2024 do not read it.)


def read_cached(path: str | Path) -> Trace:
    """Read the trace in a file as `read_trace` does, from its cache, which is created if missing.

    If it cannot be created, a note gives the reason; without pyarrow there is no cache and no note.

    >>> import shutil, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = shutil.copy("tests/data/traces/hta/triton_example.json.gz", folder)
    ...     once, again = read_cached(file), read_cached(file)
    ...     sorted(path.name for path in Path(f"{file}.meshwright").iterdir())[:3]
    ['collectives.parquet', 'events.parquet', 'labels.parquet']
    >>> len(again.events) == len(once.events), again.texts == once.texts
    (True, True)
    """
    if found := kept(path):
        return found
    source = stamp_of(path)
    trace = read_trace(path)
    return replace(trace, notes=(*trace.notes, *keep(trace, source)))


def kept(path: str | Path) -> Trace | None:
    """Read the trace in a file from its cache, or return None without a usable one."""
    folder = folder_of(path)
    if not folder.is_dir():
        return None
    try:
        with returning_memory():
            return _read(folder, stamp_of(path), str(path))
    except Exception:  # a damaged file can raise any exception in a Parquet reader
        return None


def keep(trace: Trace, source: Stamp | None) -> tuple[Note, ...]:
    """Write the cache of a trace whose file was `source` before it was read; return a note if that fails."""
    try:
        with returning_memory():
            _write(folder_of(trace.path), trace, source)
    except ImportError:
        return ()
    except OSError as error:
        return (Note(f"not kept in Parquet beside the file: {error.strerror or error}"),)
    return ()


def folder_of(path: str | Path) -> Path:
    """Return the folder of a trace's cache.

    >>> folder_of("runs/rank0.json.gz").name
    'rank0.json.gz.meshwright'
    """
    return Path(f"{path}.meshwright")


def parquet_of(path: str | Path, spare: str | Path) -> Path:
    """Return the folder that holds a trace as Parquet: its cache, or one created in `spare` if there is none."""
    try:
        if (_read_told(folder_of(path)) or {}).get("source") == stamp_of(path):
            return folder_of(path)
    except Exception:  # as in `kept`
        pass
    folder = Path(spare) / f"{zlib.crc32(str(path).encode()):08x}.{Path(path).name}"
    _write(folder, read_trace(path), stamp_of(path))
    return folder


def _read_told(folder: Path) -> dict[str, Any] | None:
    """Read a cache's description, or return None if it is of another version."""
    told: dict[str, Any] = json.loads(_opened(folder / "texts.parquet").schema_arrow.metadata[KEY])
    return told if told["format"] == FORMAT else None


def stamp_of(path: str | Path) -> Stamp | None:
    """Return the stamp that changes when a file is rewritten, or None without a file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns}


def _read(folder: Path, source: Stamp | None, path: str) -> Trace | None:
    """Read the trace of a cache, or return None if it belongs to another file."""
    from meshwright.traces.reading.cache.arrow import events_from, table_from

    told = _read_told(folder)
    if told is None or told["source"] != source:
        return None
    words = _columns(folder / "texts.parquet")("text").to_pylist()
    number_of = {word: number for number, word in enumerate(words)}
    tables = {}
    for name in NAMES:
        tables[name] = table_from(name, _columns(folder / f"{name}.parquet"), number_of)
    rank, rank_from = rank_of(told["header"], path)  # the file may have been renamed
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
    """Return a function that reads one column of a file: reading all at once would hold everything twice."""
    opened = _opened(file)
    return lambda name: opened.read([name], use_threads=False)[name]


def _write(folder: Path, trace: Trace, source: Stamp | None) -> None:
    """Write all files, in a temporary folder until they are complete."""
    import pyarrow as pa

    from meshwright.traces.reading.cache.arrow import text_array

    told = {
        "format": FORMAT,
        "source": source,
        "header": trace.header,
        "tracks": [[track.pid, track.tid] for track in trace.tracks],
        "categories": trace.categories,
        "notes": [asdict(note) for note in trace.notes],
        "text_bytes": trace.text_bytes,
    }
    texts = pa.table({"text": text_array(trace.texts)}, metadata={KEY: json.dumps(told)})
    made = folder.with_name(f".{folder.name}.{os.urandom(4).hex()}")
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
    from meshwright.traces.reading.cache.arrow import rows_in, to_arrow

    with _writer(file, to_arrow(trace, name, 0, 0).schema) as writer:
        for start in range(0, rows_in(trace, name), ROWS):
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
    """Remove a folder of ours; one with other contents is not removed, and raises OSError."""
    if folder.is_dir():
        for file in FILES:
            (folder / file).unlink(missing_ok=True)
        folder.rmdir()
