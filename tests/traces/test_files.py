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
from meshwright.traces.rank.timeline.breakdown import breakdown
from meshwright.traces.reading import Trace, files, rank_of, read_trace
from tests.traces.traces_as_text import damage

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
        (gzip.compress(b"", mtime=0), "is empty"),
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


def read(tmp_path: Path, events: list[object], **more: object) -> Trace:
    return read_trace(written(tmp_path / "some.json", json.dumps({"traceEvents": events} | more).encode()))


def test_a_trace_without_events_is_a_trace(tmp_path: Path) -> None:
    trace = read(tmp_path, [])
    assert (len(trace.events), trace.notes) == (0, ())
    assert breakdown(trace).devices == ()


@pytest.mark.parametrize("after", ['{"traceEvents": []}', "x", "]"])
def test_what_follows_the_document_is_told(tmp_path: Path, after: str) -> None:
    text = b'{"traceEvents": [], "rank": {}}'
    trace = read_trace(written(tmp_path / "two.json", text + b" \n" + after.encode()))
    assert damage(trace) == [f"left out: what follows byte {len(text) + 2}, where the document is complete"]
    assert damage(read_trace(written(tmp_path / "one.json", text + b" \n"))) == []


def test_events_that_do_not_say_what_they_are_are_counted(tmp_path: Path) -> None:
    known = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 2}
    events: list[object] = [
        {key: known[key] for key in known if key != left_out} for left_out in ("", "ph", "cat", "cat")
    ]
    notes = [(note.what, note.count) for note in read(tmp_path, [*events, {"ph": "M", "name": "process_name"}]).notes]
    assert notes == [
        ("in no figure: an event without a phase (ph)", 1),
        ("in no figure: a complete event without a category (cat)", 2),
    ]


def test_a_file_that_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise PermissionError(13, "Permission denied")

    path = written(tmp_path / "some.json", TEXT)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        read_trace(path)


def test_reading_that_fails_halfway_gives_what_came_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "some.json", TEXT)
    read_into, calls = files.TextFile.readinto, iter(range(100))

    def fails_later(self: files.TextFile, room: memoryview) -> int:
        if next(calls) < 3:
            return read_into(self, room)
        monkeypatch.setattr(self, "_file", open(os.devnull, "wb", buffering=0))  # noqa: SIM115
        return read_into(self, room)

    monkeypatch.setattr(files.TextFile, "readinto", fails_later)
    trace = read_trace(path, chunk=100_000)
    assert 0 < len(trace.events) < len(EVENTS)
    assert [note.what.split(":")[0] for note in trace.notes] == ["reading failed", "left out"]


def test_events_out_of_order_give_the_same_figures(tmp_path: Path) -> None:
    shuffled = random.Random(1).sample(EVENTS, len(EVENTS))
    (one,), (other,) = (breakdown(read(tmp_path, some)).devices for some in (EVENTS, shuffled))
    assert one.shares == other.shares
    assert one.shares.busy == 20_000_000


def test_durations_of_zero_and_below(tmp_path: Path) -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7}
    trace = read(tmp_path, [kernel | {"ts": 1, "dur": 0}, kernel | {"ts": 5, "dur": -3}, kernel | {"ts": 7, "dur": 2}])
    assert trace.events.dur.tolist() == [0, 0, 2000]
    assert damage(trace) == ["taken as 0: a negative duration"]
    (device,) = breakdown(trace).devices
    assert (device.shares.busy, device.shares.span) == (2000, 8000)


@pytest.mark.parametrize("ts", ["NaN", "Infinity", "-Infinity", "1e400", "1" + "0" * 30, "9" * 20, "null", '"x"'])
def test_times_that_are_none_leave_the_event_out(tmp_path: Path, ts: str) -> None:
    text = '{"traceEvents": [{"ph": "X", "ts": HERE, "dur": 1}, {"ph": "X", "ts": 2, "dur": 1}]}'.replace("HERE", ts)
    trace = read_trace(written(tmp_path / "some.json", text.encode()))
    assert trace.events.ts.tolist() == [2000]
    assert damage(trace) == ["left out: a complete event without a time"]


@pytest.mark.parametrize("dur", ["NaN", "1e400", "null"])
def test_durations_that_are_none_count_as_zero(tmp_path: Path, dur: str) -> None:
    text = '{"traceEvents": [{"ph": "X", "ts": 2, "dur": HERE}]}'.replace("HERE", dur)
    trace = read_trace(written(tmp_path / "some.json", text.encode()))
    assert trace.events.dur.tolist() == [0]
    assert damage(trace) == ["taken as 0: the missing duration of a complete event"]


@pytest.mark.parametrize("where", ["args", "header"])
def test_deep_nesting_is_no_problem(tmp_path: Path, where: str) -> None:
    deep = "[" * 200_000 + "]" * 200_000
    event = '{"ph": "X", "ts": 2, "dur": 1, "args": {"x": HERE, "device": 3}}'
    event = event.replace("HERE", deep if where == "args" else "0")
    text = f'{{"traceEvents": [{event}, {event}], "z": {deep if where == "header" else 1}}}'
    trace = read_trace(written(tmp_path / "some.json", text.encode()))
    assert trace.work.device.tolist() == [3, 3]
    assert [note.split(" where ")[-1] for note in damage(trace)] == ["a value does not end"] * (where == "header")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-32-be"])
def test_other_encodings_are_told(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(InputError, match="UTF-16 or UTF-32"):
        read_trace(written(tmp_path / "some.json", TEXT.decode().encode(encoding)))


def test_an_event_larger_than_a_window(tmp_path: Path) -> None:
    event = {"ph": "X", "ts": 2, "dur": 1, "args": {"stack": "x" * 500_000, "device": 3}}
    trace = read_trace(written(tmp_path / "some.json", json.dumps({"traceEvents": [event] * 3}).encode()), chunk=1000)
    assert trace.work.device.tolist() == [3, 3, 3]


def test_a_bad_event_in_a_packed_file_costs_that_event(tmp_path: Path) -> None:
    text = TEXT.replace(b'"ts": 10000,', b'"ts": 10000 "', 1)
    trace = read_trace(written(tmp_path / "some.json.gz", gzip.compress(text)), chunk=100_000)
    assert len(trace.events) == len(EVENTS) - 1
    place = text.rindex(b"{", 0, text.index(b'"ts": 10000 "'))
    assert [str(note) for note in trace.notes] == [
        f"left out: what is no JSON or does not end, at byte {place}, up to the next event"
    ]
    assert trace.rank == 4
