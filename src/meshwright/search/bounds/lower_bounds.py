"""Lower bounds on the seconds of a shape's plans, for many choices and several cuts at once.

There are three, each higher and costlier than the one before:

- the bubble of the schedule
- also the memory of all devices in one pool
- the memory of each device group
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from meshwright.cost.step.pipeline import StageTimes
from meshwright.search.bounds.pipeline_shapes import Setting, Shape, keeps_received, received, sends, stages_of
from meshwright.search.bounds.prices import Columns, Prices, away_rate
from meshwright.search.bounds.relaxation import Relaxed
from meshwright.search.bounds.step_time import (
    SPLIT,
    alive,
    busy_ends,
    least_ends,
    membership,
    passed_up,
    pick,
)
from meshwright.search.space.cuts import Family

Array = Any


def shortest(shape: Shape, early: Array) -> Array:
    """Return the least part of all groups' work in which a pipeline can end, for any cuts.

    A group begins when those before it have passed on the first micro-batch: V >= t_1 + .. + t_(k-1) + m t_k for each
    group k. The sum of all t is largest where all are equalities: t_k = t_1 (1 - 1/m)^(k-1), V = m t_1. If only the
    forward pass precedes a group, it is the part `early` of t.
    """
    p, m = shape.groups, shape.micro_batches
    if shape.schedule.virtual > 1:
        return 1 / p
    early = np.maximum(early, 1e-6) if shape.schedule.name in SPLIT else 1.0
    return early / m / (1 - (1 - early / m) ** p)


def quick_seconds(setting: Setting, shape: Shape, cuts: Family, columns: Columns) -> Array:
    """Return bounds of (cuts, choice): the time before a group plus its work, without recompute and sends."""
    forward, backward = columns[:2]
    groups, count = shape.groups, forward.shape[1]
    work = shape.micro_batches * cuts.held[:, stages_of(shape)].sum(axis=2)  # (cuts, group, sort)
    before = np.zeros_like(work)  # time of the first micro-batch before the group begins
    np.cumsum(cuts.held[:, : groups - 1], axis=1, out=before[:, 1:])
    both = forward + backward
    # Delayed weight gradients let other groups end earlier; else the last micro-batch comes back through them.
    split = shape.schedule.name in SPLIT
    done = summed(work, both) + summed(before, forward) if split else summed(work + before, both)
    return setting.total(shape, done.max(axis=1)).reshape(len(cuts), count)


def plain_seconds(setting: Setting, shape: Shape, cuts: Family, table: Prices, extra: Array) -> Array:
    """Return bounds of (cuts, choice), with no recompute beyond `pooled_extra`."""
    free = free_times(setting, shape, cuts, table.columns)
    late, update = ending(setting, shape, cuts, table, free)
    busy, paths = busy_ends(shape.schedule, shape.groups, shape.micro_batches, free)
    done = joined(passed_up(shape.schedule, shape.micro_batches, busy, paths), late, update)
    # Every group works until its end, longer if memory is short, so their mean is a bound.
    mean = setting.total(shape, (busy + late + update).mean(axis=1)).reshape(len(cuts), -1)
    return np.maximum(setting.total(shape, done).reshape(len(cuts), -1), mean + setting.longer(shape, extra))


def pooled_extra(
    setting: Setting, shape: Shape, cuts: Family, table: Prices, rows: Array = slice(None)
) -> tuple[Array, Array]:
    """Return (cuts, choice): least seconds per micro-batch that memory costs all groups together.

    The second array is the part of them after the groups have begun their backward passes. `rows` selects rows of a
    table. The result sums `_memory_asks` over groups at the same prices, without arrays of groups.
    """
    room, alive_ = setting.room, _alive(shape)
    most = alive_.max(axis=1)  # (group,)
    assert table.relaxed is not None
    priced = table.relaxed.take(rows).near(most / shape.micro_batches)
    held = cuts.held[:, stages_of(shape)]
    weights = (held * (alive_ / most[:, None])[..., None]).sum(axis=(1, 2))  # (cuts, sort)
    per_state = (held.sum(axis=2) / most[:, None]).sum(axis=1)  # (cuts, sort): layers, weighted by price
    moment = table.moment[..., rows].min(axis=(0, 1)) + table.buffers[rows]
    left = (1 / most).sum() * (room.memory - room.overhead - room.loose * moment) - per_state @ table.states[:, rows]
    if keeps_received(setting, shape):
        left = left - room.loose * (received(setting, shape, cuts, table, rows) / most[:, None]).sum(axis=1)
    host = np.maximum((1 / most).sum() * room.host - per_state @ table.host[:, rows], 0.0)
    part = np.minimum(most / shape.micro_batches, 1.0).max()
    every, movable, moved = setting.chain.counts[-1], table.movable[:, rows], 0.0
    longest = every @ priced.longest
    if movable.any():  # as if every group had as many micro-batches in flight as the fullest: a lower bound
        slower = table.update_away[:, rows]
        moved = every @ movable * _away_price(setting, shape, away_rate(movable, slower), priced, most.max())[:, None]
        longest = longest + every @ slower / shape.micro_batches
    extra, after = _asked(priced, weights, left / room.loose, host, part, moved)
    return np.where(extra > longest, np.inf, extra), after  # beyond the cost of any modes: it does not fit


def least_seconds(setting: Setting, shape: Shape, cuts: Family, table: Prices, limit: float) -> Array:
    """Return bounds of (cuts, choice); infinite where nothing fits.

    The first bound has no recompute. Choices below the limit get a second one with the least cost of memory, as if
    layers could be mixed in any proportion (the lower hull of seconds over bytes).
    """
    size = (len(cuts), len(table.choices))
    free = free_times(setting, shape, cuts, table.columns)
    late, update = ending(setting, shape, cuts, table, free)
    done = least_ends(shape.schedule, shape.groups, shape.micro_batches, free)
    bound = setting.total(shape, joined(done, late, update)).reshape(size)
    near = np.flatnonzero((bound < limit).any(axis=0))
    if not len(near) or table.relaxed is None:
        return bound
    *asked, possible = _memory_asks(setting, shape, cuts, table.take(near))
    wide = (np.arange(len(cuts))[:, None] * size[1] + near).reshape(-1)
    done = least_ends(shape.schedule, shape.groups, shape.micro_batches, pick(free, wide), *asked)
    # Longer passes overlap more of the update, second for second, less contention.
    hidden = np.minimum((1 - setting.constants.contention) * asked[0], late[wide])
    ends = done + late[wide] - hidden
    exact = joined(ends, 0.0, update[wide])
    if table.movable.any():  # the cost may be updates; other groups wait for those only if they end later
        may = np.tile((table.movable[:, near] > 0).any(axis=0), len(cuts))
        exact = np.where(may, (ends + update[wide]).max(axis=1), exact)
    exact = np.where(possible, setting.total(shape, exact), np.inf)
    bound[:, near] = np.maximum(bound[:, near], exact.reshape(len(cuts), len(near)))
    return bound


def joined(done: Array, late: Array, update: Array) -> Array:
    return (done + late).max(axis=1) + update.max(axis=1)


def free_times(setting: Setting, shape: Shape, cuts: Family, columns: Columns) -> StageTimes:
    """Return the times of all stages from those of (sort, choice): candidates are cuts x choices."""
    forward, backward, weight, passed_on = columns
    chain, count = setting.chain, forward.shape[1]

    def total(per_sort: Array) -> Array:
        return (per_sort.T @ cuts.turned).reshape(len(cuts) * count, shape.stages)

    moved = np.moveaxis(passed_on[chain.sort[cuts.where[:, 1:-1] - 1]], 1, 2)  # (cuts, choice, stage)
    send = sends(setting, shape, moved.reshape(len(cuts) * count, shape.stages - 1))
    return StageTimes(total(forward), total(backward), total(weight), send, send * setting.blocking)


def ending(
    setting: Setting, shape: Shape, cuts: Family, table: Prices, times: StageTimes,
    tied: dict[int, Array] | None = None, away: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Return (candidate, group): the exposed seconds of gradients and parameters, and the update.

    `tied`: seconds of communication for gradients of tied weights, by group. `away`: the offloaded part of the movable
    states, by default none.
    """
    held = cuts.held[:, stages_of(shape)].sum(axis=2)
    present = held > 0

    def total(per_sort: Array) -> Array:
        return (per_sort.T @ held.transpose(0, 2, 1)).reshape(-1, shape.groups)

    def once(per_sort: Array) -> Array:
        """Return the latency of a group; it does not depend on the size of a layer, so few rows differ."""
        most = np.zeros((len(cuts), per_sort.shape[1], shape.groups))
        alike: dict[bytes, list[int]] = {}
        for i, row in enumerate(per_sort):
            alike.setdefault(row.tobytes(), []).append(i)
        for sorts in alike.values():
            np.maximum(most, present[:, None, :, sorts].any(axis=3) * per_sort[sorts[0], :, None], out=most)
        return most.reshape(-1, shape.groups)

    member = membership(shape.schedule, shape.stages)
    windows = [times.backward @ member, times.forward @ member]
    late = np.zeros_like(windows[0])
    reduce = total(table.reduce) + once(table.once[0])
    for group, seconds in (tied or {}).items():
        reduce[:, group] += seconds
    for moved, window, hides in (
        (reduce, windows[0], setting.runtime.overlap_gradients),
        (total(table.gather) + once(table.once[1]), windows[1], setting.runtime.overlap_parameters),
    ):
        under = np.minimum(moved, window) if hides else 0.0
        late += moved - under + setting.constants.contention * under
    update = total(table.update)
    return late, update if away is None else update + away * total(table.update_away)


