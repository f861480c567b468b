"""Events of a watch, one JSON object per line, and merging of the streams of several ranks."""

from __future__ import annotations

import glob
import heapq
import os
import re
from collections.abc import Iterable, Sequence

import msgspec

from meshwright.errors import InputError


class Event(msgspec.Struct, gc=False, omit_defaults=True):
    """Event of a watch; `event` is one of start, run, end, yield, resume, raise, set, del, note, stop."""

    event: str
    time: int  # nanoseconds since 1970
    rank: int
    thread: str
    depth: int  # number of enclosing calls
    name: str
    at: str = ""  # file:line
    duration: int | None = None  # nanoseconds since its run or resume
    old: str | None = None
    new: str | None = None
    text: str = ""  # text of the wrapper or of an exception


class Empty(InputError):
    """Error: a stream has no event."""


def json_of(event: Event) -> str:
    return msgspec.json.encode(event).decode()


def stream_path(name: str, rank: int) -> str:
    """Return the path of a rank's stream.

    >>> stream_path("run", 3)
    'run.rank3.jsonl'
    """
    return f"{name}.rank{rank}.jsonl"


def find(words: Sequence[str]) -> list[str]:
    """Return the named files; a name that is no file stands for all streams NAME.rank*.jsonl."""
    found: list[str] = []
    for word in words:
        streams = (
            [word] if os.path.isfile(word) else sorted(glob.glob(f"{glob.escape(word)}.rank*.jsonl"), key=_natural)
        )
        if not streams:
            raise InputError(f"no such file, and no '{word}.rank*.jsonl'", field=word)
        found += [stream for stream in streams if stream not in found]
    return found


def _natural(path: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]


def read(path: str) -> list[Event]:
    """Read the events of one stream; an incomplete last line, cut off at the end of its process, is skipped."""
    decoder = msgspec.json.Decoder(Event)
    with open(path, "rb") as file:
        lines = file.read().split(b"\n")
    events = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            events.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if number == len(lines):
                break
            raise InputError(f"is no event of a watch: {error}", file=path, line=number, column=1) from None
    if not events:
        raise Empty("holds no events", file=path)
    return events


def merged(paths: Iterable[str], empty: list[str] | None = None) -> list[Event]:
    """Merge streams by time, keeping the order within each stream.

    A process that only started the ranks, and has a rank's number because it got no other, becomes -1. Streams without
    events, of processes that ended while they began to write, go to `empty`; the others can still be read.
    """
    streams = _streams(paths, [] if empty is None else empty)
    ranks: dict[int, set[int]] = {}  # process -> ranks of its child processes
    for events in streams:
        if family := _family(events[0]):
            ranks.setdefault(family[1], set()).add(events[0].rank)
    for events in streams:
        family = _family(events[0])
        if family and events[0].rank in ranks.get(family[0], ()) and not _has_helpers(streams, family[0]):
            for event in events:
                event.rank = -1
    return list(heapq.merge(*streams, key=lambda event: event.time))


def _streams(paths: Iterable[str], empty: list[str]) -> list[list[Event]]:
    streams, problem = [], None
    for path in paths:
        try:
            streams.append(read(path))
        except Empty as found:
            empty.append(path)
            problem = problem or found
    if problem is not None and not streams:
        raise problem
    return streams


def rank_named(path: str) -> int | None:
    """Return the rank in the name of a stream, or None.

    >>> rank_named("run.rank3.jsonl"), rank_named("run.rank0.pid17.jsonl"), rank_named("other.jsonl")
    (3, 0, None)
    """
    found = re.search(r"\.rank(\d+)(\.pid\d+)?\.jsonl$", path)
    return int(found[1]) if found else None


def _family(start: Event) -> tuple[int, int] | None:
    found = re.match(r"pid (\d+), parent (\d+)", start.text) if start.event == "start" else None
    return (int(found[1]), int(found[2])) if found else None


def _has_helpers(streams: list[list[Event]], process: int) -> bool:
    """Return True if child processes are helpers of this one's rank: their threads have the process's name."""
    mine = [events for events in streams if (family := _family(events[0])) and family[1] == process]
    return any("/" in event.thread for events in mine for event in events[1:2])
