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
    """A line of the timeline: a thread of a process, or a stream (tid) of a device (pid)."""

    pid: int | float | str | None
    tid: int | float | str | None


@dataclass(frozen=True)
class Note:
    """Something that was left out of a trace or changed in it, and how often."""

    what: str
    count: int = 1

    def __str__(self) -> str:
        return self.what if self.count == 1 else f"{self.what} ({self.count} times)"


@dataclass(frozen=True, eq=False)
class Trace:
    """What one file holds. `events` has a row per event; each other table has rows for some of them."""

    path: str
    rank: int | None  # None where nothing tells it
    rank_from: str  # what told it
    header: dict[str, Any]  # everything beside the events, as parsed
    texts: tuple[str, ...]  # what columns of texts count in; the first is empty
    tracks: tuple[Track, ...]
    categories: dict[str, int]  # how many events each word had as its category, "" for none
    events: Events
    work: Work
    collectives: Collectives
    memory: Memory
    labels: Labels
    operators: Operators
    notes: tuple[Note, ...]  # nothing was left out or changed but this
    text_bytes: int  # read, after unpacking

    @property
    def base_ns(self) -> int:
        """What to add to `events.ts` for nanoseconds since the epoch."""
        base = self.header.get("baseTimeNanoseconds", 0)
        return base if isinstance(base, int) else 0

    @property
    def world_size(self) -> int | None:
        """How many ranks the job has, None where the file does not tell."""
        told = self.header.get("distributedInfo")
        size = told.get("world_size") if isinstance(told, dict) else None
        return size if isinstance(size, int) else None

    def complete(self, *wanted: Category) -> NDArray[np.int64]:
        """Rows of the events that have a duration and are of one of these categories."""
        chosen = np.zeros(len(self.events), np.bool_)
        for category in wanted:
            chosen |= self.events.category == category
        chosen &= self.events.phase == ord("X")
        return np.flatnonzero(chosen)
