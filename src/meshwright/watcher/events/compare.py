"""Find the first difference between two ranks: their events side by side, without times and addresses, by thread."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from meshwright.errors import InputError
from meshwright.watcher.events.events import Event
from meshwright.watcher.events.text import words_of

_CONTEXT = 4  # events shown before the difference
_CALLS = frozenset({"run", "end", "yield", "resume", "raise"})
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_DEVICE = re.compile(r"\b(cuda|xpu|npu|hpu|mtia):\d+")
_RANK = re.compile(r"\b(\w*rank\w*=)(\d+)\b")


@dataclass(frozen=True, slots=True)
class Parting:
    """First events that differ; None if a rank has no more."""

    thread: str
    position: int  # calls, ends, raises ... of this thread before it
    path: tuple[str, ...]  # calls that enclose both events
    before: tuple[Event, ...]  # the last events that are equal
    left: Event | None
    right: Event | None


@dataclass(frozen=True, slots=True)
class Comparison:
    ranks: tuple[int, int]
    calls: int  # equal runs and resumes, over all threads
    flow: Parting | None  # the first different call, over all threads
    values: tuple[tuple[Event | None, Event | None], ...] = field(
        default=()
    )  # first difference of each name before that call

    @property
    def same(self) -> bool:
        return self.flow is None and not self.values


def compare(events: Iterable[Event], left: int, right: int) -> Comparison:
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        by_rank.setdefault(event.rank, []).append(event)
    for rank in (left, right):
        if rank not in by_rank:
            raise InputError(f"there is no rank {rank}", field="--diff", valid=", ".join(map(str, sorted(by_rank))))
    a, b = _threads(by_rank[left]), _threads(by_rank[right])
    partings, values, calls = [], list[tuple[Event | None, Event | None]](), 0
    for thread in dict.fromkeys([*a, *b]):
        parting, same, differing = _thread(thread, a.get(thread, []), b.get(thread, []))
        calls += same
        values += differing
        if parting is not None:
            partings.append(parting)
    flow = min(partings, key=_when, default=None)
    values = [pair for pair in values if flow is None or _time(*pair) <= _when(flow)]
    return Comparison((left, right), calls, flow, tuple(sorted(values, key=lambda pair: _time(*pair))))


def _threads(events: Sequence[Event]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {}
    for event in events:
        if event.event not in ("start", "stop"):
            found.setdefault(event.thread, []).append(event)
    return found


def _thread(
    name: str, left: list[Event], right: list[Event]
) -> tuple[Parting | None, int, list[tuple[Event | None, Event | None]]]:
    """Compare one thread: align calls one by one, and between two of them changes of values by their names."""
    a, b = _calls(left), _calls(right)
    differing: dict[tuple[str, str], tuple[Event | None, Event | None]] = {}
    path: list[str] = []
    before = deque[Event](maxlen=_CONTEXT)  # equal events
    same = 0
    for i in range(max(len(a), len(b))):
        first, ours = a[i] if i < len(a) else (None, [])
        second, theirs = b[i] if i < len(b) else (None, [])
        parting = (first or second) and (first is None or second is None or _flow(first) != _flow(second))
        before += _both(ours, theirs)
        for pair in _values(ours, theirs):
            event = pair[0] or pair[1]
            assert event is not None
            if not parting or None not in pair:  # else the other rank may do it later, on a way of its own
                differing.setdefault((event.event, event.name), pair)
        if parting:
            return Parting(name, i, tuple(path), tuple(before), first, second), same, list(differing.values())
        if first is None or second is None:
            continue  # after the last call
        before.append(first)
        if first.text != second.text and _plain(first.text, first.rank) != _plain(second.text, second.rank):
            differing.setdefault((first.event, first.name), (first, second))
        if first.event in ("run", "resume"):
            same += 1
            path.append(first.name)
        elif path:
            path.pop()
    return None, same, list(differing.values())


def _calls(events: list[Event]) -> list[tuple[Event | None, list[Event]]]:
    """Return each call event with the changes of values before it; the last has no call."""
    found: list[tuple[Event | None, list[Event]]] = []
    changes: list[Event] = []
    for event in events:
        if event.event in _CALLS:
            found.append((event, changes))
            changes = []
        else:
            changes.append(event)
    return [*found, (None, changes)] if changes else found


def _both(left: list[Event], right: list[Event]) -> Iterable[Event]:
    """Yield changes of the same names in the same order, up to the first difference."""
    pairs = zip(left, right, strict=False)
    return (one for one, _ in takewhile(lambda pair: _named(pair[0]) == _named(pair[1]), pairs))


def _named(event: Event) -> tuple[str, str]:
    return event.event, event.name


def _values(left: list[Event], right: list[Event]) -> Iterable[tuple[Event | None, Event | None]]:
    for i in range(max(len(left), len(right))):
        one, other = left[i] if i < len(left) else None, right[i] if i < len(right) else None
        if one is None or other is None or _change(one) != _change(other):
            yield one, other
            if one is None or other is None or one.name != other.name:
                return  # later changes are not comparable


def _flow(event: Event) -> tuple[str, str, int]:
    return event.event, event.name, event.depth


def _change(event: Event) -> tuple[str, ...]:
    own = "rank" in event.name.lower() and event.new == str(event.rank)
    new = "its rank" if own else _plain(event.new or "", event.rank)
    return event.event, event.name, new, _plain(event.text, event.rank)


def _plain(text: str, rank: int) -> str:
    """Return a text without what must differ: addresses, device numbers, and the rank's own number where it is named."""
    text = _DEVICE.sub(r"\1", _ADDRESS.sub("0x", text))
    return _RANK.sub(lambda found: f"{found[1]}its" if int(found[2]) == rank else found[0], text)


def _time(*pair: Event | None) -> int:
    return min(event.time for event in pair if event is not None)


def _when(parting: Parting) -> int:
    return _time(parting.left, parting.right)


def json_of(found: Comparison) -> str:
    """Return the result as JSON."""
    return msgspec.json.encode({"same": found.same, **msgspec.to_builtins(found)}).decode()


def lines_of(found: Comparison) -> list[str]:
    """Return the result as lines for people."""
    a, b = found.ranks
    if found.same:
        return [f"ranks {a} and {b} do the same: {found.calls} calls"]
    lines = []
    if found.values:
        lines.append("values that differ, the first of each:")
        for left, right in found.values[:10]:
            lines += [f"  rank {a}: {_said(left)}", f"  rank {b}: {_said(right)}"]
        if len(found.values) > 10:
            lines.append(f"  and {len(found.values) - 10} more")
    if found.flow is None:
        return [f"ranks {a} and {b} make the same {found.calls} calls, with other values", *lines]
    flow = found.flow
    inside = f", inside {' > '.join(flow.path)}" if flow.path else ""
    thread = f" of thread {flow.thread}" if flow.thread != "MainThread" else ""
    lines += [f"ranks {a} and {b} part ways after {found.calls} equal calls{thread}{inside}:"]
    lines += [f"    both:   {event.event} {event.name}" for event in flow.before]
    lines += [f"  > rank {a}: {_said(flow.left)}", f"  > rank {b}: {_said(flow.right)}"]
    return lines


def _said(event: Event | None) -> str:
    return words_of(event) if event is not None else "nothing"
