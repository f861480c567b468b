"""Best modes of one device group: which layers recompute or offload their activations, so that it fits.

A group runs one choice (grid, ZeRO, offloaded states). Its layers form up to two runs with different modes. In one
stage, they are the layers before and after some block; in several virtual stages, the first stage and the others. The
search looks at every pair of modes and every such block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import numpy as np

from meshwright.cost.memory.device_memory import loose_share, process_bytes
from meshwright.cost.runtime import Runtime
from meshwright.plans import Job
from meshwright.search.bounds.prices import Chain, Needs, Prices
from meshwright.search.space.activation_modes import Mode

Array = Any
STEPS = 128  # offloaded parts of optimizer states are multiples of 1 / 128
Range = tuple[int, int]  # first layer, and the one after the last


@dataclass(frozen=True)
class Room:
    """Memory of a device for its layers."""

    memory: float  # bytes
    host: float  # bytes, the device's share of the node's memory
    overhead: float  # bytes of the driver and communicators
    loose: float  # bytes reserved per byte of activations and temporaries

    @staticmethod
    def of(job: Job, runtime: Runtime) -> Room:
        group = job.cluster.groups[0]
        reserved, context = loose_share(group.device, runtime), process_bytes(group, runtime)
        host = group.host_memory // group.devices_per_node
        # An estimate rounds every part to whole bytes: leave room for that.
        return Room(float(group.device.memory) - 5, float(host) - 2, context, 1 + reserved)


@dataclass(frozen=True)
class Settled:
    """Fit of a group for every choice: True or False, and its modes."""

    fits: Array  # (choice,)
    forward: Array  # (choice, stage of the group): seconds of one micro-batch
    backward: Array
    first: Array  # mode of the first run
    second: Array
    split: Array  # layer at which the second run begins
    away: Array  # offloaded part of its movable optimizer states
    cost: Array  # seconds of one micro-batch, with its part of the longer update of offloaded states
    start: int = 0  # the group's first layer


@dataclass(frozen=True)
class Extras:
    """Memory of a group for layers elsewhere: copies of tied weights, outputs that it reads."""

    states: Array
    host: Array
    movable: Array
    kept: Array  # per stage of the group
    copied: Array  # bytes of gradients communicated to the weights' own layer


def extras(chain: Chain, table: Prices, elsewhere: Needs, size: float) -> Extras | None:
    """Return the extras of a group whose stages need layers elsewhere, or None.

    `size` is bytes per communicated gradient element.
    """
    if not any(elsewhere):
        return None
    none = np.zeros(len(table.choices))
    states, host, movable, copied = none, none, none, none
    kept = [none] * len(elsewhere)
    seen: set[int] = set()
    for stage, needs in enumerate(elsewhere):
        for how, source, sort in needs:
            if how == "reads":
                kept[stage] = kept[stage] + table.received[sort]
                continue
            copy = table.copies[:, chain.tied.index(sort)]
            copied = copied + copy[3] * size
            if source not in seen:
                seen.add(source)
                states, host, movable = states + copy[0], host + copy[1], movable + copy[2]
    return Extras(states + (1 - table.cap) * movable, host, table.cap * movable, np.stack(kept), copied)


@dataclass(frozen=True)
class Load:
    """Layers, micro-batches and buffers that a device group holds."""

    held: list[Range]  # layers of its stages
    mixes: tuple[tuple[int, ...], ...]  # micro-batches of each stage in flight at once
    more: Extras | None
    received: Array  # (choice,): bytes of input buffers


def settle(
    chain: Chain, table: Prices, modes: list[Mode], loads: list[Load], room: Room, micro_batches: int, *, mixed: bool,
    most: float = np.inf, weigh: bool = True,
) -> list[Settled]:  # fmt: skip
    """Return the fastest modes that fit, for every group (of as many stages each) and every choice of a table.

    They offload as few optimizer states as fit. `weigh`: the longer update counts too. Results of `most` seconds or
    more need not be the fastest.
    """
    where = np.array([load.held for load in loads])  # (group, stage, 2)
    stages, best = where.shape[1], _Best(len(loads), len(table.choices))
    parts = _Parts.of(chain, table, modes, where, loads)
    alive = _mixes(loads)
    layers = (chain.counts[where[..., 1]] - chain.counts[where[..., 0]]).sum(axis=1)  # (group, sort)
    states, on_host, movable = layers @ table.states, layers @ table.host, layers @ table.movable
    for i, load in enumerate(loads):
        if load.more:
            states[i], on_host[i] = states[i] + load.more.states, on_host[i] + load.more.host
            movable[i] = movable[i] + load.more.movable
    base = states + room.overhead + room.loose * (np.stack([load.received for load in loads]) + table.buffers)
    seconds = layers @ table.update_away / micro_batches if weigh else 0 * movable
    memory = _Memory(base, on_host, movable, seconds, np.broadcast_to(table.cap, base.shape), room)
    _try(best, parts, stages, alive, memory, where[:, 0, 0])
    if mixed and len(modes) > 1 and not best.plain.all():
        if stages > 1:
            _try(best, parts, 1, alive, memory, where[:, 0, 1])
        for i, load in enumerate(loads) if stages == 1 else []:
            if splits := _splits(chain, *load.held[0]):
                most_alive = max(mix[0] for mix in load.mixes)
                whole = (parts.time[i, 0], parts.kept[i, 0])
                _try_splits(best.of(i), chain, table, whole, load.held[0], splits, most_alive, memory.of(i), most)
    return best.settled(chain, table, where)


@dataclass(frozen=True)
class _Memory:
    """Memory of groups under any modes: arrays of (group, choice)."""

    base: Array  # bytes on the device, without movable optimizer states
    on_host: Array
    movable: Array
    seconds: Array  # per micro-batch, extra update time if all movable states are offloaded
    cap: Array  # the part of all optimizer states that is movable
    room: Room

    def of(self, at: Any) -> _Memory:
        """Return the memory of one group, or of some choices of one group."""
        return _Memory(self.base[at], self.on_host[at], self.movable[at], self.seconds[at], self.cap[at], self.room)

    def fit(self, time: Array, kept: Array, parked: Array | float, axis: int) -> tuple[Array, Array | None]:
        """Return seconds with the update of offloaded states (infinite where nothing fits), and the offloaded part.

        `kept` and `parked` are bytes of modes, along an `axis` that the arrays here do not have.
        """
        base, on_host, movable, seconds, cap = (
            np.expand_dims(a, axis) for a in (self.base, self.on_host, self.movable, self.seconds, self.cap)
        )
        free, part, there = self.room.memory - base - self.room.loose * kept, None, on_host + parked
        fits = free >= 0
        if movable.any():
            part = np.clip(1 - free / np.maximum(movable, 1.0), 0.0, 1.0)
            steps = np.maximum(STEPS * cap, 1.0)  # of all states, not only movable ones
            part = np.where(fits & (movable > 0), np.ceil(part * steps - 1e-9) / steps, 0.0)
            there, time = there + part * movable, time + part * seconds
        return np.where(fits & ((there <= self.room.host) | (there <= 0)), time, np.inf), part


def _mixes(loads: list[Load]) -> Array:
    """Return (group, mix, stage); groups with fewer mixes repeat their last one."""
    most = max(len(load.mixes) for load in loads)
    return np.array([[*load.mixes, *load.mixes[-1:] * (most - len(load.mixes))] for load in loads], dtype=float)


@dataclass
class _Parts:
    """Seconds and bytes of the stages of groups under every mode: arrays of (group, stage, mode, choice)."""

    time: Array
    kept: Array
    parked: Array
    moment: Array

    @staticmethod
    def of(chain: Chain, table: Prices, modes: list[Mode], where: Array, loads: list[Load]) -> _Parts:
        """Return the parts of stages from `where[.., 0]` to `where[.., 1]`."""
        first, last = where.reshape(-1, 2).T
        shape = (*where.shape[:2], len(modes), len(table.choices))
        layers = chain.counts[last] - chain.counts[first]

        def total(per_sort: Array) -> Array:
            return np.moveaxis(layers @ per_sort, 0, 1).reshape(shape)

        kept = total(table.kept)
        inside = ~chain.opens[first]
        if inside.any():
            # A stage that begins inside a block keeps its input, if the block is recomputed.
            full = inside[:, None] & np.array([mode.recompute == "full" for mode in modes])
            kept = kept + (full[..., None] * table.received[chain.sort[first]][:, None]).reshape(shape)
        for i, load in enumerate(loads):
            if load.more:
                kept[i] += load.more.kept[:, None]
        pieces, back = np.unique(chain.present(first, last), axis=0, return_inverse=True)
        moment = np.stack([table.moment[:, rows].max(axis=1) for rows in pieces])[back.reshape(-1)].reshape(shape)
        return _Parts(total(table.forward + table.backward), kept, total(table.parked), moment)


class _Best:
    """Best modes so far: arrays of (group, choice)."""

    def __init__(self, *size: int) -> None:
        self.cost = np.full(size, np.inf)
        self.plain = np.zeros(size, dtype=bool)  # fits without recompute: cannot be improved
        self.first, self.second, self.split = (np.zeros(size, dtype=np.int64) for _ in range(3))
        self.away = np.zeros(size)

    def of(self, group: int) -> _Best:
        """Return a view of one group: offers to it count here too."""
        found = _Best()
        for name, array in vars(self).items():
            setattr(found, name, array[group])
        return found

    def offer(self, time: Array, away: Array | None, pairs: Array, split: Array) -> None:
        """Offer seconds of (group, pair, choice), their offloaded part, and the start of each group's second run."""
        row = np.argmin(time, axis=1)
        value = np.take_along_axis(time, row[:, None], axis=1)[:, 0]
        better = value < self.cost
        if away is not None:
            self.away = np.where(better, np.take_along_axis(away, row[:, None], axis=1)[:, 0], self.away)
        for name, new in (
            ("cost", value), ("first", pairs[row, 0]), ("second", pairs[row, 1]), ("split", split[:, None])
        ):  # fmt: skip
            setattr(self, name, np.where(better, new, getattr(self, name)))

    def offer_splits(self, some: Array, time: Array, away: Array | None, pairs: Array, splits: list[int]) -> None:
        """Offer modes for some of the choices, from arrays of (split, pair, choice)."""
        flat = time.reshape(-1, len(some))
        row = np.argmin(flat, axis=0)
        value = flat[row, np.arange(len(some))]
        better = value < self.cost[some]
        mine = some[better]
        k, pair = (index[better] for index in np.unravel_index(row, time.shape[:2]))
        self.cost[mine], self.first[mine], self.second[mine] = value[better], pairs[pair, 0], pairs[pair, 1]
        self.split[mine] = np.array(splits)[k]
        if away is not None:
            self.away[mine] = away.reshape(-1, len(some))[row, np.arange(len(some))][better]

    def settled(self, chain: Chain, table: Prices, where: Array) -> list[Settled]:
        columns, counts = np.arange(self.cost.shape[1]), chain.counts
        low, high = counts[where[..., :1]], counts[where[..., 1:]]  # (group, stage, 1, sort)
        middle = counts[np.clip(self.split[:, None], where[..., :1], where[..., 1:])]  # (group, stage, choice, sort)
        found = []
        for per_mode in (table.forward, table.backward):
            one, two = (per_mode[run, :, columns][:, None] for run in (self.first, self.second))
            found.append(((middle - low) * one).sum(axis=3) + ((high - middle) * two).sum(axis=3))
        fits, starts = np.isfinite(self.cost), where[:, 0, 0].tolist()
        forward, backward = (part.transpose(0, 2, 1) for part in found)
        every = (fits, forward, backward, self.first, self.second, self.split, self.away, self.cost, starts)
        return [Settled(*parts) for parts in zip(*every, strict=True)]


