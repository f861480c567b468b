"""Simulate one step of a pipeline: start, end and waiting of every action of each group.

`simulate` runs one pipeline and keeps its events; `ends` runs many candidates of one schedule at once.

Exact for any schedule, any stage times, micro-batches of different cost, and transfers between groups. Where closed
forms hold (equal stages, free transfers) it equals them: GPipe and 1F1B take (m + p - 1)(f + b), the interleaved form
(m v + p - 1)(f + b) with f and b the times of one of its stages (Narayanan et al., 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from meshwright.errors import InputError
from meshwright.plans.action_table import ActionTable, action_table
from meshwright.plans.schedule import Action, Order, Schedule, in_order

Array = Any
Duration = Callable[[Action], float]
Transfer = Callable[[int, int], float]
_KINDS = "FBIW"
_FEW = 6  # candidates that are simulated one by one


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
    order, stuck = in_order(table)
    if stuck:
        raise InputError(f"the table never gets past {''.join(map(str, stuck[1]))}: it waits for what comes later")
    last = max(action[0] for _, action, _ in order)
    seconds = (duration(action) for _, action, _ in order)
    down, up = [transfer(s, s + 1) for s in range(last)], [transfer(s + 1, s) for s in range(last)]
    starts, stops, _ = _run(order, len(table), seconds, down, up, 0.0, max)
    events: list[list[Event]] = [[] for _ in table]
    for (group, action, _), start, stop in zip(order, starts, stops, strict=True):
        events[group].append(Event(group, *action, start, stop))
    return Timeline(tuple(chain.from_iterable(events)), len(table))


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch, for many candidates: arrays of (candidate, stage); `send` of (candidate, stage - 1)."""

    forward: Array
    backward: Array
    weight: Array  # the part of the backward pass that may wait
    send: Array  # while the receiver waits
    blocking: Array  # of it, what keeps the sender busy too: 0 or the same as `send`


def durations(times: StageTimes) -> tuple[dict[str, Array], Array]:
    """Return the (candidate, stage) seconds of every kind of action, and the delay between a stage and the next."""
    forward, backward = times.forward.copy(), times.backward.copy()
    weight = np.minimum(times.weight, times.backward)
    forward[:, :-1] += times.blocking
    backward[:, 1:] += times.blocking
    part = times.backward - weight
    part[:, 1:] += times.blocking
    return {"F": forward, "B": backward, "I": part, "W": weight}, times.send - times.blocking


def ends(schedule: Schedule, groups: int, micro_batches: int, times: StageTimes) -> Array:
    """Return when each group has done its last action (candidate, group), equal to `simulate` to the last digit."""
    kinds, delay = durations(times)
    columns = np.concatenate([kinds[kind] for kind in _KINDS], axis=1)
    order, spread = _ordered(schedule, groups, micro_batches)
    count = len(columns)
    if count > _FEW:
        seconds, hop = spread(list(np.ascontiguousarray(columns.T))), list(delay.T)
        return np.stack(_run(order, groups, seconds, hop, hop, np.zeros(count), np.maximum)[2], 1)
    each = zip(map(spread, columns.tolist()), delay.tolist(), strict=True)
    return np.array([_run(order, groups, seconds, hop, hop, 0.0, max)[2] for seconds, hop in each]).reshape(-1, groups)


@lru_cache(maxsize=64)
def _ordered(
    schedule: Schedule, groups: int, micro_batches: int
) -> tuple[Order, Callable[[list[Array]], tuple[Array, ...]]]:
    """Return all actions in order, and a function from the seconds of every (kind, stage) to those of every action."""
    order, _ = in_order(action_table(schedule, groups, micro_batches))
    stages = groups * schedule.virtual
    return order, itemgetter(*(_KINDS.index(kind) * stages + stage for _, (stage, kind, _), _ in order))


def _run(
    order: Order, groups: int, seconds: Iterable[Array], down: list[Array], up: list[Array],
    zero: Array, later: Callable[..., Array],
) -> tuple[list[Array], list[Array], list[Array]]:  # fmt: skip
    """Return when each action starts, when it ends, and when each group ends.

    `seconds` are those of every action; `down` and `up` those of a transfer from each stage to the next, and back.
    Times are arrays of candidates, or plain numbers, which are faster for a few candidates.
    """
    clock = [zero] * groups
    starts: list[Array] = []
    stops: list[Array] = []
    for (group, action, source), length in zip(order, seconds, strict=True):
        start = clock[group]
        if source >= 0:
            stage, kind, _ = action
            start = later(start, stops[source] + (down[stage - 1] if kind == "F" else up[stage]))
        clock[group] = stop = start + length
        starts.append(start)
        stops.append(stop)
    return starts, stops, clock
