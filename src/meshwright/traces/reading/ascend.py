"""Traces of Ascend's profiler (torch_npu, `trace_view.json`), with events classified by the listed process.

Device work has no `cat` there.

- `Ascend Hardware` lists tasks by stream.
- `Communication` (formerly `HCCL`) lists the collectives of the same device, and below them the steps of each, which
  are no further work.
- `CANN` lists calls of the runtime; flows called HostToDevice lead from such a call to the task it launched.
- `Overlap Analysis` repeats what can be computed.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.reading.categories import Category
from meshwright.traces.reading.columns import NONE
from meshwright.traces.reading.trace import Trace, Track

HARDWARE, COMMUNICATION, RUNTIME, HOST = "Ascend Hardware", ("Communication", "HCCL"), "CANN", "Python"
# Tasks without work on a stream, and those that only copy.
WAIT = re.compile(r"(?:CAPTURE_)?(?:EVENT|NOTIFY|MODEL|LABEL|STREAM|WRITE_VALUE|PLACE_HOLDER|PROFILER)(?:_\w+)?$")
COPY = re.compile(r"(?:MEMCPY|SDMA|PCIE_DMA)", re.I)
COLLECTIVE = re.compile(r"hcom", re.I)
STEP = re.compile(r"ProfilerStep#")
LONGEST = 1 << 44  # ns: 4.9 hours, longer than any trace; flows are keyed by track and time in one number


def is_ascend(trace: Trace) -> bool:
    """Return True if a trace lists hardware of Ascend."""
    return HARDWARE in trace.texts and HARDWARE in processes(trace).values()


def processes(trace: Trace) -> dict[int | float | str | None, str]:
    """Return the names of processes by pid."""
    names = trace.events.name[trace.labels.row]
    return {
        trace.tracks[trace.events.track[row]].pid: trace.texts[label]
        for row, name, label in zip(trace.labels.row, names, trace.labels.name, strict=True)
        if trace.texts[name] == "process_name"
    }


def refined(trace: Trace) -> Trace:
    """Return the trace with categories for all its events, and with collectives moved to their device."""
    called = processes(trace)
    process = np.array([_kind(called.get(track.pid, "")) for track in trace.tracks])[trace.events.track]
    rows = np.flatnonzero((trace.events.phase == ord("X")) & (trace.events.category == Category.OTHER))
    names, process = trace.events.name[rows], process[rows]
    category = trace.events.category.copy()
    category[rows[process == HARDWARE]] = Category.KERNEL
    category[rows[(process == HARDWARE) & _named(trace, COPY)[names]]] = Category.MEMCPY
    category[rows[(process == HARDWARE) & _named(trace, WAIT)[names]]] = Category.SYNC
    category[rows[(process == COMMUNICATION[0]) & _named(trace, COLLECTIVE)[names]]] = Category.KERNEL
    category[rows[process == RUNTIME]] = Category.RUNTIME
    category[rows[process == HOST]] = Category.OPERATOR
    category[rows[(process == HOST) & _named(trace, STEP)[names]]] = Category.ANNOTATION
    found = replace(trace, events=replace(trace.events, category=category))
    return _one_device(_linked(found), called)


def _kind(process: str) -> str:
    return COMMUNICATION[0] if process in COMMUNICATION else process


def _named(trace: Trace, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    return np.array([pattern.match(text) is not None for text in trace.texts], np.bool_)


def _one_device(trace: Trace, called: dict[int | float | str | None, str]) -> Trace:
    """Move collectives, which are listed under a process of their own, to a stream of their device."""
    devices = [pid for pid, name in called.items() if name == HARDWARE]
    if len(devices) != 1:
        return trace
    tracks = tuple(
        Track(devices[0], f"{called[track.pid]} {track.tid}") if called.get(track.pid) in COMMUNICATION else track
        for track in trace.tracks
    )
    return replace(trace, tracks=tracks)


def _linked(trace: Trace) -> Trace:
    """Link the events at the two ends of each flow: both get the flow's id."""
    events = trace.events
    flows = _named(trace, re.compile("HostToDevice"))[events.name]
    link = events.link.copy()
    for phase, categories in (
        ("s", (Category.RUNTIME,)),
        ("f", (Category.KERNEL, Category.MEMCPY)),
    ):
        ends = np.flatnonzero(flows & (events.phase == ord(phase)) & (events.ts != NONE))
        rows = trace.complete(*categories)
        rows = rows[link[rows] == NONE]
        if not len(ends) or not len(rows):
            return trace
        first = min(int(events.ts[ends].min()), int(events.ts[rows].min()))
        ids, places = (
            events.track[some].astype(np.int64) * LONGEST + (events.ts[some] - first) for some in (ends, rows)
        )
        order = np.argsort(ids, kind="stable")
        near = order[np.minimum(np.searchsorted(ids[order], places), len(ids) - 1)]
        same = ids[near] == places
        link[rows[same]] = events.link[ends[near[same]]]
    return replace(trace, events=replace(events, link=link))
