"""Events as lines for people: time, rank, thread, indent, what happened."""

from __future__ import annotations

from datetime import datetime

from meshwright.watcher.events.events import Event

MAIN = "MainThread"


def line_of(event: Event) -> str:
    """Return an event as one line for people.

    >>> line_of(Event("set", 10**18, 0, "MainThread", 1, "Counter.n", "count.py:7", old="1", new="2"))[16:]
    'r0   set Counter.n  1 -> 2  count.py:7'
    """
    clock = datetime.fromtimestamp(event.time // 10**9).strftime("%H:%M:%S")
    head = f"{clock}.{event.time // 1000 % 10**6:06d} r{event.rank} "
    if event.thread not in (MAIN, ""):
        head += f"[{event.thread}] "
    return head + "  " * event.depth + words_of(event)


def words_of(event: Event) -> str:
    """Return what happened, without the time and the position in the call tree."""
    parts = [f"{event.event} {event.name}"]
    if event.event == "set":
        parts.append(f"{event.old} -> {event.new}" if event.old is not None else f"= {event.new}")
    elif event.event == "del":
        parts.append(f"was {event.old}")
    parts += [event.text, event.at if event.event != "end" else "", took(event.duration)]
    return "  ".join(part for part in parts if part)


def took(nanoseconds: int | None) -> str:
    """Return a duration as text.

    >>> took(1500), took(2_500_000), took(None)
    ('1.5 us', '2.5 ms', '')
    """
    if nanoseconds is None:
        return ""
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.4g} {unit}"
    return f"{nanoseconds / 1e3:.4g} us"
