"""What held memory, replayed event by event; snapshots and timelines written by hand."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.traces.rank.issued import issued
from meshwright.traces.rank.memory.memory import device_peak
from meshwright.traces.rank.memory.peak_memory import held_at_peak
from meshwright.traces.rank.memory.snapshot import read_snapshot, read_timeline
from meshwright.traces.reading import read_trace
from tests.conftest import ROOT
from tests.traces.test_breakdown import event, trace_of

TRACES = ROOT / "tests/data/traces"


def replayed(events: list[dict[str, Any]]) -> tuple[int, dict[int, int]]:
    """(the fullest moment's bytes, blocks that were allocated in the window and live then)."""
    told = sorted(
        (e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] != 0), key=lambda e: e["ts"]
    )
    peak, kept, live = -1, {}, {}
    for e in told:
        args = e["args"]
        if args["Bytes"] > 0:
            live[args["Addr"]] = args["Bytes"]
        else:
            live.pop(args["Addr"], None)
        if args["Total Allocated"] > peak:
            peak, kept = args["Total Allocated"], dict(live)
    return peak, kept


@pytest.mark.parametrize("name", ["h100_qwen1.5_0.5b", "mi300_bert_small", "h100_bert_small"])
def test_holders_of_real_traces(name: str) -> None:
    path = TRACES / f"tracelens/{name}.json.gz"
    peak, live = replayed(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    trace = read_trace(path)
    found, told = held_at_peak(trace, issued(trace)), device_peak(trace)
    assert found is not None
    assert told is not None
    assert found.allocated == told.allocated == peak
    assert found.before == peak - sum(live.values())
    assert sum(holder.bytes for holder in found.holders) <= sum(live.values())
    assert len(found.times) <= 500
    assert found.in_use.max() == peak
    assert found.times[found.in_use.argmax()] == found.time
    assert any("/" in holder.part for holder in found.holders)


def memory(at: int, size: int, address: int, total: int, thread: int = 1) -> dict[str, Any]:
    args = {
        "Bytes": size,
        "Addr": address,
        "Total Allocated": total,
        "Total Reserved": 2 * total,
        "Device Type": 1,
        "Device Id": 0,
    }
    return {"ph": "i", "name": "[memory]", "pid": 1, "tid": thread, "ts": at / 1000, "args": args}


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 50)), min_size=1, max_size=30))
def test_generated_allocations(made: list[tuple[int, int]]) -> None:
    """Each entry allocates a block where it is free, else frees it: 1,000 bytes are from before."""
    events, live, total = [], {}, 1000
    for at, (address, size) in enumerate(made):
        change = -live.pop(address) if address in live else size
        if change > 0:
            live[address] = change
        total += change
        events.append(memory(at * 10, change, address, total))
        events.append(event("cpu_op", f"aten::op{address}", at * 10 - 1, 5, 1, 1))
    peak, kept = replayed(events)
    trace = trace_of(events)
    found = held_at_peak(trace, issued(trace))
    assert found is not None
    assert (found.allocated, found.before) == (peak, 1000)
    assert {holder.operator: holder.bytes for holder in found.holders} == {
        f"aten::op{a}": size for a, size in kept.items()
    }


def test_who_made_a_block() -> None:
    events = [
        event("python_function", "nn.Module: Net_0", 0, 1000, 1, 1),
        event("python_function", "nn.Module: Linear_4", 10, 500, 1, 1),
        event("cpu_op", "aten::mm", 20, 100, 1, 1),
        event("cpu_op", "aten::empty", 30, 20, 1, 1),
        memory(35, 512, 1, 512),
        memory(600, 256, 2, 768, thread=2),
        memory(700, -512, 1, 256),
    ]
    trace = trace_of(events)
    found = held_at_peak(trace, issued(trace))
    assert found is not None
    assert [(h.operator, h.part, h.bytes, h.blocks) for h in found.holders] == [
        ("aten::mm", "Net/Linear", 512, 1), ("", "", 256, 1),
    ]  # fmt: skip
    assert (found.time, found.reserved, found.before) == (600, 1536, 0)


