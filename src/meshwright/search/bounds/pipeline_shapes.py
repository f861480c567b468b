"""Shapes of pipelines, and the constants of a search.

A shape is the number of groups, their devices, the schedule, and the micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import log2
from typing import Any

import numpy as np

from meshwright.cost.constants import Constants
from meshwright.cost.layers.collectives import send_seconds
from meshwright.cost.runtime import Runtime
from meshwright.plans import Job
from meshwright.plans.schedule import Schedule, group_of_stage
from meshwright.search.bounds.memory_fit import Range, Room
from meshwright.search.bounds.prices import Chain, Prices
from meshwright.search.bounds.step_time import homes
from meshwright.search.space.cuts import Family

Array = Any
Cuts = tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """Device groups, the schedule, and the micro-batches."""

    groups: int
    devices: int  # of one group
    schedule: Schedule
    micro_batches: int

    @property
    def stages(self) -> int:
        return self.groups * self.schedule.virtual

    def ranges(self, cuts: Cuts, group: int) -> list[Range]:
        """Return the layers of the stages of one group."""
        return [(cuts[s], cuts[s + 1]) for s in _mine(self.schedule, self.stages)[group]]


@dataclass(frozen=True)
class Found:
    """One candidate of a shape, with all that a plan document needs."""

    seconds: float
    shape: Shape
    cuts: Cuts
    table: Prices
    row: int  # of the table
    modes: tuple[tuple[int, int, int], ...]  # per group: mode of both runs, and start of the second
    away: tuple[float, ...] = ()  # per group: offloaded part of its movable optimizer states
    spread: float = 0.0  # seconds, a mean over groups that the slowest dominate: the target when several are slowest


@dataclass(frozen=True)
class Setting:
    """Constants of a search."""

    job: Job
    chain: Chain
    runtime: Runtime  # as it is on these devices
    constants: Constants
    room: Room
    gradient_bytes: float
    mixed: bool  # layers of a stage may recompute different operators
    stagewise: bool = True  # so may stages
    partial: bool = True  # any part of the optimizer states may be offloaded
    _links: dict[tuple[int, int], list[tuple[float, float]]] = field(default_factory=dict)
    rates: dict[tuple[object, ...], Array] = field(default_factory=dict)  # of the links between stages, by shape

    @cached_property
    def blocking(self) -> float:
        return 0.0 if self.runtime.overlap_pipeline else 1.0

    def links(self, devices: int, stage: int) -> list[tuple[float, float]]:
        """Return (seconds per byte, latency) of the links from one device group to the next."""
        if (devices, stage) not in self._links:
            step = max(devices // 32, 1)
            few = {*range(0, devices, step), devices - 1}
            start = stage * devices
            found = set()
            for i in few:
                pair = (start + i, start + devices + i)
                fixed = send_seconds(self.job.cluster, 0.0, *pair, self.constants)
                found.add((send_seconds(self.job.cluster, 1e9, *pair, self.constants) - fixed, fixed))
            self._links[devices, stage] = [(per / 1e9, fixed) for per, fixed in found]
        return self._links[devices, stage]

    def total(self, shape: Shape, work: Array) -> Array:
        """Return the seconds of the step from those of the slowest group."""
        return work * self._slower(shape) + self.runtime.step_seconds

    def longer(self, shape: Shape, extra: Array) -> Array:
        """Return the least delay of the mean group's end, if every group works `extra` more per micro-batch.

        The update may overlap with the last micro-batch's extra time, less contention.
        """
        return (shape.micro_batches - 1 + self.constants.contention) * extra / shape.groups * self._slower(shape)

    def within(self, shape: Shape, seconds: float) -> float:
        """Return the longest work of the slowest group in a step of `seconds`."""
        return (seconds - self.runtime.step_seconds) / self._slower(shape)

    def _slower(self, shape: Shape) -> float:
        nodes = max(shape.groups * shape.devices / self.job.cluster.groups[0].devices_per_node, 1)
        return 1 + self.constants.straggler * log2(nodes)


def homes_of(shape: Shape) -> tuple[int, ...]:
    """Return the device group of every stage."""
    return homes(shape.schedule, shape.stages)


@lru_cache(maxsize=512)
def _mine(schedule: Schedule, stages: int) -> Array:
    return np.argsort(np.array(homes(schedule, stages)), kind="stable").reshape(
        stages // schedule.virtual, schedule.virtual
    )


def stages_of(shape: Shape) -> Array:
    """Return (group, stage of the group): numbers of the stages."""
    return _mine(shape.schedule, shape.stages)


def keeps_received(setting: Setting, shape: Shape) -> bool:
    """Return True if stages receive into buffers of their own."""
    return setting.runtime.receive_buffers and shape.stages > 1


def received(setting: Setting, shape: Shape, cuts: Family, table: Prices, rows: Array = slice(None)) -> Array:
    """Return (cuts, group, choice): bytes of receive buffers, one per micro-batch, if the runtime keeps them.

    `rows` selects rows of a table.
    """
    here, there = table.received[:, rows], table.passed_on[:, rows]
    if not keeps_received(setting, shape):
        return np.zeros((len(cuts), shape.groups, here.shape[1]))
    sort, where = setting.chain.sort, cuts.where
    every = np.zeros((len(cuts), shape.stages, here.shape[1]))
    every[:, 1:] += here[sort[where[:, 1:-1]]]
    every[:, :-1] += there[sort[where[:, 1:-1] - 1]]
    return shape.micro_batches * every[:, stages_of(shape)].sum(axis=2)


def sends(setting: Setting, shape: Shape, moved: Array) -> Array:
    """Return (candidate, stage - 1): seconds to send `moved` bytes from a stage to the next."""
    key = (shape.devices, shape.schedule, shape.stages)
    if key not in setting.rates:
        every = []
        for s in range(shape.stages - 1):
            here, there = (group_of_stage(shape.schedule, shape.stages, x) for x in (s, s + 1))
            if here == there:
                every.append([(0.0, 0.0)])
            else:
                near = abs(here - there) == 1
                every.append(setting.links(shape.devices, min(here, there)) if near else _wrap(setting, shape))
        most = max(map(len, every), default=1)
        padded = [links + links[-1:] * (most - len(links)) for links in every]
        setting.rates[key] = np.array(padded, dtype=float).reshape(shape.stages - 1, most, 2)
    rates = setting.rates[key]
    if rates.shape[1] == 1:
        return moved * rates[:, 0, 0] + rates[:, 0, 1]
    return (moved[:, :, None] * rates[:, :, 0] + rates[:, :, 1]).max(axis=2) if moved.size else moved


def _wrap(setting: Setting, shape: Shape) -> list[tuple[float, float]]:
    """Return the links from the last group back to the first: virtual stages go around."""
    last = (shape.groups - 1) * shape.devices
    fixed = send_seconds(setting.job.cluster, 0.0, last, 0, setting.constants)
    return [((send_seconds(setting.job.cluster, 1e9, last, 0, setting.constants) - fixed) / 1e9, fixed)]
