"""Ascend's own trace: a list of events, times as text, device work told by its process. Figures are summed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from meshwright.traces.rank.device_activity import launches
from meshwright.traces.rank.timeline.breakdown import breakdown
from meshwright.traces.reading import NONE, Category, Trace
from meshwright.traces.reading.reading import Scanner
from tests.traces.traces_as_text import SCANNERS, read_text

START = 1694128201545000  # microseconds since the epoch
PYTHON, CANN, HARDWARE, COMMUNICATION, OVERLAP = 11, 12, 13, 14, 15


def named(pid: int, name: str, threads: dict[int, str] | None = None) -> list[dict[str, Any]]:
    return [
        {"name": "process_name", "pid": pid, "tid": 0, "ph": "M", "args": {"name": name}},
        *(
            {"name": "thread_name", "pid": pid, "tid": tid, "ph": "M", "args": {"name": thread}}
            for tid, thread in (threads or {}).items()
        ),
    ]


def event(name: str, pid: int, tid: int, at: float, dur: float, **more: Any) -> dict[str, Any]:
    ts = f"{START + int(at)}.{round(1000 * (at % 1)):03d}"
    return {"name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "ph": "X", "args": {}} | more


def flow(kind: str, number: int, source: tuple[int, int, str], target: tuple[int, int, str]) -> list[dict[str, Any]]:
    return [
        {"ph": phase, "name": f"{kind}{number}", "id": str(number), "cat": kind, "pid": pid, "tid": tid, "ts": ts}
        for phase, (pid, tid, ts) in (("s", source), ("f", target))
    ]


def made() -> list[dict[str, Any]]:
    launch = event("Node@launch", CANN, 1, 3.5, 2)
    matmul = event("aclnnMatmul_MatMulV3_MatMulV3", HARDWARE, 2, 10, 40, args={"Task Type": "AI_CORE", "Stream Id": 2})
    return [
        *named(PYTHON, "Python"),
        *named(CANN, "CANN"),
        *named(HARDWARE, "Ascend Hardware", {2: "Stream 2", 5: "Stream 5"}),
        *named(COMMUNICATION, "Communication", {0: "Group 0 Communication", 1: "Plane 0"}),
        *named(OVERLAP, "Overlap Analysis", {0: "Computing"}),
        event("ProfilerStep#3", PYTHON, 1, 0.001, 200),
        event("aten::mm", PYTHON, 1, 2, 5, cat="cpu_op"),
        launch,
        matmul,
        event("EVENT_WAIT", HARDWARE, 5, 10, 90, args={"Task Type": "EVENT_WAIT_SQE"}),
        event("NOTIFY_WAIT_SQE", HARDWARE, 5, 20, 90),
        event("aclnnAdd_Add_Add", HARDWARE, 2, 60, 20.5),
        event("MEMCPY_ASYNC", HARDWARE, 5, 100, 10),
        event("hcom_allReduce__583_0_1", COMMUNICATION, 0, 40, 30),
        event("hcom_broadcast__583_1_1", COMMUNICATION, 0, 120, 5.25),
        event("Notify_Wait", COMMUNICATION, 1, 40, 5),
        event("Reduce_Inline", COMMUNICATION, 1, 45, 20),
        event("Computing", OVERLAP, 0, 10, 70.5),
        *flow("async_npu", 7, (PYTHON, 1, f"{START + 2}.000"), (HARDWARE, 2, matmul["ts"])),
        *flow("HostToDevice", 4294967297, (CANN, 1, launch["ts"]), (HARDWARE, 2, matmul["ts"])),
    ]


@pytest.fixture(params=SCANNERS, ids=lambda kind: kind.__name__)
def trace(request: pytest.FixtureRequest) -> Trace:
    scanner: Callable[[], Scanner] = request.param
    return read_text(json.dumps(made()), scanner())


def kinds(trace: Trace) -> dict[str, Category]:
    events = trace.events
    complete = events.phase == ord("X")
    pairs = zip(events.name[complete], events.category[complete], strict=True)
    return {trace.texts[name]: Category(category) for name, category in pairs}


def test_events_are_what_their_process_says(trace: Trace) -> None:
    assert kinds(trace) == {
        "ProfilerStep#3": Category.ANNOTATION,
        "aten::mm": Category.OPERATOR,
        "Node@launch": Category.RUNTIME,
        "aclnnMatmul_MatMulV3_MatMulV3": Category.KERNEL,
        "EVENT_WAIT": Category.SYNC,
        "NOTIFY_WAIT_SQE": Category.SYNC,
        "aclnnAdd_Add_Add": Category.KERNEL,
        "MEMCPY_ASYNC": Category.MEMCPY,
        "hcom_allReduce__583_0_1": Category.KERNEL,
        "hcom_broadcast__583_1_1": Category.KERNEL,
        "Notify_Wait": Category.OTHER,
        "Reduce_Inline": Category.OTHER,
        "Computing": Category.OTHER,
    }
    assert trace.notes == ()


def test_times_are_exact(trace: Trace) -> None:
    row = [trace.texts[name] for name in trace.events.name].index("ProfilerStep#3")
    assert trace.events.ts[row] == START * 1000 + 1


def test_one_device_computes_and_communicates(trace: Trace) -> None:
    """Compute [10, 50) and [60, 80.5), collectives [40, 70) and [120, 125.25), a copy [100, 110)."""
    (device,) = breakdown(trace).devices
    shares = device.shares
    assert device.pid == HARDWARE
    assert (device.kernels, device.communication_kernels, device.events) == (4, 2, 5)
    assert shares.span == 115_250
    assert shares.compute == 60_500
    assert shares.communication == 35_250
    assert shares.overlap == 20_000
    assert shares.exposed_copies == 10_000
    assert shares.busy == 70_500 + 5_250 + 10_000
    (step,) = device.steps
    assert step.events == 5


def test_the_call_that_launched_a_task_is_known(trace: Trace) -> None:
    rows = trace.complete(Category.KERNEL)
    begun, returned = launches(trace, rows)
    assert begun.tolist() == [START * 1000 + 3_500, NONE, NONE, NONE]
    assert returned[0] == START * 1000 + 5_500


def test_the_older_name_of_communication() -> None:
    text = json.dumps(made()).replace('"Communication"', '"HCCL"')
    (device,) = breakdown(read_text(text, SCANNERS[0]())).devices
    assert device.shares.communication == 35_250
