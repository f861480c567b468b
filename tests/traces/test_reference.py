"""Every figure that an independent script computed from real traces, with plain interval unions over json.loads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.traces.rank.memory.memory import device_peak
from meshwright.traces.rank.timeline.breakdown import Device, breakdown
from meshwright.traces.rank.timeline.steps import host_steps
from meshwright.traces.reading import NONE, Category, Trace, read_trace
from tests.conftest import ROOT

TRACES = ROOT / "tests/data/traces"
REFERENCE: dict[str, Any] = json.loads((TRACES / "reference.json").read_text())
HERE = sorted(name for name in REFERENCE if (TRACES / name).exists())
NAMED_LIBRARIES = re.compile("nccl|rccl", re.I)  # what the reference calls communication


def figures(trace: Trace) -> Iterator[tuple[str, Any]]:
    """Ours, by the names of the reference."""
    yield "events", len(trace.events)
    yield "events_by_cat", {word or "None": count for word, count in trace.categories.items()}
    yield "steps", [f"ProfilerStep#{step.number}" for step in sorted(host_steps(trace), key=lambda step: step.number)]
    yield "bytes_raw", trace.text_bytes
    devices = trace.header.get("deviceProperties") or [{}]
    yield "gpu", devices[0].get("name")
    peak = device_peak(trace)
    if peak:
        yield "peak_gpu_total_allocated_bytes", peak.allocated
        yield "peak_gpu_total_reserved_bytes", peak.reserved
        yield "gpu_memory_events", peak.events
        on_device = (trace.memory.device_type != 0) & (trace.memory.bytes != NONE)
        yield "peak_gpu_running_sum_of_Bytes", int(np.cumsum(trace.memory.bytes[on_device]).max())
    told = trace.header.get("distributedInfo")
    yield (
        "distributedInfo",
        told and {key: told[key] for key in ("backend", "rank", "world_size", "pg_count") if key in told},
    )
    found = breakdown(trace, NAMED_LIBRARIES)
    yield "devices", {str(device.pid): dict(device_figures(trace, device)) for device in found.devices}


def device_figures(trace: Trace, device: Device) -> Iterator[tuple[str, float]]:
    shares = device.shares
    yield "gpu_events", device.events
    yield "kernels", device.kernels
    yield "comm_kernels", device.communication_kernels
    yield "streams", device.streams
    yield "span_us", shares.span / 1000
    yield "busy_us", shares.busy / 1000
    yield "idle_us", shares.idle / 1000
    yield "compute_us", shares.compute / 1000
    yield "comm_us", shares.communication / 1000
    yield "memops_us", shares.copies / 1000
    yield "overlap_comm_compute_us", shares.overlap / 1000
    yield "exposed_comm_vs_compute_us", shares.exposed / 1000
    yield "kernel_dur_sum_us", device.kernel_time / 1000
    rows = trace.collectives.row[trace.collectives.name > 0]
    on_kernels = trace.events.category[rows] == Category.KERNEL
    pids = np.array([track.pid == device.pid for track in trace.tracks])
    yield "collectives_with_args", int((on_kernels & pids[trace.events.track[rows]]).sum())


def differences(path: Path, wanted: dict[str, Any]) -> list[str]:
    """Figures of a file that are further off than 1 microsecond and 0.01 %, or not exactly right where they count."""
    trace = read_trace(path)
    ours = dict(figures(trace))
    theirs = {key: value for key, value in wanted.items() if key != "bytes_gz"}
    found = [
        f"{key}: {ours.get(key)} is not {theirs.get(key)}"
        for key in ours | theirs
        if not same(ours.get(key), theirs.get(key))
    ]
    return found + [str(note) for note in trace.notes]


def same(ours: Any, theirs: Any, key: str = "") -> bool:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key], key) for key in theirs)
    if key.endswith("_us"):
        return bool(abs(ours - theirs) <= max(1, 1e-4 * abs(theirs)))
    return bool(ours == theirs)


@pytest.mark.parametrize("name", HERE)
def test_figures_of_a_real_trace(name: str) -> None:
    assert differences(TRACES / name, REFERENCE[name]) == []


@pytest.mark.parametrize(
    "name", [name for name in HERE if REFERENCE[name].get("peak_gpu_total_allocated_bytes", -1) > 0]
)
def test_memory_rises_by_as_much_as_the_totals_say(name: str) -> None:
    """The reference sums bytes in the order of the file; what is in use depends on the order in time."""
    trace = read_trace(TRACES / name)
    memory = trace.memory
    mine = np.flatnonzero(memory.device_type != 0)
    first = mine[np.argmin(trace.events.ts[memory.row[mine]])]
    before = memory.allocated[first] - memory.bytes[first]
    peak = device_peak(trace)
    assert peak is not None
    assert peak.rise == peak.allocated - before


def test_communication_is_more_than_nccl() -> None:
    trace = read_trace(TRACES / "tracelens/b200_8rank_rank0_tp_inference.json.gz")
    (device,) = breakdown(trace).devices
    assert device.shares.communication / 1000 == pytest.approx(
        2141, abs=1
    )  # 2,119.5 of it in multimem_all_reduce_kernel


def test_the_files_are_there() -> None:
    assert len(HERE) >= 20
    assert any(REFERENCE[name].get("gpu_memory_events") for name in HERE)