def _try(best: _Best, parts: _Parts, first: int, alive: Array, memory: _Memory, split: Array) -> None:
    """Offer every mode, or every pair of modes for the `first` stages and for the others."""
    stages, modes, choices = parts.time.shape[1:]
    both = _pairs(modes, two=first < stages)

    def runs(summed: Callable[[slice], Array], together: Callable[[Array, Array], Array]) -> Array:
        """Return (group, pair, choice): the first stages under one mode plus the others under another."""
        found = summed(slice(first))[:, both[:, 0]]
        return together(found, summed(slice(first, None))[:, both[:, 1]]) if first < stages else found

    def held(each: Array) -> Array:
        """Return the bytes of all micro-batches in flight, at the largest mix."""

        def at(mix: int) -> Array:
            def total(some: slice) -> Array:
                flat = each[:, some].reshape(len(each), -1, modes * choices)
                return (alive[:, mix, None, some] @ flat).reshape(-1, modes, choices)

            return runs(total, np.add)

        return reduce(np.maximum, map(at, range(alive.shape[1])))

    time = runs(lambda some: parts.time[:, some].sum(axis=1), np.add)
    peak = runs(lambda some: parts.moment[:, some].max(axis=1), np.maximum)
    parked = held(parts.parked) if parts.parked.any() else 0.0
    time, away = memory.fit(time, held(parts.kept) + peak, parked, 1)
    if first == stages:
        best.plain = np.isfinite(time[:, 0]) & (True if away is None else away[:, 0] == 0)
    best.offer(time, away, both, split)


