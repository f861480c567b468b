"""Simulate one step of a pipeline: start, end and waiting of every action of each group.

The result is exact for any schedule, any stage times, micro-batches of different cost, and transfers between groups.
With equal stages and free transfers it equals the closed forms (Narayanan et al., 2021):

- GPipe and 1F1B take (m + p - 1)(f + b)
- the interleaved form takes (m v + p - 1)(f + b), with f and b the times of one of its stages
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshwright.errors import InputError
from meshwright.plans.action_table import ActionTable
from meshwright.plans.schedule import Action

Duration = Callable[[Action], float]
Transfer = Callable[[int, int], float]


class Event(NamedTuple):
    """One action of one device group, in seconds from the start of the step."""

    group: int
    stage: int
    kind: str  # F, B, or its halves I and W
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Events of a step, in the order of each group."""

    events: tuple[Event, ...]
    groups: int

    @property
    def seconds(self) -> float:
        """Seconds from the first action to the last."""
        return max(self.ends)

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """End of each group's last action, in seconds."""
        found = [0.0] * self.groups
        for event in self.events:
            found[event.group] = max(found[event.group], event.end)
        return tuple(found)

    def busy(self, group: int) -> float:
        return sum(event.end - event.start for event in self.events if event.group == group)

    def bubble(self, group: int) -> float:
        """Return the fraction of the step in which a group waits."""
        return 1 - self.busy(group) / self.seconds


def simulate(table: ActionTable, duration: Duration, transfer: Transfer = lambda a, b: 0.0) -> Timeline:
    """Run a table of actions.

    `duration` times one action; `transfer` times the message between two stages' groups.

    >>> from meshwright.plans import Schedule
    >>> from meshwright.plans.action_table import action_table
    >>> table = action_table(Schedule(name="1f1b"), groups=4, micro_batches=8)
    >>> simulate(table, lambda action: 1.0 if action[1] == "F" else 2.0).seconds  # (8 + 4 - 1) x (1 + 2)
    33.0
    """
    clock, position = [0.0] * len(table), [0] * len(table)
    events: list[list[Event]] = [[] for _ in table]
    ready, finish = _results(table, transfer)
    moved = True
    while moved:
        moved = False
        for group, row in enumerate(table):
            at, now = position[group], clock[group]
            while at < len(row) and (earliest := ready(row[at])) >= 0:
                action = row[at]
                start = now if now > earliest else earliest
                now = start + duration(action)
                finish(action, now)
                events[group].append(Event(group, *action, start, now))
                at += 1
            moved = moved or at > position[group]
            position[group], clock[group] = at, now
    waiting = [row[at] for row, at in zip(table, position, strict=True) if at < len(row)]
    if waiting:
        raise InputError(f"the table never gets past {''.join(map(str, waiting[0]))}: it waits for what comes later")
    return Timeline(tuple(event for row in events for event in row), len(table))


def _results(
    table: ActionTable, transfer: Transfer
) -> tuple[Callable[[Action], float], Callable[[Action, float], None]]:
    """Return functions for the earliest start of an action (-1 if an input is missing) and for noting its end."""
    home = {action[0]: group for group, row in enumerate(table) for action in row}
    last, count = max(home), 1 + max(action[2] for row in table for action in row)
    hop = {(a, b): transfer(a, b) if home[a] != home[b] else 0.0 for a in home for b in (a - 1, a, a + 1) if b in home}
    forwards = [[-1.0] * count for _ in range(last + 1)]
    backwards = [[-1.0] * count for _ in range(last + 1)]  # whole backwards, or input gradients

    def ready(action: Action) -> float:
        stage, kind, m = action
        if kind == "F":
            before = 0.0 if stage == 0 else forwards[stage - 1][m]
            return before if stage == 0 or before < 0 else before + hop[stage - 1, stage]
        if kind == "W":
            return backwards[stage][m]
        own = forwards[stage][m]
        if own < 0 or stage == last:
            return own
        after = backwards[stage + 1][m]
        return after if after < 0 else max(own, after + hop[stage + 1, stage])

    def finish(action: Action, end: float) -> None:
        stage, kind, m = action
        if kind == "F":
            forwards[stage][m] = end
        elif kind != "W":
            backwards[stage][m] = end

    return ready, finish