def _memory_asks(setting: Setting, shape: Shape, cuts: Family, table: Prices) -> tuple[Array, Array, Array]:
    """Return the least seconds per micro-batch that memory costs, (candidate, group), in three arrays.

    The second is the part of them after the group has begun its backward passes. The third, of (candidate,), is True if
    any modes cost so much.
    """
    room, alive_ = setting.room, _alive(shape)
    most = alive_.max(axis=1)[:, None]  # (group, 1)
    assert table.relaxed is not None
    priced = table.relaxed.near(most / shape.micro_batches)
    held = cuts.held[:, stages_of(shape)]
    every = held.sum(axis=2)
    weights = (held * (alive_ / most)[..., None]).sum(axis=2)  # (cuts, group, sort)
    pieces = _present_pieces(setting, shape, cuts)
    left = room.memory - room.overhead - summed(every, table.states)
    moment = (table.moment.min(axis=0) * pieces[..., None]).max(axis=2) + table.buffers
    left = left - room.loose * (received(setting, shape, cuts, table) + moment)
    host = np.maximum(room.host - summed(every, table.host), 0.0)
    part = np.minimum(most / shape.micro_batches, 1.0)
    away = summed(every, table.movable)
    moved = away * _away_price(setting, shape, table.away_rate, priced, most)[:, None] if away.any() else 0.0
    asked = _asked(priced, weights, left / most / room.loose, host / most, part, moved)
    longest = summed(every, priced.longest + table.update_away / shape.micro_batches)
    extra, after = (np.moveaxis(found, 1, 2).reshape(-1, shape.groups) for found in asked)
    return extra, after, (asked[0] <= longest).all(axis=1).reshape(-1)


