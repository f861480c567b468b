"""Pipelines of one shape: how many groups of how many devices, which schedule, how many micro-batches.

For every choice of a table and several cuts of the chain: a bound, and for those that may still win, the step by
simulation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import log2
from typing import Any

import numpy as np

from meshwright.cost.collectives import send_seconds
from meshwright.cost.constants import Constants
from meshwright.cost.runtime import Runtime
from meshwright.plan import Job, in_flight
from meshwright.plan.schedule import Schedule, group_of_stage
from meshwright.search.modes import Mode
from meshwright.search.prices import Chain, Prices
from meshwright.search.stages import Range, Room, Settled, extras, settle, sums
from meshwright.search.tables import Table
from meshwright.search.timing import StageTimes, alive, ends, least_ends, membership, quick_ends

Array = Any
Cuts = tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """Groups of devices, the schedule, and the micro-batches."""

    groups: int
    devices: int  # of one group
    schedule: Schedule
    micro_batches: int

    @property
    def stages(self) -> int:
        return self.groups * self.schedule.virtual

    def ranges(self, cuts: Cuts, group: int) -> list[Range]:
        """Layers of the stages of one group."""
        mine = [s for s in range(self.stages) if group_of_stage(self.schedule, self.stages, s) == group]
        return [(cuts[s], cuts[s + 1]) for s in mine]


@dataclass(frozen=True)
class Found:
    """One candidate of a shape, with all that a plan document needs."""

    seconds: float
    shape: Shape
    cuts: Cuts
    table: Prices
    row: int  # of the table
    modes: tuple[tuple[int, int, int], ...]  # per group: mode of both runs, and where the second begins


@dataclass(frozen=True)
class Setting:
    """What does not change during a search."""

    job: Job
    chain: Chain
    runtime: Runtime
    constants: Constants
    room: Room
    gradient_bytes: float
    mixed: bool
    _links: dict[tuple[int, int], list[tuple[float, float]]] = field(default_factory=dict)
    rates: dict[tuple[object, ...], Array] = field(default_factory=dict)  # of the links between stages, by shape

    @cached_property
    def blocking(self) -> float:
        return 0.0 if self.runtime.overlap_pipeline else 1.0

    def links(self, devices: int, stage: int) -> list[tuple[float, float]]:
        """(seconds per byte, latency) of the links from one group of devices to the next."""
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
        """The step from the time that the slowest group works."""
        size = self.job.cluster.groups[0].devices_per_node
        nodes = max(shape.groups * shape.devices / size, 1)
        return work * (1 + self.constants.straggler * log2(nodes)) + self.runtime.step_seconds


@lru_cache(maxsize=512)
def _mixes(schedule: Schedule, groups: int, micro_batches: int, group: int) -> tuple[tuple[int, ...], ...]:
    return in_flight(schedule, groups, micro_batches, group)


def quick_seconds(setting: Setting, shape: Shape, cuts: list[Cuts], table: Prices | Table) -> Array:
    """(cuts, choice): no plan is faster, as if nothing had to be repeated; of a table, its one ideal choice."""
    if isinstance(table, Prices):
        free = _free_times(setting, shape, cuts, table.forward[0], table.backward[0], table.weight, table.passed_on)
    else:
        ideal = (table.forward, table.backward, 0 * table.backward, table.passed_on)
        free = _free_times(setting, shape, cuts, *(column[:, None] for column in ideal))
    done = quick_ends(shape.schedule, shape.groups, shape.micro_batches, free).max(axis=1)
    return setting.total(shape, done).reshape(len(cuts), -1)


def pooled_seconds(setting: Setting, shape: Shape, cuts: list[Cuts], table: Prices) -> Array:
    """(choice,): no plan with any of the cuts is faster, if all devices could share their memory and their work.

    The least time of all layers, mixed in any proportion of modes, whose bytes fit into the memory of all devices.
    """
    room, every = setting.room, setting.chain.counts[-1]
    where = np.array(cuts)
    held = setting.chain.counts[where[:, 1:]] - setting.chain.counts[where[:, :-1]]  # (cuts, stage, sort)
    flying = np.einsum("k,qks->qs", alive(shape.schedule, shape.groups, shape.micro_batches), held).min(axis=0)
    seconds = np.einsum("s,rsc->rc", every, table.forward + table.backward)
    need = room.loose * np.einsum("s,rsc->rc", flying, table.kept)
    inside = [i for i, block in enumerate(setting.chain.blocks) if block[0].block] or [0]
    moment = table.moment[:, inside].min(axis=(0, 1))
    budget = shape.groups * (room.memory - room.overhead - room.loose * moment)
    budget = budget - np.einsum("s,sc->c", every, table.states)
    budget = budget - room.loose * _received(setting, shape, cuts, table).sum(axis=1).min(axis=0)
    best = np.where(need <= budget, seconds, np.inf).min(axis=0)
    for i in range(len(seconds)):
        over = need[i] - budget
        if not (over > 0).any():
            continue
        for j in range(len(seconds)):
            spare = budget - need[j]
            usable = (over > 0) & (spare >= 0) & (seconds[i] < seconds[j])
            if usable.any():
                mixed = seconds[i] + (seconds[j] - seconds[i]) * over / np.maximum(over + spare, 1.0)
                best = np.where(usable, np.minimum(best, mixed), best)
    ends_ = np.einsum("s,sc->c", every, table.reduce + table.gather) * setting.constants.contention
    work = shape.micro_batches * best + ends_ + np.einsum("s,sc->c", every, table.update)
    return setting.total(shape, work / shape.groups)


def least_seconds(setting: Setting, shape: Shape, cuts: list[Cuts], table: Prices, limit: float) -> Array:
    """(cuts, choice): no plan is faster; infinite where nothing fits.

    First as if nothing had to be repeated; for those below the limit, with the least that memory asks for if layers
    could be mixed in any proportion (the lower hull of seconds over bytes).
    """
    size = (len(cuts), len(table.choices))
    free = _free_times(setting, shape, cuts, table.forward[0], table.backward[0], table.weight, table.passed_on)
    late = _ending(setting, shape, cuts, table, free)
    done = least_ends(shape.schedule, shape.groups, shape.micro_batches, free)
    bound = setting.total(shape, _joined(done, *late)).reshape(size)
    near = np.flatnonzero((bound < limit).any(axis=0))
    if not len(near) or len(table.kept) == 1:
        return bound
    extra = _memory_asks(setting, shape, cuts, table.take(near))
    wide = (np.arange(len(cuts))[:, None] * size[1] + near).reshape(-1)
    done = least_ends(shape.schedule, shape.groups, shape.micro_batches, _pick(free, wide), extra)
    exact = setting.total(shape, _joined(done, late[0][wide], late[1][wide]))
    bound[:, near] = exact.reshape(len(cuts), len(near))
    return bound


def _joined(done: Array, late: Array, update: Array) -> Array:
    return (done + late).max(axis=1) + update.max(axis=1)


def _free_times(
    setting: Setting, shape: Shape, cuts: list[Cuts], forward: Array, backward: Array, weight: Array, passed_on: Array
) -> StageTimes:
    """Times of all stages from those of (sort, choice): candidates are cuts x choices."""
    chain, count = setting.chain, forward.shape[1]
    where = np.array(cuts)
    held = chain.counts[where[:, 1:]] - chain.counts[where[:, :-1]]  # (cuts, stage, sort)

    def total(per_sort: Array) -> Array:
        return np.einsum("qks,sc->qck", held, per_sort).reshape(len(cuts) * count, shape.stages)

    moved = np.moveaxis(passed_on[chain.sort[where[:, 1:-1] - 1]], 1, 2)  # (cuts, choice, stage)
    send = _sends(setting, shape, moved.reshape(len(cuts) * count, shape.stages - 1))
    return StageTimes(total(forward), total(backward), total(weight), send, send * setting.blocking)


@lru_cache(maxsize=512)
def _mine(schedule: Schedule, stages: int) -> Array:
    homes = np.array([group_of_stage(schedule, stages, s) for s in range(stages)])
    return np.argsort(homes, kind="stable").reshape(stages // schedule.virtual, schedule.virtual)


def _stages_of(shape: Shape) -> Array:
    """(group, stage of the group): numbers of the stages."""
    return _mine(shape.schedule, shape.stages)


def _group_counts(setting: Setting, shape: Shape, cuts: list[Cuts]) -> Array:
    """(cuts, group, stage of the group, sort): layers of each sort."""
    where = np.array(cuts)
    held = setting.chain.counts[where[:, 1:]] - setting.chain.counts[where[:, :-1]]
    return held[:, _stages_of(shape)]


def _ending(setting: Setting, shape: Shape, cuts: list[Cuts], table: Prices, times: StageTimes) -> tuple[Array, Array]:
    """(candidate, group): what gradients and parameters delay each group, and its update. Tied weights apart."""
    held = _group_counts(setting, shape, cuts).sum(axis=2)
    present = held > 0

    def total(per_sort: Array) -> Array:
        return np.einsum("qgs,sc->qcg", held, per_sort).reshape(-1, shape.groups)

    def once(per_sort: Array) -> Array:
        return (present[:, None] * per_sort.T[None, :, None]).max(axis=3).reshape(-1, shape.groups)

    member = membership(shape.schedule, shape.stages)
    windows = [times.backward @ member, times.forward @ member]
    late = np.zeros_like(windows[0])
    for moved, window, hides in (
        (total(table.reduce) + once(table.once[0]), windows[0], setting.runtime.overlap_gradients),
        (total(table.gather) + once(table.once[1]), windows[1], setting.runtime.overlap_parameters),
    ):
        under = np.minimum(moved, window) if hides else 0.0
        late += moved - under + setting.constants.contention * under
    return late, total(table.update)


def _memory_asks(setting: Setting, shape: Shape, cuts: list[Cuts], table: Prices) -> Array:
    """(candidate, group): seconds per micro-batch that memory costs at least; infinite where nothing fits."""
    room = setting.room
    held = _group_counts(setting, shape, cuts)
    every = held.sum(axis=2)
    seconds = np.einsum("qgs,rsc->rqgc", every, table.forward + table.backward)
    per_group = alive(shape.schedule, shape.groups, shape.micro_batches)[_stages_of(shape)]  # (group, its stage)
    flying = np.einsum("qgs,rsc->rqgc", (per_group[None, :, :, None] * held).sum(axis=2), table.kept)
    blocks = _present_blocks(setting, shape, cuts)  # (cuts, group, sort of block)
    moment = (table.moment[:, None, None] * blocks[None, ..., None]).max(axis=3)
    states = np.einsum("qgs,sc->qgc", every, table.states)
    base = states + room.overhead + room.loose * _received(setting, shape, cuts, table)
    need = base + room.loose * (flying + moment.min(axis=0))
    single = base + room.loose * (flying + moment)
    host = np.einsum("qgs,sc->qgc", every, table.host)
    parked = host + np.einsum("qgs,rsc->rqgc", (per_group[None, :, :, None] * held).sum(axis=2), table.parked)
    fits = (single <= room.memory) & ((parked <= room.host) | (parked <= 0))
    best = np.where(fits, seconds, np.inf).min(axis=0)
    # Mixed in any proportion: a mode that does not fit beside one that does. One block cannot be mixed.
    several = (_runs(setting, shape, cuts) > 1)[..., None]
    for i in range(len(seconds)):
        over = need[i] - room.memory
        if not (over > 0).any():
            continue
        for j in range(len(seconds)):
            spare = room.memory - need[j]
            usable = several & (over > 0) & (spare >= 0) & (seconds[i] < seconds[j])
            if usable.any():
                part = np.where(usable, over / np.maximum(over + spare, 1.0), 1.0)
                mixed = seconds[i] + (seconds[j] - seconds[i]) * part
                best = np.where(usable, np.minimum(best, mixed), best)
    asked = np.maximum(best - seconds[0], 0.0)
    return np.moveaxis(asked, 1, 2).reshape(-1, shape.groups)


def _runs(setting: Setting, shape: Shape, cuts: list[Cuts]) -> Array:
    """(cuts, group): how many runs of different modes the layers of a group may form, at most."""
    if not setting.mixed:
        return np.ones((len(cuts), shape.groups))
    if shape.schedule.virtual > 1:
        return np.full((len(cuts), shape.groups), 2)
    where = np.array(cuts)
    opened = setting.chain.opened_before
    return 1 + opened[where[:, 1:]] - opened[where[:, :-1] + 1]


def _present_blocks(setting: Setting, shape: Shape, cuts: list[Cuts]) -> Array:
    """(cuts, group, sort of block): 1 where a group has layers of it."""
    before = setting.chain.blocks_before
    where = np.array(cuts)
    held = before[where[:, 1:]] - before[where[:, :-1]]
    return (held[:, _stages_of(shape)].sum(axis=2) > 0).astype(float)


def best_of(
    setting: Setting, shape: Shape, cuts: Cuts, table: Prices, modes: list[Mode], limit: float,
    short: Callable[[Prices, Array], None] | None = None,
) -> Found | None:  # fmt: skip
    """The fastest choice of a table that fits and takes less than `limit` seconds."""
    known: dict[object, Settled] = {}
    settled = [_settle(setting, shape, cuts, table, modes, group, known) for group in range(shape.groups)]
    fits = np.logical_and.reduce([s.fits for s in settled])
    if short is not None and not fits.any():
        short(table, np.maximum.reduce([s.least for s in settled]))
    rows = np.flatnonzero(fits)
    if not len(rows):
        return None
    part = table.take(rows)
    times = _times(setting, shape, cuts, part, [_taken(s, rows) for s in settled])
    bound = _finish(
        setting, shape, cuts, part, times, least_ends(shape.schedule, shape.groups, shape.micro_batches, times)
    )
    near = np.flatnonzero(bound < limit)
    if not len(near):
        return None
    near = near[np.argsort(bound[near], kind="stable")][:64]
    picked = _pick(times, near)
    exact = ends(shape.schedule, shape.groups, shape.micro_batches, picked)
    seconds = _finish(setting, shape, cuts, part.take(near), picked, exact)
    one = int(np.argmin(seconds))
    if seconds[one] >= limit:
        return None
    row = int(rows[near[one]])
    chosen = tuple((int(s.first[row]), int(s.second[row]), int(s.split[row])) for s in settled)
    return Found(float(seconds[one]), shape, cuts, table, row, chosen)


def _taken(settled: Settled, rows: Array) -> Settled:
    arrays = [getattr(settled, name)[rows] for name in settled.__dataclass_fields__ if name != "start"]
    return Settled(*arrays, settled.start)


def _pick(times: StageTimes, rows: Array) -> StageTimes:
    return StageTimes(*(getattr(times, name)[rows] for name in times.__dataclass_fields__))


def _settle(
    setting: Setting, shape: Shape, cuts: Cuts, table: Prices, modes: list[Mode], group: int,
    known: dict[object, Settled],
) -> Settled:  # fmt: skip
    """The modes of one group; groups with the same layers and as much in flight are settled once."""
    held = shape.ranges(cuts, group)
    more = extras(setting.job, setting.chain, table, held, setting.runtime, setting.gradient_bytes)
    mixes = _mixes(shape.schedule, shape.groups, shape.micro_batches, group)
    counts = setting.chain.counts
    ends_here = (held[0][0] == 0, held[-1][1] == len(setting.chain.sort))
    key = (mixes, ends_here, *((int(setting.chain.sort[a]), (counts[b] - counts[a]).tobytes()) for a, b in held))
    if more is None and key in known:
        same = known[key]
        return replace(same, split=same.split + held[0][0] - same.start, start=held[0][0])
    buffers = _received(setting, shape, [cuts], table)[0, group]
    found = settle(setting.chain, table, modes, held, mixes, setting.room, more, buffers, mixed=setting.mixed)
    if more is None and len(held) == 1:
        known[key] = found
    return found


def _received(setting: Setting, shape: Shape, cuts: list[Cuts], table: Prices) -> Array:
    """(cuts, group, choice): bytes of the buffers that stages receive into, one per micro-batch, where the runtime
    keeps so many."""
    if not setting.runtime.receive_buffers or shape.stages == 1:
        return np.zeros((len(cuts), shape.groups, len(table.choices)))
    sort, where = setting.chain.sort, np.array(cuts)
    every = np.zeros((len(cuts), shape.stages, len(table.choices)))
    every[:, 1:] += table.received[sort[where[:, 1:-1]]]
    every[:, :-1] += table.passed_on[sort[where[:, 1:-1] - 1]]
    return shape.micro_batches * every[:, _stages_of(shape)].sum(axis=2)


def _times(setting: Setting, shape: Shape, cuts: Cuts, table: Prices, settled: list[Settled] | None) -> StageTimes:
    """Times of all stages; without settled modes as if nothing had to be repeated."""
    chain, count = setting.chain, len(table.choices)
    forward, backward, weight = (np.zeros((count, shape.stages)) for _ in range(3))
    seen = [0] * shape.groups
    for s in range(shape.stages):
        where, group = (cuts[s], cuts[s + 1]), group_of_stage(shape.schedule, shape.stages, s)
        weight[:, s] = sums(chain, where, table.weight)
        if settled is None:
            forward[:, s] = sums(chain, where, table.forward[0])
            backward[:, s] = sums(chain, where, table.backward[0])
        else:
            forward[:, s] = settled[group].forward[:, seen[group]]
            backward[:, s] = settled[group].backward[:, seen[group]]
        seen[group] += 1
    send = _sends(setting, shape, table.passed_on[chain.sort[np.array(cuts[1:-1], dtype=np.int64) - 1]].T)
    return StageTimes(forward, backward, weight, send, send * setting.blocking)


def _sends(setting: Setting, shape: Shape, moved: Array) -> Array:
    """(candidate, stage - 1): seconds in which so many bytes go from a stage to the next."""
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
    return (moved[:, :, None] * rates[:, :, 0] + rates[:, :, 1]).max(axis=2) if moved.size else moved


def _wrap(setting: Setting, shape: Shape) -> list[tuple[float, float]]:
    """From the last group back to the first: virtual stages go around."""
    last = (shape.groups - 1) * shape.devices
    fixed = send_seconds(setting.job.cluster, 0.0, last, 0, setting.constants)
    return [((send_seconds(setting.job.cluster, 1e9, last, 0, setting.constants) - fixed) / 1e9, fixed)]


def _finish(setting: Setting, shape: Shape, cuts: Cuts, table: Prices, times: StageTimes, done: Array) -> Array:
    """The whole step from when each group has done its last action: gradients, optimizer, stragglers."""
    chain, runtime, slow = setting.chain, setting.runtime, setting.constants.contention
    late = np.zeros_like(done)
    update = np.zeros_like(done)
    for group in range(shape.groups):
        held = shape.ranges(cuts, group)
        mine = [s for s in range(shape.stages) if group_of_stage(shape.schedule, shape.stages, s) == group]
        reduce, gather = (sum(sums(chain, where, part) for where in held) for part in (table.reduce, table.gather))
        present = np.unique(np.concatenate([chain.sort[low:high] for low, high in held]))
        reduce = reduce + table.once[0, present].max(axis=0) + _tied(setting, shape, held, group, table)
        gather = gather + table.once[1, present].max(axis=0)
        for moved, window, hides in (
            (reduce, times.backward[:, mine].sum(axis=1), runtime.overlap_gradients),
            (gather, times.forward[:, mine].sum(axis=1), runtime.overlap_parameters),
        ):
            under = np.minimum(moved, window) if hides else 0.0
            late[:, group] += moved - under + slow * under
        update[:, group] = sum(sums(chain, where, table.update) for where in held)
    return setting.total(shape, (done + late).max(axis=1) + update.max(axis=1))


def _tied(setting: Setting, shape: Shape, held: list[Range], group: int, table: Prices) -> Array:
    more = extras(setting.job, setting.chain, table, held, setting.runtime, setting.gradient_bytes)
    if more is None or group == 0:
        return 0.0
    cluster, here = setting.job.cluster, group * shape.devices
    fixed = send_seconds(cluster, 0.0, here, 0, setting.constants)
    per_byte = (send_seconds(cluster, 1e9, here, 0, setting.constants) - fixed) / 1e9
    return 2 * np.where(more.copied > 0, more.copied * per_byte + fixed, 0.0)
