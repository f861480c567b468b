"""A profiler trace of one rank, as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.reading.categories import Category
from meshwright.traces.reading.columns import Collectives, Events, Labels, Memory, Operators, Work


@dataclass(frozen=True)
class Track:
    """Row of the timeline: a thread of a process, or a stream (tid) of a device (pid)."""

    pid: int | float | str | None
    tid: int | float | str | None


@dataclass(frozen=True)
class Note:
    """Note on something that was left out of a trace or changed in it, with its count."""

    what: str
    count: int = 1

    def __str__(self) -> str:
        return self.what if self.count == 1 else f"{self.what} ({self.count} times)"


@dataclass(frozen=True, eq=False)
class Trace:
    """Contents of one file. `events` has a row per event; each other table has rows for some of them."""

    path: str
    rank: int | None  # None if unknown
    rank_from: str  # source of the rank
    header: dict[str, Any]  # everything beside the events, as parsed
    texts: tuple[str, ...]  # texts that columns refer to by index; the first is empty
    tracks: tuple[Track, ...]
    categories: dict[str, int]  # number of events by category word, "" for none
    events: Events
    work: Work
    collectives: Collectives
    memory: Memory
    labels: Labels
    operators: Operators
    notes: tuple[Note, ...]  # everything that was left out or changed
    text_bytes: int  # read, after unpacking

    @property
    def base_ns(self) -> int:
        """Nanoseconds to add to `events.ts` for the time since the epoch."""
        base = self.header.get("baseTimeNanoseconds", 0)
        return base if isinstance(base, int) else 0

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the job, None if the file does not tell."""
        told = self.header.get("distributedInfo")
        size = told.get("world_size") if isinstance(told, dict) else None
        return size if isinstance(size, int) else None

    def complete(self, *wanted: Category) -> NDArray[np.int64]:
        """Return the rows of events that have a duration and one of these categories."""
        chosen = np.zeros(len(self.events), np.bool_)
        for category in wanted:
            chosen |= self.events.category == category
        chosen &= self.events.phase == ord("X")
        return np.flatnonzero(chosen)