def _away_price(setting: Setting, shape: Shape, rate: Array, found: Relaxed, most: Array) -> Array:
    """Return (price, .., choice): least seconds per micro-batch for a byte of optimizer states, offloaded or not.

    `rate`: seconds of the update for an offloaded byte.
    """
    shape_ = (len(found.device), *[1] * max(np.ndim(most) - 1, 0), -1)
    device, host = found.device.reshape(shape_), found.host.reshape(shape_)
    return np.minimum(device / (most * setting.room.loose), rate / shape.micro_batches + host / most)


@lru_cache(maxsize=512)
def _alive(shape: Shape) -> Array:
    """Return (group, its stage): micro-batches in flight at once."""
    return alive(shape.schedule, shape.groups, shape.micro_batches)[stages_of(shape)]


def _asked(
    found: Relaxed, weights: Array, left: Array, host: Array, part: Array | float, moved: Array | float
) -> tuple[Array, Array]:
    """Return (.., choice): seconds per micro-batch that memory costs, at the best price (`relaxation.py`).

    - `weights`: (.., sort) layers, scaled down for stages with fewer micro-batches in flight. A layer's loss is a
      concave function of the price of its bytes, proportional to the micro-batches and zero at zero.
    - `left`, `host`: bytes over micro-batches.
    - `part`: fraction of the forward passes before a group's first backward pass.
    - `moved`: cost of movable optimizer states, offloaded or not, whichever is less.
    """

    def lost(longer: Array) -> Array:
        """Return lost seconds of (price, .., choice)."""
        return (weights.reshape(-1, weights.shape[-1]) @ longer).reshape(len(longer), *left.shape)

    shape = (len(found.device), *[1] * (left.ndim - 1), left.shape[-1])
    paid = found.device.reshape(shape) * left + found.host.reshape(shape) * host - moved
    whole = lost(found.longer)
    extra = np.maximum((whole - paid).max(axis=0), 0.0)
    if not len(found.longer_back):
        return extra, extra
    back = whole + part * (lost(found.longer_back) - whole)
    return extra, np.maximum((back - paid).max(axis=0), 0.0)


def summed(layers: Array, each: Array) -> Array:
    """Return (.., cuts, group, choice): sums over sorts of (cuts, group, sort) layers times (.., sort, choice)."""
    return (layers.reshape(-1, layers.shape[-1]) @ each).reshape(*each.shape[:-2], *layers.shape[:2], each.shape[-1])


def _present_pieces(setting: Setting, shape: Shape, cuts: Family) -> Array:
    """Return (cuts, group, piece): 1 where a group runs one."""
    where = cuts.where
    found = setting.chain.present(where[:, :-1].reshape(-1), where[:, 1:].reshape(-1))
    found = found.reshape(len(cuts), shape.stages, -1)
    return found[:, stages_of(shape)].max(axis=2)
