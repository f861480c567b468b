"""Seconds below which no plan of a shape can be, for many choices and several cuts at once.

Three bounds, each higher and dearer than the one before: with the bubble of the schedule; with the memory of all
devices in one pool; with the memory of each group of devices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.search.cuts import Family
from meshwright.search.prices import Columns, Prices
from meshwright.search.shapes import Setting, Shape, received, sends, stages_of
from meshwright.search.timing import SPLIT, StageTimes, alive, least_ends, membership, pick, quick_ends

Array = Any


def shortest(shape: Shape, early: Array) -> Array:
    """The least part of all groups' work in which a pipeline ends, whatever its cuts.

    A group begins when those before it have passed the first micro-batch on: V >= t_1 + .. + t_(k-1) + m t_k for each
    group k. The sum of all t is largest where all are equalities: t_k = t_1 (1 - 1/m)^(k-1), V = m t_1. Where only the
    forward pass stands before a group, it is the part `early` of t.
    """
    p, m = shape.groups, shape.micro_batches
    if shape.schedule.virtual > 1:
        return 1 / p
    early = np.maximum(early, 1e-6) if shape.schedule.name in SPLIT else 1.0
    return early / m / (1 - (1 - early / m) ** p)


def quick_seconds(setting: Setting, shape: Shape, cuts: Family, columns: Columns) -> Array:
    """(cuts, choice): no plan is faster, as if nothing had to be repeated and nothing followed the last micro-batch."""
    free = _free_times(setting, shape, cuts, columns)
    done = quick_ends(shape.schedule, shape.groups, shape.micro_batches, free).max(axis=1)
    return setting.total(shape, done).reshape(len(cuts), -1)


def plain_seconds(setting: Setting, shape: Shape, cuts: Family, table: Prices) -> Array:
    """(cuts, choice): no plan is faster, as if nothing had to be repeated."""
    free = _free_times(setting, shape, cuts, table.columns)
    done = least_ends(shape.schedule, shape.groups, shape.micro_batches, free)
    return setting.total(shape, joined(done, *ending(setting, shape, cuts, table, free))).reshape(len(cuts), -1)


def pooled_seconds(setting: Setting, shape: Shape, cuts: Family, table: Prices) -> Array:
    """(choice,): no plan with any of the cuts is faster, if all devices could share their memory and their work.

    The least time of all layers, mixed in any proportion of modes, whose bytes fit into the memory of all devices.
    """
    room, every = setting.room, setting.chain.counts[-1]
    flying = np.einsum("k,qks->qs", alive(shape.schedule, shape.groups, shape.micro_batches), cuts.held).min(axis=0)
    seconds = np.einsum("s,rsc->rc", every, table.forward + table.backward)
    need = room.loose * np.einsum("s,rsc->rc", flying, table.kept)
    moment = table.moment.min(axis=(0, 1))
    budget = shape.groups * (room.memory - room.overhead - room.loose * moment)
    budget = budget - np.einsum("s,sc->c", every, table.states)
    budget = budget - room.loose * received(setting, shape, cuts, table).sum(axis=1).min(axis=0)
    best = _mixed(np.where(need <= budget, seconds, np.inf).min(axis=0), seconds, need - budget)
    ends_ = np.einsum("s,sc->c", every, table.reduce + table.gather) * setting.constants.contention
    work = shape.micro_batches * best + ends_ + np.einsum("s,sc->c", every, table.update)
    return setting.total(shape, work / shape.groups)


def least_seconds(setting: Setting, shape: Shape, cuts: Family, table: Prices, limit: float) -> Array:
    """(cuts, choice): no plan is faster; infinite where nothing fits.

    First as if nothing had to be repeated; for those below the limit, with the least that memory asks for if layers
    could be mixed in any proportion (the lower hull of seconds over bytes).
    """
    size = (len(cuts), len(table.choices))
    free = _free_times(setting, shape, cuts, table.columns)
    late = ending(setting, shape, cuts, table, free)
    done = least_ends(shape.schedule, shape.groups, shape.micro_batches, free)
    bound = setting.total(shape, joined(done, *late)).reshape(size)
    near = np.flatnonzero((bound < limit).any(axis=0))
    if not len(near) or len(table.kept) == 1:
        return bound
    extra = _memory_asks(setting, shape, cuts, table.take(near))
    wide = (np.arange(len(cuts))[:, None] * size[1] + near).reshape(-1)
    done = least_ends(shape.schedule, shape.groups, shape.micro_batches, pick(free, wide), extra)
    exact = setting.total(shape, joined(done, late[0][wide], late[1][wide]))
    bound[:, near] = exact.reshape(len(cuts), len(near))
    return bound


def joined(done: Array, late: Array, update: Array) -> Array:
    return (done + late).max(axis=1) + update.max(axis=1)


def _free_times(setting: Setting, shape: Shape, cuts: Family, columns: Columns) -> StageTimes:
    """Times of all stages from those of (sort, choice): candidates are cuts x choices."""
    forward, backward, weight, passed_on = columns
    chain, count = setting.chain, forward.shape[1]

    def total(per_sort: Array) -> Array:
        return (per_sort.T @ cuts.turned).reshape(len(cuts) * count, shape.stages)

    moved = np.moveaxis(passed_on[chain.sort[cuts.where[:, 1:-1] - 1]], 1, 2)  # (cuts, choice, stage)
    send = sends(setting, shape, moved.reshape(len(cuts) * count, shape.stages - 1))
    return StageTimes(total(forward), total(backward), total(weight), send, send * setting.blocking)


def ending(
    setting: Setting, shape: Shape, cuts: Family, table: Prices, times: StageTimes,
    tied: dict[int, Array] | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """(candidate, group): what gradients and parameters delay each group, and its update.

    `tied`: seconds in which gradients of tied weights travel to their own layer, by group.
    """
    held = cuts.held[:, stages_of(shape)].sum(axis=2)
    present = held > 0

    def total(per_sort: Array) -> Array:
        return (per_sort.T @ held.transpose(0, 2, 1)).reshape(-1, shape.groups)

    def once(per_sort: Array) -> Array:
        """Latency does not depend on how much a layer holds, so that few rows differ."""
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
    return late, total(table.update)


def _memory_asks(setting: Setting, shape: Shape, cuts: Family, table: Prices) -> Array:
    """(candidate, group): seconds per micro-batch that memory costs at least; infinite where nothing fits."""
    room = setting.room
    held = cuts.held[:, stages_of(shape)]
    every = held.sum(axis=2)
    seconds = _summed(every, table.forward + table.backward)
    per_group = alive(shape.schedule, shape.groups, shape.micro_batches)[stages_of(shape)]  # (group, its stage)
    in_flight = (per_group[None, :, :, None] * held).sum(axis=2)
    flying = _summed(in_flight, table.kept)
    pieces = _present_pieces(setting, shape, cuts)
    moment = (table.moment[:, None, None] * pieces[None, ..., None]).max(axis=3)
    states = _summed(every, table.states)
    base = states + room.overhead + room.loose * received(setting, shape, cuts, table)
    need = base + room.loose * (flying + moment.min(axis=0))
    single = base + room.loose * (flying + moment)
    parked = _summed(every, table.host) + _summed(in_flight, table.parked)
    fits = (single <= room.memory) & ((parked <= room.host) | (parked <= 0))
    best = np.where(fits, seconds, np.inf).min(axis=0)
    # One block cannot be mixed.
    several = (_runs(setting, shape, cuts) > 1)[..., None]
    best = _mixed(best, seconds, need - room.memory, several)
    asked = np.maximum(best - seconds[0], 0.0)
    return np.moveaxis(asked, 1, 2).reshape(-1, shape.groups)


def _mixed(best: Array, seconds: Array, over: Array, allowed: Array | bool = True) -> Array:
    """`best`, or less: layers in any proportion under a mode that does not fit and one that does.

    `over`: (mode, ..) bytes that each mode takes beyond what there is.
    """
    for one, beyond in zip(seconds, over, strict=True):
        usable = allowed & (beyond > 0) & (over <= 0) & (one < seconds)
        if usable.any():
            part = beyond / np.maximum(beyond - over, 1.0)
            best = np.minimum(best, np.where(usable, one + (seconds - one) * part, np.inf).min(axis=0))
    return best


def _summed(layers: Array, each: Array) -> Array:
    """(.., cuts, group, choice): sums over sorts of (cuts, group, sort) layers times (.., sort, choice)."""
    return (layers.reshape(-1, layers.shape[-1]) @ each).reshape(*each.shape[:-2], *layers.shape[:2], each.shape[-1])


def _runs(setting: Setting, shape: Shape, cuts: Family) -> Array:
    """(cuts, group): how many runs of different modes the layers of a group may form, at most."""
    if not setting.mixed:
        return np.ones((len(cuts), shape.groups))
    if shape.schedule.virtual > 1:
        return np.full((len(cuts), shape.groups), 2)
    where, opened = cuts.where, setting.chain.opened_before
    return 1 + opened[where[:, 1:]] - opened[where[:, :-1] + 1]


def _present_pieces(setting: Setting, shape: Shape, cuts: Family) -> Array:
    """(cuts, group, piece): 1 where a group runs one."""
    where = cuts.where
    found = setting.chain.present(where[:, :-1].reshape(-1), where[:, 1:].reshape(-1))
    found = found.reshape(len(cuts), shape.stages, -1)
    return found[:, stages_of(shape)].max(axis=2)
