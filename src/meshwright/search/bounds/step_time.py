"""Bounds of the time of a step in closed form, for many candidates at once.

Candidates share a schedule and differ in the times of their stages. A bound is never above the event simulation
(`cost.step.pipeline.ends`), so that most candidates need not be simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from meshwright.cost.step.pipeline import StageTimes, durations
from meshwright.plans.action_table import rounds
from meshwright.plans.schedule import Schedule, group_of_stage

Array = Any
SPLIT = {"zero-bubble", "zbv", "dualpipev"}  # schedules that part input and weight gradients


@lru_cache(maxsize=4096)
def warm_up(schedule: Schedule, groups: int, micro_batches: int) -> tuple[Array, Array]:
    """Return per group the stage of its first backward action, and (stage, group) the forwards before it.

    A closed form is used because tables of thousands of actions would dominate the time; tests compare the two.
    """
    p, m, v = groups, micro_batches, schedule.virtual
    counts = np.zeros((p * v, p))
    first = np.arange(p)
    for r in range(p):
        down, up = r, 2 * p - 1 - r
        if schedule.name == "gpipe":
            counts[r, r] = m
        elif schedule.name == "zbv":
            counts[down, r], counts[up, r], first[r] = min(2 * p - r - 1, m), min(r + 1, m), up
        elif schedule.name == "dualpipev":
            last = r == p - 1 and m - 2 * p + r + 1 > 0
            counts[down, r], counts[up, r], first[r] = 2 * p - r - 1 + last, r + 1, up
        else:
            hops = (p - 1 - r) * (1 if v == 1 or schedule.name == "zero-bubble" else 2)
            per_round, ahead = rounds(p, m, v, hops)
            steps = np.arange(min(ahead + 1, m * v)) // per_round % v
            counts[np.arange(v) * p + r, r] = np.bincount(steps, minlength=v)
            first[r] = (v - 1) * p + r
    return first, counts


def alive(schedule: Schedule, groups: int, micro_batches: int) -> Array:
    """Return (stage,): micro-batches of it that a full group holds; the most where it is known."""
    if schedule.name == "zero-bubble" and schedule.virtual == 1:
        return np.full(groups, float(min(micro_batches, groups)))
    _, counts = warm_up(schedule, groups, micro_batches)
    return counts.sum(axis=1)


def most_alive(schedule: Schedule, groups: int, micro_batches: int) -> Array:
    """Return (group,): the most micro-batches that a group holds of all its stages together."""
    if schedule.name == "zero-bubble" and schedule.virtual == 1:
        return np.full(groups, float(min(micro_batches, groups)))
    _, counts = warm_up(schedule, groups, micro_batches)
    return counts.sum(axis=0) + (schedule.name == "dualpipev")


@dataclass(frozen=True)
class Paths:
    """Times of one micro-batch: arrays of (candidate, stage)."""

    forward: Array
    back: Array  # the backward pass, or the part that the stage before waits for
    down: Array  # seconds from the first stage to each
    up: Array  # and back from each to the first

    @property
    def bottom(self) -> Array:
        """(candidate,): time when the first micro-batch has passed the last stage."""
        return self.down[:, -1] + self.forward[:, -1]


def busy_ends(
    schedule: Schedule, groups: int, micro_batches: int, times: StageTimes, extra: Array | float = 0.0,
    after: Array | float | None = None,
) -> tuple[Array, Paths]:  # fmt: skip
    """Return (candidate, group): bounds on the end of a group's own work, and the paths.

    A group works `extra` seconds more per micro-batch, `after` (default: all) of them once its backward passes have
    begun. Two paths bound its end:

    - the time before its first action, then its work
    - the first micro-batch all the way down and back, then the group's remaining work
    """
    seconds, delay = durations(times)
    stages = times.forward.shape[1]
    home = _homes(schedule, stages)
    delay = delay * (home[1:] != home[:-1])
    forward, whole = seconds["F"], seconds["B"]
    back = seconds["I"] if schedule.name in SPLIT else whole
    down, up, own = (np.zeros_like(forward) for _ in range(3))
    np.cumsum(forward[:, :-1] + delay, axis=1, out=down[:, 1:])
    np.cumsum(back[:, :-1] + delay, axis=1, out=up[:, 1:])
    np.cumsum(back[:, 1:] + delay, axis=1, out=own[:, 1:])
    paths = Paths(forward, back, down, up)
    work = micro_batches * ((forward + whole) @ membership(schedule, stages))
    first, counts = warm_up(schedule, groups, micro_batches)
    ready = paths.bottom[:, None] + own[:, -1:] - own[:, first]  # a group's first backward action may begin
    still = ready + work - forward @ counts + micro_batches * (extra if after is None else after)
    return np.maximum(down[:, :groups] + work + micro_batches * extra, still), paths


def least_ends(
    schedule: Schedule, groups: int, micro_batches: int, times: StageTimes, extra: Array | float = 0.0,
    after: Array | float | None = None,
) -> Array:  # fmt: skip
    """Return (candidate, group): bounds on the end of a group; `extra` and `after` as in `busy_ends`."""
    return passed_up(schedule, micro_batches, *busy_ends(schedule, groups, micro_batches, times, extra, after))


def passed_up(schedule: Schedule, micro_batches: int, ends: Array, paths: Paths) -> Array:
    """Return (candidate, group): ends with the wait for other groups after the group's own work."""
    groups, back, up = ends.shape[1], paths.back, paths.up
    if schedule.name == "gpipe":
        last = paths.bottom + (micro_batches - 1) * paths.forward.max(axis=1)
        behind = np.flip(np.maximum.accumulate(np.flip(back, 1), axis=1), 1)  # the slowest from here to the last stage
        ends = np.maximum(ends, last[:, None] + (up[:, -1:] - up) + back[:, -1:] + (micro_batches - 1) * behind)
    if schedule.name not in SPLIT:
        # After a group's last backward, its micro-batch still passes every group before it.
        later = ends + up[:, :groups]
        ends = np.maximum(ends, np.flip(np.maximum.accumulate(np.flip(later, 1), axis=1), 1) - up[:, :groups])
    return ends


@lru_cache(maxsize=4096)
def homes(schedule: Schedule, stages: int) -> tuple[int, ...]:
    """Return the device group of every stage."""
    return tuple(group_of_stage(schedule, stages, s) for s in range(stages))


@lru_cache(maxsize=512)
def _homes(schedule: Schedule, stages: int) -> Array:
    return np.array(homes(schedule, stages))


@lru_cache(maxsize=512)
def membership(schedule: Schedule, stages: int) -> Array:
    """Return (stage, group): 1 where the group runs the stage."""
    homes = _homes(schedule, stages)
    return (homes[:, None] == np.arange(homes.max() + 1)).astype(float)


def pick(times: StageTimes, rows: Array) -> StageTimes:
    """Return the times of some candidates."""
    return StageTimes(*(getattr(times, name)[rows] for name in times.__dataclass_fields__))
