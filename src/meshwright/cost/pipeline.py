"""One step of a pipeline, event by event: when each group starts and ends each action, and where it waits.

Exact for any schedule, any stage times, micro-batches of different cost, and transfers between groups. Where closed
forms hold (equal stages, free transfers) it equals them: GPipe and 1F1B take (m + p - 1)(f + b), the interleaved form
(m v + p - 1)(f + b) with f and b the times of one of its stages (Narayanan et al., 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.errors import InputError
from meshwright.plan.actions import ActionTable
from meshwright.plan.schedule import Action

Duration = Callable[[Action], float]
Transfer = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Event:
    """One action of one device group, in seconds from the start of the step."""

    group: int
    stage: int
    kind: str  # F, B, or its halves I and W
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Every event of a step, in the order of each group."""

    events: tuple[Event, ...]
    groups: int

    @property
    def seconds(self) -> float:
        """From the first action to the last."""
        return max(event.end for event in self.events)

    def busy(self, group: int) -> float:
        return sum(event.end - event.start for event in self.events if event.group == group)

    def bubble(self, group: int) -> float:
        """The part of the step in which a group waits."""
        return 1 - self.busy(group) / self.seconds


def simulate(table: ActionTable, duration: Duration, transfer: Transfer = lambda a, b: 0.0) -> Timeline:
    """Run a table of actions. `duration` times one action; `transfer` what passes between two stages' groups.

    >>> from meshwright.plan import Schedule
    >>> from meshwright.plan.actions import action_table
    >>> table = action_table(Schedule(name="1f1b"), groups=4, micro_batches=8)
    >>> simulate(table, lambda action: 1.0 if action[1] == "F" else 2.0).seconds  # (8 + 4 - 1) x (1 + 2)
    33.0
    """
    done = _Done(table, transfer)
    clock, position = [0.0] * len(table), [0] * len(table)
    events: list[list[Event]] = [[] for _ in table]
    moved = True
    while moved:
        moved = False
        for group, row in enumerate(table):
            while position[group] < len(row) and (earliest := done.ready(row[position[group]])) is not None:
                action = row[position[group]]
                start = max(clock[group], earliest)
                clock[group] = done.ends[action] = start + duration(action)
                events[group].append(Event(group, *action, start, clock[group]))
                position[group] += 1
                moved = True
    waiting = [row[at] for row, at in zip(table, position, strict=True) if at < len(row)]
    if waiting:
        raise InputError(f"the table never gets past {''.join(map(str, waiting[0]))}: it waits for what comes later")
    return Timeline(tuple(event for row in events for event in row), len(table))


class _Done:
    """What has run, and from when its results can be used."""

    def __init__(self, table: ActionTable, transfer: Transfer) -> None:
        self.ends: dict[Action, float] = {}
        self._home = {action[0]: group for group, row in enumerate(table) for action in row}
        self._last = max(self._home)
        self._transfer = transfer

    def arrival(self, source: Action, stage: int) -> float | None:
        """When the result of an action reaches a stage; None while it has not run."""
        if source not in self.ends:
            return None
        apart = self._home[source[0]] != self._home[stage]
        return self.ends[source] + (self._transfer(source[0], stage) if apart else 0.0)

    def ready(self, action: Action) -> float | None:
        """The earliest start that its inputs allow; None while one is missing."""
        stage, kind, m = action
        if kind == "F":
            return 0.0 if stage == 0 else self.arrival((stage - 1, "F", m), stage)
        if kind == "W":
            return self.arrival((stage, "I", m), stage)
        own = self.arrival((stage, "F", m), stage)
        if own is None or stage == self._last:
            return own
        after = [t for half in ("B", "I") if (t := self.arrival((stage + 1, half, m), stage)) is not None]
        return max(own, after[0]) if after else None


def chrome_trace(timeline: Timeline) -> list[dict[str, object]]:
    """The timeline in the format of Chrome's and Perfetto's trace viewers; times in microseconds."""
    names = {"F": "forward", "B": "backward", "I": "backward (inputs)", "W": "backward (weights)"}
    return [
        {
            "name": f"{names[event.kind]} {event.micro_batch}",
            "cat": names[event.kind],
            "ph": "X",
            "pid": 0,
            "tid": event.group,
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "args": {"stage": event.stage, "micro_batch": event.micro_batch},
        }
        for event in timeline.events
    ]