def _try_splits(
    best: _Best, chain: Chain, table: Prices, whole: tuple[Array, Array], where: Range, splits: list[int], alive: int,
    memory: _Memory, most: float,
) -> None:  # fmt: skip
    """Offer every pair of modes before and after every block of a stage, to choices that need recompute.

    `whole`: seconds and bytes kept of (mode, choice).
    """
    # Two modes that each cost no less than one that fits alone cannot win.
    fast = (whole[0] < np.minimum(best.cost, most)) & ~best.plain
    some, pairs = np.flatnonzero(fast.any(axis=0)), _pairs(len(fast), two=True)
    pairs = pairs[fast.any(axis=1)[pairs].any(axis=1)]
    if not len(some):
        return
    head = chain.counts[splits] - chain.counts[where[0]]  # (split, sort)
    tail = chain.counts[where[1]] - chain.counts[splits]
    # Extra memory of the stage's first layers.
    first = whole[1][:, some] - (chain.counts[where[1]] - chain.counts[where[0]]) @ table.kept[..., some]

    def both(per_sort: Array, more: Array | float = 0.0) -> Array:
        """Return (split, pair, choice)."""
        one, two = (np.einsum("ks,rsc->krc", counts, per_sort[..., some]) for counts in (head, tail))
        return (one + more)[:, pairs[:, 0]] + two[:, pairs[:, 1]]

    def peak(pieces: list[Array], modes: Array) -> Array:
        """Return (split, pair, choice); most splits have the same pieces on either side."""
        known = {rows.tobytes(): table.moment[:, rows][..., some].max(axis=1)[modes] for rows in _distinct(pieces)}
        return np.stack([known[rows.tobytes()] for rows in pieces])

    moment = np.maximum(
        peak([chain.pieces_in(where[0], split) for split in splits], pairs[:, 0]),
        peak([chain.pieces_in(split, where[1]) for split in splits], pairs[:, 1]),
    )
    parked = alive * both(table.parked) if table.parked.any() else 0.0
    kept = alive * both(table.kept, first) + moment
    time, away = memory.of(some).fit(both(table.forward + table.backward), kept, parked, 0)
    best.offer_splits(some, time, away, pairs, splits)


def _distinct(arrays: list[Array]) -> list[Array]:
    return list({array.tobytes(): array for array in arrays}.values())


@lru_cache(maxsize=64)
def _pairs(count: int, *, two: bool) -> Array:
    """Return modes of a first and a second run: equal, or different."""
    return np.array([(i, j) for i in range(count) for j in range(count) if (i != j) == two])


def _splits(chain: Chain, first: int, last: int) -> list[int]:
    """Return the blocks at which a second run may begin."""
    layers = chain.model.layers
    return [i for i in range(first + 1, last) if layers[i].block and layers[i].opens_block]
