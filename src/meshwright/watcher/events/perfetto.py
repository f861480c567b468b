"""Events as a Chrome trace, which Perfetto and chrome://tracing show: a process per rank, a row per thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from meshwright.watcher.events.events import Event


def trace_of(events: Iterable[Event]) -> str:
    """Return JSON with times in microseconds since the first event."""
    return msgspec.json.encode({"traceEvents": list(_rows(list(events))), "displayTimeUnit": "ms"}).decode()


def _rows(events: list[Event]) -> Iterator[dict[str, Any]]:
    first = min((event.time for event in events), default=0)
    threads: dict[tuple[int, str], int] = {}
    for rank in sorted({event.rank for event in events}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    for event in events:
        if event.event in ("start", "stop"):
            continue
        tid = threads.get((event.rank, event.thread))
        if tid is None:
            tid = threads[event.rank, event.thread] = 1 + sum(rank == event.rank for rank, _ in threads)
            yield {"ph": "M", "name": "thread_name", "pid": event.rank, "tid": tid, "args": {"name": event.thread}}
        yield _row(event, tid, first)


def _row(event: Event, tid: int, first: int) -> dict[str, Any]:
    kinds = {"run": "B", "resume": "B", "end": "E", "yield": "E", "raise": "E"}
    told = {"at": event.at, "text": event.text, "old": event.old, "new": event.new}
    args = {key: value for key, value in told.items() if value not in ("", None)}
    if event.event in ("raise", "yield"):
        args[event.event] = event.text or "yes"
    row = {"ph": kinds.get(event.event, "i"), "name": event.name, "pid": event.rank, "tid": tid,
           "ts": (event.time - first) / 1e3, "args": args}  # fmt: skip
    if row["ph"] == "i":
        row |= {"name": f"{event.event} {event.name}", "s": "t"}
    return row
