"""Files as they come: packed, cut off, damaged, in another encoding, or no traces at all. Never a traceback."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import pytest
import zstandard

from meshwright.errors import InputError
from meshwright.observe.traces import duplicate_ranks, files, rank_of, read_trace

EVENTS = [
    {"ph": "X", "cat": "kernel", "name": f"k{i % 7}", "pid": 0, "tid": 7, "ts": i, "dur": 1} for i in range(20_000)
]
TEXT = json.dumps({"traceEvents": EVENTS, "distributedInfo": {"rank": 4}}).encode()


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.fixture(params=["isal", "zlib"])
def _gzip_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "zlib":
        monkeypatch.setitem(__import__("sys").modules, "isal", None)  # importing it fails


@pytest.mark.usefixtures("_gzip_by")
@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "two_members.gz", "a.json.zst", "two_frames.zst", "padded.gz"])
def test_packed_files_are_told_by_their_first_bytes(tmp_path: Path, name: str) -> None:
    half = len(TEXT) // 2
    packed = {
        "a.json": TEXT,
        "a.json.gz": gzip.compress(TEXT),
        "two_members.gz": gzip.compress(TEXT[:half]) + gzip.compress(TEXT[half:]),
        "a.json.zst": zstandard.compress(TEXT),
        "two_frames.zst": zstandard.compress(TEXT[:half]) + zstandard.compress(TEXT[half:]),
        "padded.gz": gzip.compress(TEXT) + bytes(512),
    }
    trace = read_trace(written(tmp_path / "no_ending", packed[name]), chunk=100_000)
    assert len(trace.events) == len(EVENTS)
    assert (trace.rank, trace.rank_from, trace.notes, trace.text_bytes) == (4, "distributedInfo", (), len(TEXT))


@pytest.mark.usefixtures("_gzip_by")
@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_a_packed_file_that_is_cut_off_gives_what_it_holds(tmp_path: Path, pack: object) -> None:
    packed = pack(TEXT + os.urandom(100_000))  # type: ignore[operator]  # noise: the cut then lies behind all events
    trace = read_trace(written(tmp_path / "cut_rank2.json.gz", packed[:-1000]))
    assert len(trace.events) == len(EVENTS)
    half = packed[: int(len(packed) - 100_000) // 2]
    trace = read_trace(written(tmp_path / "half_rank2.json.gz", half))
    assert 0 < len(trace.events) < len(EVENTS)
    assert trace.events.ts.tolist() == [1000 * i for i in range(len(trace.events))]
    assert [note.what.split(" ")[0] for note in trace.notes] == ["the", "left"]
    assert trace.notes[0].what == "the packed file is cut off"
    assert "the text ends in the middle" in trace.notes[1].what
    assert (trace.rank, trace.rank_from) == (2, "file name")


def test_a_damaged_packed_file_gives_what_came_before(tmp_path: Path) -> None:
    """Up to 1 MiB of text before the damage is lost with it: an unpacker does not give up what it has."""
    packed = bytearray(gzip.compress(TEXT))
    behind = len(packed) * 4 // 5
    packed[behind:] = random.Random(0).randbytes(len(packed) - behind)
    trace = read_trace(written(tmp_path / "damaged.gz", bytes(packed)))
    assert 0 < len(trace.events) < len(EVENTS)
    assert trace.notes[0].what.startswith("the packed file is damaged")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is empty"),
        (b" \n", "is blank"),
        (gzip.compress(b""), "is empty"),
        (b"\x1f\x8b", "is empty; the packed file is cut off"),
        ("{}".encode("utf-16"), "is UTF-16"),
        ('{"traceEvents": []}'.encode("utf-16-le"), "is UTF-16"),
        (b"PK\x03\x04 a zip file", "is no JSON object or list"),
        (b"hello", "is no JSON object or list: begins with 'hello'"),
        (b"{}", "has no traceEvents"),
        (b'{"a": 1, "b"', "has no traceEvents: a value does not end at byte 9"),
        (b'{"a": nonsense, "b": 2}', "has no traceEvents: a value does not end at byte 6"),
        (b'{"a" 1}', "has no traceEvents: it is no JSON at byte 5"),
        (b"[[1, 2], [3]]", "is a list, but has no events"),
        (b"\xe9\xe8\xff", "is no JSON object or list"),
        (b"q\x80\x99\xff", "is no JSON object or list"),
    ],
)
def test_what_is_no_trace_is_said_to_be_none(tmp_path: Path, data: bytes, problem: str) -> None:
    path = written(tmp_path / "some.json", data)
    with pytest.raises(InputError) as raised:
        read_trace(path)
    assert problem in str(raised.value)
    assert raised.value.file == str(path)


@pytest.mark.parametrize("path", ["missing.json", "."])
def test_what_cannot_be_read_is_told(tmp_path: Path, path: str) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / path)


def test_zstd_without_its_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(InputError, match="meshwright"):
        files.TextFile(written(tmp_path / "a.zst", zstandard.compress(TEXT)))


def test_names_in_another_encoding_are_kept_and_told(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [{"ph": "X", "name": "café", "ts": 1, "dur": 1}]}, ensure_ascii=False)
    trace = read_trace(written(tmp_path / "latin.json", text.encode("latin-1")))
    assert trace.texts[trace.events.name[0]] == "caf\ufffd"
    assert "no UTF-8" in trace.notes[0].what


def test_a_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path / "bom.json", b"\xef\xbb\xbf" + TEXT)).events) == len(EVENTS)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank0.json", 0),
        ("trace_rank_12.json.gz", 12),
        ("rank-3.1694128201553.pt.trace.json", 3),
        ("worker7_step_12.1694128201553.pt.trace.json.gz", 7),
        ("run-0.json", 0),
        ("trace_15.pt.trace.json.zst", 15),
        ("1700000000.5-TP-3.trace.json.gz", 3),
        ("1700000000.5-TP-3-DP-1.trace.json.gz", None),
        ("node1_4242.1694128201553.pt.trace.json", None),
        ("trace.json", None),
        ("8_gpus.json", None),
    ],
)
def test_ranks_in_names_of_files(name: str, rank: int | None) -> None:
    assert rank_of({}, f"some/rank9/{name}")[0] == rank


@pytest.mark.parametrize("told", [{"rank": "3"}, {"rank": True}, {"rank": -1}, {}, [], None, "rank"])
def test_a_rank_that_is_none_is_not_believed(told: object) -> None:
    assert rank_of({"distributedInfo": told}, "x_rank5.json") == (5, "file name")


def test_files_that_claim_the_same_rank() -> None:
    assert duplicate_ranks([("a", 1), ("b", 0), ("c", 1), ("d", None), ("e", None)]) == {1: ["a", "c"]}
