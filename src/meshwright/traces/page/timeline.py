"""Timeline of ranks within a window, with few enough boxes to draw."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.job.across import Across
from meshwright.traces.page.perfetto import Window
from meshwright.traces.page.words import short_name
from meshwright.traces.rank.collectives import KINDS
from meshwright.traces.rank.device_activity import COMMUNICATES, COPIES, Work, work_of
from meshwright.traces.rank.kernel_classes import kernel_class
from meshwright.traces.reading import Trace

MOST = 3_000  # boxes in a rank's row
WAITING = "waiting for ranks"
Ints = NDArray[np.int64]


def timeline(
    traces: Iterable[tuple[int, Trace]], job: Across, window: Window, ahead: dict[int, int]
) -> list[dict[str, Any]]:
    """Return two rows per rank, computing and copies above communication: boxes [kind, start, end, label] in seconds."""
    rows: list[dict[str, Any]] = []
    for rank, trace in traces:
        works = work_of(trace)
        if works:
            shift = trace.base_ns - ahead.get(rank, 0) - window.start
            rows.append({"name": f"rank {rank}", "events": _computing(trace, works[0], window, shift)})
        if boxes := _exchange(job, job.ranks.index(rank), window):
            rows.append({"name": "  exchange", "events": boxes})
    return rows


def _exchange(job: Across, place: int, window: Window) -> list[list[Any]]:
    """Return each call as boxes, with waiting for other ranks separate."""
    aligned = job.aligned
    mine = slice(*aligned.matched.firsts[place : place + 2].tolist())
    begun = job.clocks.origin - window.start
    boxes: list[list[Any]] = []
    for start, end, waits, kind in zip(
        (aligned.start[mine] + begun).tolist(),
        (aligned.end[mine] + begun).tolist(),
        aligned.waiting[mine].tolist(),
        aligned.matched.kind[mine].tolist(),
        strict=True,
    ):
        if end > 0 and start < window.end - window.start:
            word = KINDS[kind].replace("_", "-")
            if waits:
                boxes.append([WAITING, start / 1e9, (start + waits) / 1e9, f"waits for others in {word}"])
            boxes.append([word, (start + waits) / 1e9, end / 1e9, word])
    return boxes[:MOST]


def _computing(trace: Trace, work: Work, window: Window, shift: int) -> list[list[Any]]:
    inside = (work.starts + shift < window.end - window.start) & (work.ends + shift > 0)
    return _boxes(trace, work.some(inside & (work.kind != COMMUNICATES)), shift)


def _boxes(trace: Trace, work: Work, shift: int) -> list[list[Any]]:
    """Return boxes of work; if there are too many, kernels of the same kind in close succession share one."""
    names = [trace.texts[number] for number in trace.events.name[work.rows]]
    kinds = [_kind(name, int(kind)) for name, kind in zip(names, work.kind, strict=True)]
    starts, ends = (work.starts + shift) / 1e9, (work.ends + shift) / 1e9
    near = 0.0
    while True:
        boxes: list[list[Any]] = []
        for name, kind, start, end in zip(names, kinds, starts.tolist(), ends.tolist(), strict=True):
            last = boxes[-1] if boxes else None
            if last and near and last[0] == kind and start - last[2] <= near:
                last[2] = max(last[2], end)
                last[4] += 1
            else:
                boxes.append([kind, start, end, short_name(name), 1])
        if len(boxes) <= MOST or near > 1:
            break
        near = 1e-6 if not near else near * 4  # seconds of a gap that is too small to see
    return [
        [kind, round(start, 9), round(end, 9), name if count == 1 else f"{count} kernels: {kind}"]
        for kind, start, end, name, count in boxes[:MOST]
    ]


def _kind(name: str, kind: int) -> str:
    return "copies" if kind == COPIES else kernel_class(name)
