"""Cheap bounds: sums over all layers, computed once, that tell which choices may still win in a shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from meshwright.cost.layers.placement import StagePlacement
from meshwright.cost.memory.device_memory import Bytes, state_bytes
from meshwright.cost.step.update import update_seconds
from meshwright.search.bounds.layer_times import LayerTimes
from meshwright.search.bounds.lower_bounds import quick_seconds, shortest
from meshwright.search.bounds.pipeline_shapes import Setting, Shape, homes_of
from meshwright.search.bounds.prices import Columns, Prices
from meshwright.search.bounds.step_time import SPLIT
from meshwright.search.space.candidates import AWAY, Choices, away, bare, cut_of
from meshwright.search.space.cuts import Cutter
from meshwright.search.space.grids import Grids

# Grids that may win in a pipeline, before ZeRO levels and offload are chosen.


Array = Any
_SEVERAL = 8  # minimum number of grids that are bounded together first


def averaged(setting: Setting, cutter: Cutter, shape: Shape, work: Array, columns: Columns) -> Array:
    """Return bounds of (choice,): the mean over groups of the time before them and their work."""
    around = columns[0] if shape.schedule.name in SPLIT else columns[0] + columns[1]
    lead = cutter.lead(homes_of(shape), shape.devices, shape.micro_batches)
    before = (lead @ around).min(axis=0)
    return setting.total(shape, (before + work) / shape.groups)


def hopeful(
    setting: Setting, cutter: Cutter, shape: Shape, rows: Array, bare: LayerTimes, work: Array, limit: float
) -> Array:
    """Return the grids that may win with one of the cuts, bubble included.

    `work`: seconds of all micro-batches in all layers, per grid.
    """
    cuts = cutter.cuts(homes_of(shape), shape.devices, shape.micro_batches)
    if not len(cuts):
        return rows[:0]
    columns = tuple(column[:, rows] for column in bare.columns)
    part = np.flatnonzero(averaged(setting, cutter, shape, work, columns) < limit)
    if len(part) > _SEVERAL:  # as if one grid were best in every respect
        ideal = tuple(column[:, part].min(axis=1, keepdims=True) for column in columns)
        part = part if quick_seconds(setting, shape, cuts, ideal).min() < limit else part[:0]
    if not len(part):
        return rows[:0]
    bound = quick_seconds(setting, shape, cuts, tuple(column[:, part] for column in columns)).min(axis=0)
    return rows[part[bound < limit]]


def spare(setting: Setting, bare: LayerTimes, wanted: list[tuple[Shape, Array]], limit: float) -> Array:
    """Return (grid,): seconds that all groups together may spend on the update, in the pipeline that leaves most."""
    work = setting.chain.counts[-1] @ (bare.forward + bare.backward)
    found = np.zeros(len(work))
    for shape, rows in wanted:
        left = shape.groups * setting.within(shape, limit) - shape.micro_batches * work[rows]
        found[rows] = np.maximum(found[rows], left)
    return found


class Screen:
    """Choices without recompute, and their sums over the whole model."""

    def __init__(self, setting: Setting, table: Prices | LayerTimes, least_end: Array | float = 0.0) -> None:
        """Store the sums; `least_end` bounds the update under any ZeRO level and offload, for choices without them."""
        forward, backward, weight, _ = table.columns
        every = setting.chain.counts[-1]
        self.setting = setting
        self.work = every @ (forward + backward)  # seconds of one micro-batch in all layers
        self.update, self.states = least_end + 0 * self.work, 0 * self.work
        self.movable, self.update_away = 0 * self.work, 0 * self.work
        # Of gradients and parameters: seconds of all layers, least of any group, and of computation to overlap with.
        self.moved: list[tuple[Array, Array, Array]] = []
        if isinstance(table, Prices):
            self.update, self.states = every @ table.update, every @ table.states
            self.movable, self.update_away = every @ table.movable, every @ table.update_away
            windows = (backward, forward)
            for moved, once, window in zip((table.reduce, table.gather), table.once, windows, strict=True):
                self.moved.append((every @ moved, once.min(axis=0), every @ window))
        self.early = (forward / np.maximum(forward + backward, 1e-30)).min(axis=0)
        self.weight = every @ np.minimum(weight, backward)

    def least(self, shape: Shape, rows: Array) -> Array:
        """Return bounds of some choices, as if layers could be cut at will; infinite where the states do not fit."""
        setting, room = self.setting, self.setting.room
        work = shape.micro_batches * self.work[rows]
        # One micro-batch goes through all layers and back; gradients of weights may come later.
        through = self.work[rows] - (self.weight[rows] if shape.schedule.name in SPLIT else 0.0)
        away = self._away(shape, rows)
        bubble = np.maximum(work * shortest(shape, self.early[rows]), through) + self.after(shape, rows)
        even = self.total(shape, rows) / shape.groups
        bubble, even = bubble + away, even + away
        fits = self.states[rows] / shape.groups + room.overhead <= room.memory
        return np.where(fits, setting.total(shape, np.maximum(bubble, even)), np.inf)

    def _away(self, shape: Shape, rows: Array) -> Array:
        """Return the least seconds in which the mean group updates optimizer states that exceed its memory."""
        movable, room = self.movable[rows], self.setting.room
        short = self.states[rows] + movable + shape.groups * (room.overhead - room.memory)
        part = np.clip(short / np.maximum(movable, 1.0), 0.0, 1.0)
        return part * self.update_away[rows] / shape.groups

    def after(self, shape: Shape, rows: Array) -> Array:
        """Return the least seconds after the last micro-batch of any group."""
        found = self.update[rows] / shape.groups
        for _, once, window in self.moved:
            found = found + _late(once[rows], window[rows], self.setting.constants.contention)
        return found

    def total(self, shape: Shape, rows: Array) -> Array:
        """Return the least seconds of work of all groups together: all micro-batches, and the update."""
        found = shape.micro_batches * self.work[rows] + self.update[rows]
        for moved, once, window in self.moved:
            every = moved[rows] + shape.groups * once[rows]
            found = found + _late(every, window[rows], self.setting.constants.contention)
        return found


def _late(moved: Array, window: Array, contention: float) -> Array:
    """Return the exposed part of `moved` seconds of communication that may overlap with `window` of computation."""
    return np.maximum(contention * moved, moved - (1 - contention) * window)


def holdable(setting: Setting, choices: Choices, groups: int, *, alone: bool = True) -> Array:
    """Return the choices whose states fit, spread evenly over as many device groups as exist (`groups` at most).

    Not `alone`: other devices hold layers too, so the number of groups is always `groups`.
    """
    held, most, room = *_held(setting, choices, groups, alone=alone), setting.room
    return (held.states / most + room.overhead <= room.memory) & ((held.host / most <= room.host) | (held.host <= 0))


def possible(setting: Setting, choices: Choices, groups: int) -> Array:
    """Return the grids whose states fit in any way: all sharded, on the devices or offloaded."""
    return np.logical_or.reduce([holdable(setting, sharded(choices, *fractions), groups) for fractions in AWAY])


def together(setting: Setting, *, offload: bool = True) -> bool:
    """Return True if all devices together can hold the states, offloaded if allowed."""
    one, count = np.ones(1, dtype=np.int64), setting.job.cluster.devices
    grid = bare(Grids(one, 0 * one, one, one, count * one, one, one, 0 * one), one)
    return any(bool(holdable(setting, sharded(grid, *away), 1)[0]) for away in (AWAY if offload else AWAY[:1]))


def _held(setting: Setting, choices: Choices, groups: int, *, alone: bool) -> tuple[Bytes, Array]:
    """Return the states of all layers, and the most groups that may share them."""
    job, layers = setting.job, list(zip(setting.chain.sorts, setting.chain.counts[-1], strict=True))
    once = choices.micro_batch == job.global_batch
    held = state_bytes(job, layers, cut_of(choices, job, setting.runtime), setting.runtime, once=once)
    return held, np.minimum(job.cluster.devices // choices.grids.devices, groups) if alone else groups


def sharded(choices: Choices, optimizer: float = 0.0, parameters: float = 0.0) -> Choices:
    """Return the choices with all states sharded, and the given parts offloaded."""
    return replace(away(choices, optimizer, parameters), zero=np.full(len(choices), 3))


def least_end(setting: Setting, site: StagePlacement, choices: Choices, groups: int) -> Array:
    """Return the least seconds of the update under any ZeRO level; offloaded where states fit no other way."""
    every = sharded(choices, 1.0, 1.0)
    return updates(setting, site, replace(every, optimizer_away=least_away(setting, every, groups)))


def least_away(setting: Setting, choices: Choices, groups: int) -> Array:
    """Return the least part of movable optimizer states that must be offloaded, if all devices share evenly."""
    room = setting.room
    here, most = _held(setting, replace(choices, optimizer_away=0 * choices.optimizer_away), groups, alone=True)
    there, _ = _held(setting, choices, groups, alone=True)
    short = here.states + most * (room.overhead - room.memory)
    part = np.clip(short / np.maximum(here.states - there.states, 1.0), 0.0, 1.0)
    return choices.optimizer_away * (part if setting.partial else part > 0)


def updates(setting: Setting, site: StagePlacement, choices: Choices) -> Array:
    """Return the seconds in which one device would update all layers."""
    job, configs = setting.job, cut_of(choices, setting.job, setting.runtime)
    layers = zip(setting.chain.sorts, setting.chain.counts[-1], strict=True)
    return sum(n * update_seconds(job, [layer], configs, site) for layer, n in layers)


def useful(setting: Setting, rough: Prices, parents: Array) -> Array:
    """Return the choices, without those that save memory for nothing.

    Where one device could hold all layers with all states, offload gains nothing. Neither does a ZeRO level that is in
    no respect faster than level 0 or 1 of the same grid (`parents` tells grids apart).
    """
    choices = rough.choices
    roomy = _need_at_most(setting, rough) <= setting.room.memory
    hosted = (rough.host + rough.movable).max(axis=0) > 0
    kept = ~(roomy & hosted)
    kept[_contained(choices, parents, rough.movable.max(axis=0) > 0, kept)] = False
    rows = (
        rough.forward[0], rough.backward[0], rough.reduce, rough.gather, *rough.once, rough.update, rough.update_away,
    )  # fmt: skip
    times = np.concatenate(rows)
    for level in (0, 1):
        whole = np.flatnonzero(kept & (choices.zero == level) & (choices.zero_group == 0) & ~hosted)
        twin = np.full(int(parents.max(initial=0)) + 1, -1)
        twin[parents[whole]] = whole
        some = np.flatnonzero(kept & (twin[parents] >= 0) & roomy[twin[parents]])
        other = twin[parents[some]]
        worse = (times[:, some] >= times[:, other]).all(axis=0) & (some != other)
        kept[some[worse]] = False
    return np.flatnonzero(kept)


def _contained(choices: Choices, parents: Array, movable: Array, kept: Array) -> Array:
    """Return the choices without offload whose twin may offload any part."""
    key = (parents * 4 + choices.zero) * (int(choices.zero_group.max(initial=0)) + 1) + choices.zero_group
    wide = np.unique(key[kept & movable & (choices.parameters_away == 0)])
    return np.flatnonzero((choices.optimizer_away == 0) & np.isin(key, wide))


def _need_at_most(setting: Setting, rough: Prices) -> Array:
    """Return the bytes of one device with all layers, all their states, and every micro-batch at once."""
    every, count = setting.chain.counts[-1], setting.job.global_batch // rough.choices.micro_batch
    kept = count * (every @ (rough.kept[0] + rough.received)) + rough.moment[0].max(axis=0) + rough.buffers
    return setting.room.overhead + setting.room.loose * kept + every @ (rough.states + rough.movable + rough.host)
