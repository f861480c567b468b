"""A trace from its cache is the trace from its file, and no cache is better than a wrong one."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from meshwright.errors import InputError
from meshwright.traces.reading import Trace, read_cached, read_trace
from meshwright.traces.reading.cache import cache
from meshwright.traces.reading.columns import NAMES
from tests.traces.test_reference import HERE, TRACES
from tests.traces.test_scanner import HARD

SMALL = "hta/event_sync_multi_stream.json.gz"


def differences(one: Trace, other: Trace) -> list[str]:
    """Names of fields and columns that two traces do not have alike."""
    facts = ("path", "rank", "rank_from", "header", "texts", "tracks", "categories", "notes", "text_bytes")
    found = [name for name in facts if getattr(one, name) != getattr(other, name)]
    for name in ("events", *NAMES):
        left, right = getattr(one, name), getattr(other, name)
        for column in left.__dataclass_fields__:
            a, b = getattr(left, column), getattr(right, column)
            if a.dtype != b.dtype or not np.array_equal(a, b):
                found.append(f"{name}.{column}")
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(shutil.copy(TRACES / SMALL, tmp_path / "rank3.json.gz"))


def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> Trace:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(cache, "read_trace", fail)


@pytest.mark.parametrize("name", HERE)
def test_every_real_trace_comes_back_equal(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shutil.copy(TRACES / name, tmp_path / "rank0.json.gz")
    monkeypatch.setattr(cache, "ROWS", 1000)  # several pieces, each with words of its own
    wanted = read_trace(path)
    assert differences(read_cached(path), wanted) == []
    no_reading(monkeypatch)
    assert differences(read_cached(path), wanted) == []


@pytest.mark.parametrize(
    "text", [HARD, '{"traceEvents": []}', '{"a": NaN, "traceEvents": [{"ph": "\\u0007", "pid": 1e400}, {']
)
def test_what_is_unusual_comes_back_equal(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some.json"
    path.write_text(text)
    wanted = read_trace(path)
    wanted.header.pop("a", None)  # NaN differs from itself
    read_cached(path)
    no_reading(monkeypatch)
    found = read_cached(path)
    assert json.dumps(found.header.pop("a", None)) in ("NaN", "null")
    assert differences(found, wanted) == []


def test_other_programs_read_the_tables(file: Path) -> None:
    read_cached(file)
    found = pq.read_table(f"{file}.meshwright/events.parquet").to_pylist()
    wanted = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    for row, event in zip(found, wanted, strict=True):
        assert [row[key] for key in ("phase", "name", "pid", "tid")] == [
            None if value in (None, "") else str(value) for value in map(event.get, ("ph", "name", "pid", "tid"))
        ]
        assert (row["category"] == "kernel") == (event.get("cat") == "kernel")
        assert row["external"] == event.get("args", {}).get("External id")
        assert row["dur"] == round(1000 * event.get("dur", 0))
    work = pq.read_table(f"{file}.meshwright/work.parquet").to_pylist()
    assert [(row["row"], row["stream"]) for row in work if row["stream"] is not None] == [
        (place, event["args"]["stream"]) for place, event in enumerate(wanted) if "stream" in event.get("args", {})
    ]


@pytest.mark.parametrize("name", cache.FILES)
@pytest.mark.parametrize("harm", ["flipped", "cut", "empty", "gone", "folder"])
def test_a_damaged_cache_is_made_again(file: Path, name: str, harm: str) -> None:
    wanted = read_cached(file)
    part = cache.folder_of(file) / name
    data = bytearray(part.read_bytes())
    if harm in ("gone", "folder"):
        part.unlink()
        if harm == "folder":
            part.mkdir()
    else:
        for place in range(8, len(data) // 2):
            data[place] ^= 0x55
        part.write_bytes({"flipped": data, "cut": data[:-9], "empty": b""}[harm])
    found = read_cached(file)
    if harm == "folder":  # not ours: it stays, and there is no cache
        assert [note.what.split(":")[0] for note in found.notes] == ["not kept in Parquet beside the file"]
        return
    assert differences(found, wanted) == []
    assert sorted(os.listdir(cache.folder_of(file))) == sorted(cache.FILES)


def test_another_file_another_trace(file: Path) -> None:
    before = read_cached(file)
    stamp = os.stat(file)
    shutil.copy(TRACES / "hta/triton_example.json.gz", file)
    assert len(read_cached(file).events) != len(before.events)
    shutil.copy(TRACES / SMALL, file)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    assert differences(read_cached(file), before) == []


def test_another_version_reads_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_cached(file)
    monkeypatch.setattr(cache, "FORMAT", "0.0")
    calls = []
    monkeypatch.setattr(cache, "read_trace", lambda path: calls.append(path) or read_trace(path))
    read_cached(file)
    read_cached(file)
    assert len(calls) == 1


def test_a_moved_file_has_the_rank_of_its_new_name(tmp_path: Path) -> None:
    old, new = tmp_path / "rank1.json", tmp_path / "rank2.json"
    old.write_text('{"traceEvents": [{"ph": "X", "ts": 1, "dur": 1}]}')
    assert read_cached(old).rank == 1
    old.rename(new)
    cache.folder_of(old).rename(cache.folder_of(new))
    assert read_cached(new).rank == 2


def test_where_nothing_can_be_written_a_note_says_so(file: Path) -> None:
    cache.folder_of(file).write_text("a file of this name")
    found = read_cached(file)
    assert str(found.notes[-1]).startswith("not kept in Parquet beside the file: ")
    assert sorted(os.listdir(file.parent)) == [file.name, f"{file.name}.meshwright"]
    assert differences(found, read_trace(file)) == ["notes"]


def test_what_is_not_ours_is_not_removed(file: Path) -> None:
    read_cached(file)
    kept = cache.folder_of(file) / "my.txt"
    kept.write_text("mine")
    os.utime(file)
    assert read_cached(file).notes
    assert kept.read_text() == "mine"


def test_without_pyarrow_there_is_no_cache(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert differences(read_cached(file), read_trace(file)) == []
    assert os.listdir(file.parent) == [file.name]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_cached(tmp_path / "missing.json")