def test_traces_without_addresses_or_without_memory() -> None:
    trace = read_trace(TRACES / "kineto/resnet50_2021_oldschema_memory.json.gz")
    found, told = held_at_peak(trace, issued(trace)), device_peak(trace)
    assert found is not None
    assert told is not None
    assert (found.allocated, found.before, found.holders) == (told.rise, -1, ())
    trace = trace_of([event("kernel", "k", 0, 5)])
    assert held_at_peak(trace, issued(trace)) is None


def frame(name: str, line: int, file: str = "jobs/me/train.py") -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


def snapshot(tmp_path: Path) -> Path:
    """Blocks of 100, 200 and 400 bytes: the second is freed, then a third comes; the fourth is freed at the end."""
    inner = frame("forward", 9, "/venv/site-packages/torch/nn/linear.py")
    history = [
        {"action": "segment_alloc", "addr": 0, "size": 1000, "frames": []},
        {"action": "alloc", "addr": 0, "size": 100, "frames": [inner, frame("embed", 3)]},
        {"action": "alloc", "addr": 100, "size": 200, "frames": [inner, frame("block", 5)]},
        {"action": "free_requested", "addr": 100, "size": 200, "frames": []},
        {"action": "free_completed", "addr": 100, "size": 200, "frames": []},
        {"action": "alloc", "addr": 300, "size": 400, "frames": [{"filename": "a.cpp", "line": 1, "name": "f"}]},
        {"action": "alloc", "addr": 100, "size": 150, "frames": [inner, frame("block", 5)]},
        {"action": "free_requested", "addr": 300, "size": 400, "frames": []},
        {"action": "free_completed", "addr": 300, "size": 400, "frames": []},
    ]
    blocks = [
        {
            "address": 0,
            "size": 100,
            "requested_size": 100,
            "state": "active_allocated",
            "frames": [inner, frame("embed", 3)],
        },
        {
            "address": 100,
            "size": 200,
            "requested_size": 150,
            "state": "active_awaiting_free",
            "frames": [inner, frame("block", 5)],
        },
        {"address": 300, "size": 700, "requested_size": 0, "state": "inactive", "frames": []},
    ]
    segments = [{"device": 1, "address": 0, "total_size": 1000, "blocks": blocks}]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [[], history]}))
    return path


def test_a_snapshot_by_lines_of_python(tmp_path: Path) -> None:
    (found,) = read_snapshot(snapshot(tmp_path))
    assert (found.device, found.peak, found.in_use, found.reserved, found.events) == (1, 650, 250, 1000, 9)
    assert found.holders == (
        ("not recorded", 400, 1), ("jobs/me/train.py:5 block", 150, 1), ("jobs/me/train.py:3 embed", 100, 1),
    )  # fmt: skip


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch broken-in",)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (pickle.dumps({"segments": [Evil()], "device_traces": []}), "asks for"),
        (b"", "cannot be read"),
        (b"{}", "cannot be read"),
        (pickle.dumps([1, 2]), "has no 'segments'"),
        (pickle.dumps({"segments": [1], "device_traces": []}), "unexpected form"),
        (pickle.dumps({"segments": [], "device_traces": [[{"no": 1}]]}), "unexpected form"),
    ],
)
def test_other_pickles_are_refused(content: bytes, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)
    with pytest.raises(InputError, match=told):
        read_snapshot(path)
    assert not (tmp_path / "broken-in").exists()


def test_a_timeline_by_category(tmp_path: Path) -> None:
    rows = [
        [-1, 1, 100, 0],
        [-1, 1, 50, 7],
        [10, 2, 30, 4],
        [20, 3, -100, 0],
        [20, 3, 100, 0],
        [30, 2, 500, 4],
        [40, 4, -30, 4],
    ]
    path = tmp_path / "timeline.raw.json.gz"
    path.write_bytes(gzip.compress(json.dumps(rows).encode()))
    found = read_timeline(path)
    assert (found.peak, found.time) == (680, 30)
    assert found.held == {"parameter": 100, "activation": 530, "unknown": 50}
    path.write_text("[[1, 2]]")
    with pytest.raises(InputError, match="is no list of"):
        read_timeline(path)
