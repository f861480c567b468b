"""Export one step of some ranks as a Chrome trace for ui.perfetto.dev, with aligned clocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.traces.reading import NONE, Category, Trace

Ints = NDArray[np.int64]
SHOWN = (
    Category.KERNEL, Category.MEMCPY, Category.MEMSET, Category.OPERATOR, Category.ANNOTATION, Category.DEVICE_ANNOTATION,
    Category.RUNTIME, Category.DRIVER, Category.PYTHON,
)  # fmt: skip
ON_DEVICE = (Category.KERNEL, Category.MEMCPY, Category.MEMSET, Category.DEVICE_ANNOTATION)
MOST = 100_000  # events per rank, for a page that opens at once; the shortest on the host are left out first


@dataclass(frozen=True)
class Window:
    """Time window of a job, in nanoseconds since the epoch on the first rank's clock."""

    start: int
    end: int
    ranks: tuple[int, ...]
    why: str


def merged(traces: Iterable[tuple[int, Trace]], window: Window, ahead: Mapping[int, int]) -> bytes:
    """Return a Chrome trace of ranks within a window.

    `ahead` is the number of nanoseconds by which each rank's clock is ahead.
    """
    events: list[dict[str, Any]] = []
    left_out: dict[str, int] = {}
    for rank, trace in traces:
        rows, dropped = _rows(trace, window, ahead.get(rank, 0))
        left_out |= {f"rank {rank}": dropped} if dropped else {}
        events += _events(rank, trace, rows, window, ahead.get(rank, 0))
    about = {"window": window.why, "shortest host events left out": left_out}
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def _rows(trace: Trace, window: Window, ahead: int) -> tuple[Ints, int]:
    rows = trace.complete(*SHOWN)
    shift = trace.base_ns - ahead
    starts = trace.events.ts[rows] + shift
    rows = rows[(starts < window.end) & (starts + trace.events.dur[rows] > window.start)]
    if len(rows) <= MOST:
        return rows, 0
    on_device = np.isin(trace.events.category[rows], ON_DEVICE)
    room = max(MOST - int(on_device.sum()), 0)
    host = rows[~on_device]
    longest = host[np.argsort(-trace.events.dur[host], kind="stable")[:room]]
    kept = np.sort(np.concatenate([rows[on_device], longest]))
    return kept, len(rows) - len(kept)


def _events(rank: int, trace: Trace, rows: Ints, window: Window, ahead: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    events, shift = trace.events, trace.base_ns - ahead - window.start
    lines: dict[int, int] = {}
    flows = _flows(trace, rows)
    for row in rows.tolist():
        track, category = int(events.track[row]), Category(int(events.category[row]))
        if track not in lines:
            lines[track] = len(lines) + 1
            place = trace.tracks[track]
            called = f"device {place.pid} stream {place.tid}" if category in ON_DEVICE else f"thread {place.tid}"
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lines[track], "args": {"name": called}}
        ts = (int(events.ts[row]) + shift) / 1e3  # us since the window's start
        place_of = {"pid": rank, "tid": lines[track], "ts": ts}
        what = {"ph": "X", "cat": category.name.lower(), "name": trace.texts[events.name[row]]}
        yield what | place_of | {"dur": int(events.dur[row]) / 1e3}
        if row in flows:
            begins = category in (Category.RUNTIME, Category.DRIVER)
            yield place_of | {
                "ph": "s" if begins else "f", "id": f"{rank}.{flows[row]}", "name": "launch", "cat": "launch", "bp": "e",
            }  # fmt: skip


def _flows(trace: Trace, rows: Ints) -> dict[int, int]:
    """Return flow numbers by row: they join launches and launched work, if both are shown."""
    launches = rows[np.isin(trace.events.category[rows], (Category.RUNTIME, Category.DRIVER))]
    work = rows[np.isin(trace.events.category[rows], ON_DEVICE[:3])]
    both = np.intersect1d(trace.events.link[launches], trace.events.link[work])
    both = both[both != NONE]
    joined = np.concatenate([launches, work])
    joined = joined[np.isin(trace.events.link[joined], both)]
    return dict(zip(joined.tolist(), trace.events.link[joined].tolist(), strict=True))
