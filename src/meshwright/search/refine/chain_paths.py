"""Paths through intervals of a chain of layers: the fastest choice of strategies that fits a stage's memory.

Equal intervals and interchangeable strategies are merged (`Parts`). Prices on memory bound the time of every interval
from below, those of their paths that fit from above. Intervals between the bounds are solved label by label (`Paths`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from meshwright.errors import InputError

Array = Any
_PRICES = 12  # prices on memory for the search of paths
_THRESHOLDS = 5  # of transient memory, at which paths are compared
_FEW = 2000  # paths that are compared with all weights at once
_ENDLESS = 1e30  # bytes; stands for inf
SLACK = 1e-12  # relative; smaller differences are ignored


@dataclass(frozen=True, eq=False)
class Instance:
    """Chain problem with L layers, K strategies, S stages; seconds and bytes."""

    time: Array  # (L, K) of one micro-batch; inf where a strategy is not allowed
    states: Array  # (L, K) bytes independent of micro-batches
    kept: Array  # (L, K) bytes per micro-batch in flight
    flight: Array  # (S,) micro-batches in flight
    memory: Array  # (S,) bytes of a device, or one number
    relayout: Array  # (K, K) between consecutive layers of one stage; zero between equal strategies
    send: Array  # (L, K) if the layer ends a stage other than the last
    micro_batches: int
    moment: Array = 0.0  # (L, K) transient bytes: a stage needs their maximum, not their sum

    def __post_init__(self) -> None:
        shape, stages = np.shape(self.time), np.shape(self.flight)
        if len(shape) != 2 or 0 in shape or len(stages) != 1 or 0 in stages or self.micro_batches < 1:
            raise InputError("needs layers, strategies, stages and micro-batches", field="time, flight, micro_batches")
        shapes = {"flight": stages, "memory": stages, "relayout": (shape[1], shape[1])}
        for name in ("time", "states", "kept", "flight", "memory", "relayout", "send", "moment"):
            array, right = np.array(getattr(self, name), dtype=np.float64), shapes.get(name, shape)
            if array.shape != right and (array.shape or name not in {"memory", "moment"}):
                raise InputError(f"has the shape {array.shape}", field=name, valid=str(right))
            if not (array >= 0).all() or (name in {"states", "kept", "flight", "moment"} and np.isinf(array).any()):
                raise InputError("holds a negative number, or none at all", field=name)
            object.__setattr__(self, name, np.broadcast_to(array, right).copy())
        np.fill_diagonal(self.relayout, 0.0)

    @property
    def stages(self) -> int:
        return len(self.flight)


class _Level(NamedTuple):
    """Different intervals of one length."""

    parent: Array  # (interval,) in the level before: the interval without its last layer
    sort: Array  # (interval,) of its last layer
    at: slice  # among all intervals


class Parts:
    """Instance without repetition: kinds of layers, groups of strategies, intervals, rooms.

    A group holds strategies without a cost of change between them, and with equal sends. A room is the memory of a
    stage: micro-batches in flight, bytes, and a range of transient memory. The least of that range is not available for
    anything else.
    """

    def __init__(self, instance: Instance, classes: Array, longest: int) -> None:
        time = np.where(_dominated(instance), np.inf, instance.time)
        used = np.flatnonzero(np.isfinite(time).any(axis=0)) if np.isfinite(time).any() else np.arange(1)
        alike = np.vstack([instance.relayout, instance.relayout.T, instance.send])[:, used]
        _, first, group = np.unique(alike, axis=1, return_index=True, return_inverse=True)
        self.strategy, self.group, self.groups = used, group.reshape(-1), len(first)
        # (group, to group): the last row is for the first layer of a stage.
        self.change = np.vstack([instance.relayout[np.ix_(used[first], used[first])], np.zeros(len(first))])
        self.send, self.stages, self.micro_batches = (
            instance.send[:, used[first]],
            instance.stages,
            instance.micro_batches,
        )
        example = self._intervals(np.hstack([time, instance.states, instance.kept, instance.moment]), longest)
        kinds, kind = np.unique([instance.flight, instance.memory], axis=1, return_inverse=True)
        self.kind = kind.reshape(-1)  # per stage
        self.room_kind = np.repeat(np.arange(kinds.shape[1]), len(classes))
        self.floor, self.ceiling = np.tile(classes, (kinds.shape[1], 1)).T
        self.memory = np.minimum(kinds[1, self.room_kind], _ENDLESS)
        # (room, sort, strategy)
        rows = np.ix_(example, used)
        self.moment = np.maximum(instance.moment[rows], self.floor[:, None, None])
        self.bytes = instance.states[rows] + kinds[0, self.room_kind, None, None] * instance.kept[rows]
        self.time = np.where(self.moment > self.ceiling[:, None, None], np.inf, time[rows])

    def _intervals(self, facts: Array, longest: int) -> Array:
        """Build levels of a tree whose nodes are the different sequences of kinds; return a layer of every kind."""
        layers = len(facts)
        _, example, sort = np.unique(facts, axis=0, return_index=True, return_inverse=True)
        self.levels: list[_Level] = []
        self.node = np.zeros((layers, layers + 1), dtype=np.int64)  # interval: first layer, one after the last
        node, self.nodes = np.zeros(layers + 1, dtype=np.int64), 0
        for length in range(1, longest + 1):
            starts = np.arange(layers - length + 1)
            key = node[starts] * len(example) + sort.reshape(-1)[length - 1 :]
            different, node = np.unique(key, return_inverse=True)
            at = slice(self.nodes, self.nodes + len(different))
            self.levels.append(_Level(different // len(example), different % len(example), at))
            self.node[starts, starts + length] = node + self.nodes
            self.nodes = at.stop
        return example


def _dominated(instance: Instance) -> Array:
    """Return (L, K): True if another strategy is as good for this layer in every way, for any neighbours."""
    change = instance.relayout
    facts = np.stack([instance.time, instance.states, instance.kept, instance.moment, instance.send])
    easy = (change[None] <= change[:, None]).all(axis=2) & (change.T[None] <= change.T[:, None]).all(axis=2)
    no_worse = easy & (facts[:, :, None, :] <= facts[:, :, :, None]).all(axis=0)  # (L, K, by)
    first = np.tri(len(change), k=-1, dtype=bool)  # of two equal strategies, the first stays
    return (no_worse & (~no_worse.transpose(0, 2, 1) | first)).any(axis=2)


class TooMuch(Exception):
    """Error of a search that needs more paths than the caller allows."""


class Paths:
    """Least and most seconds of (kind of stage, group, interval); they meet where an interval is settled."""

    def __init__(self, parts: Parts, effort: float = np.inf) -> None:
        self.parts, self.effort = parts, effort  # limit on paths
        self._price()
        shape = (parts.groups, len(parts.memory), parts.nodes)
        self.room_least, room_most = np.zeros(shape), np.zeros(shape)
        self._bound(room_most)
        starts = np.flatnonzero(np.diff(parts.room_kind, prepend=-1))
        self.most = np.minimum.reduceat(room_most, starts, axis=1).transpose(1, 0, 2)
        self.least = np.minimum.reduceat(self.room_least, starts, axis=1).transpose(1, 0, 2)
        self.least = np.minimum(self.least, self.most)

    @property
    def shortest(self) -> float:
        """Least seconds of the longest intervals; longer ones take no less."""
        return float(self.least[:, :, self.parts.levels[-1].at].min())

    def _price(self) -> None:
        """Compute weights of seconds and bytes, and under each the best strategy of a group.

        The arrays are of (group, weight, room, sort).
        """
        parts = self.parts
        allowed = np.isfinite(parts.time)
        seconds = np.where(allowed, parts.time, 0.0)
        scale = seconds.mean() or 1.0, parts.bytes.mean() or 1.0
        slower = parts.time[..., None, :] - parts.time[..., :, None]
        smaller = parts.bytes[..., :, None] - parts.bytes[..., None, :]
        trade = np.isfinite(slower) & (slower > 0) & (smaller > 0)
        slopes = slower[trade] / smaller[trade] * (scale[1] / scale[0])
        prices = np.unique(np.quantile(slopes, np.linspace(0.02, 0.98, _PRICES))) if len(slopes) else np.zeros(0)
        self.on_time = np.array([1.0, *(1 / (1 + prices)), 0.0]) / scale[0]
        self.on_bytes = np.array([0.0, *(prices / (1 + prices)), 1.0]) / scale[1]
        self.budget = self.on_bytes[:, None] * (parts.memory - parts.floor)
        cost = np.multiply.outer(self.on_time, seconds) + np.multiply.outer(self.on_bytes, parts.bytes)
        cost[:, ~allowed] = np.inf
        picks = [np.where(parts.group == group, cost, np.inf).argmin(axis=-1) for group in range(parts.groups)]
        at = (*np.ogrid[tuple(map(slice, cost.shape[:-1]))], np.stack(picks))
        self.cost = np.where(parts.group[at[-1]] == np.arange(parts.groups)[:, None, None, None], cost[at], np.inf)
        self.picked = np.stack([array[at[1:]] for array in (parts.time, parts.bytes, parts.moment)])
        self.change_cost = np.multiply.outer(parts.change[:-1], self.on_time)[..., None, None]
        self.change_cost[np.isinf(parts.change[:-1])] = np.inf

    def _bound(self, most: Array) -> None:
        """Find the cheapest path of every interval under every weight: a lower bound, and a solution if it fits."""
        parts = self.parts
        cost = time = size = moment = np.zeros((*self.cost.shape[:-1], 1))
        for level in parts.levels:
            entry, pick = np.full(cost.shape, np.inf), np.zeros(cost.shape, dtype=np.int64)
            for group in range(parts.groups):
                through = cost[group] + self.change_cost[group]
                np.copyto(pick, group, where=through < entry)
                np.minimum(entry, through, out=entry)
            time, size, moment = (np.take_along_axis(array, pick, axis=0) for array in (time, size, moment))
            time = time + parts.change[pick, np.arange(parts.groups)[:, None, None, None]]
            last_time, last_size, last_moment = self.picked[..., level.sort]
            cost = entry[..., level.parent] + self.cost[..., level.sort]
            time, size = time[..., level.parent] + last_time, size[..., level.parent] + last_size
            moment = np.maximum(moment[..., level.parent], last_moment)
            fits = np.isfinite(cost) & (size + moment <= parts.memory[:, None])
            most[..., level.at] = np.where(fits, time, np.inf).min(axis=1)
            least = ((cost - self.budget[..., None])[:, :-1] / self.on_time[:-1, None, None]).max(axis=1)
            least[cost[:, -1] > self.budget[-1, :, None] * (1 + SLACK)] = np.inf
            self.room_least[..., level.at] = least

    def settle(self, limit: Array) -> None:
        """Find the fastest path of intervals exactly, if it takes less than `limit` (-inf: skip it)."""
        parts = self.parts
        for level, labels in zip(parts.levels, self._labels(limit), strict=False):
            where = parts.room_kind[labels.room], labels.group, labels.node + level.at.start
            np.minimum.at(self.most, where, labels.seconds(parts))
        raised = np.minimum(np.maximum(self.least, limit), self.most)
        self.least = np.where(np.isfinite(limit), raised, self.least)

    def _reach(self, limit: Array) -> list[Array]:
        """Return (weight, group, room, interval) per level: the most a path may cost to still end in time."""
        parts, reach = self.parts, []
        rest = child = None
        for level in reversed(parts.levels):
            asked = limit[parts.room_kind, :, level.at].transpose(1, 0, 2)
            asked = np.where(self.room_least[..., level.at] <= asked, asked, -np.inf)[:, None]
            here = asked * self.on_time[:, None, None] + self.budget[..., None]
            here[np.broadcast_to(np.isinf(asked), here.shape)] = -np.inf
            if rest is not None and child is not None:
                parents, starts = np.unique(child.parent, return_index=True)
                ahead = np.full(rest.shape, -np.inf)
                for group in range(parts.groups):
                    np.maximum(ahead, rest[group] - self.change_cost[:, group], out=ahead)
                here[..., parents] = np.maximum(here[..., parents], np.maximum.reduceat(ahead, starts, axis=-1))
            if rest is not None or np.isfinite(here).any():
                rest, child = here - self.cost[..., level.sort], level
                reach.append(here.swapaxes(0, 1))
        return reach[::-1]

    def _labels(self, limit: Array) -> Iterator[_Labels]:
        """Yield paths through intervals, a layer longer each time, without those too slow, too large or dominated."""
        parts, rooms = self.parts, np.arange(len(self.parts.memory))
        none, nothing = np.zeros(len(rooms), dtype=np.int64), np.zeros(len(rooms))
        labels = _Labels(rooms, none, none + parts.groups, nothing, nothing, nothing, none, none)
        for level, reach in zip(parts.levels, self._reach(limit), strict=False):
            first = np.searchsorted(level.parent, labels.node)
            count: Array = np.searchsorted(level.parent, labels.node, side="right") - first
            came = np.repeat(np.arange(len(count)), count)
            node = np.arange(len(came)) + (first - np.cumsum(count) + count)[came]
            kept = (reach[0] > -np.inf).any(axis=0)[labels.room[came], node]
            came, node = came[kept], node[kept]
            room, sort = labels.room[came], level.sort[node]
            time = labels.time[came, None] + parts.change[labels.group[came]][:, parts.group] + parts.time[room, sort]
            size = labels.size[came, None] + parts.bytes[room, sort]
            moment = np.maximum(labels.moment[came, None], parts.moment[room, sort])
            self.effort -= time.size
            if self.effort < 0:
                raise TooMuch
            row, pick = self._useful(reach, time, size + moment - parts.floor[room, None], room, node)
            time, size, moment = (array[row, pick] for array in (time, size, moment))
            labels = _Labels(room[row], node[row], parts.group[pick], time, size, moment, came[row], pick).unbeaten(
                parts
            )
            yield labels

    def _useful(self, reach: Array, time: Array, filled: Array, room: Array, node: Array) -> tuple[Array, Array]:
        """Return rows and strategies of paths that can still end in time, weight by weight: the first few drop most."""
        row, pick = np.nonzero(np.isfinite(time))
        time, filled = time[row, pick], filled[row, pick]
        place = np.ravel_multi_index((self.parts.group[pick], room[row], node[row]), reach.shape[1:])
        if len(row) < _FEW:
            cost = np.multiply.outer(self.on_time, time) + np.multiply.outer(self.on_bytes, filled)
            kept = np.flatnonzero((cost * (1 - SLACK) <= reach.reshape(len(reach), -1)[:, place]).all(axis=0))
            return row[kept], pick[kept]
        weights = range(len(self.on_time))
        for weight in (*weights[2::4], *weights[::4], *weights[1::2]):
            cost = time * self.on_time[weight] + filled * self.on_bytes[weight]
            kept = np.flatnonzero(cost * (1 - SLACK) <= reach[weight].reshape(-1)[place])
            row, pick, time, filled, place = (array[kept] for array in (row, pick, time, filled, place))
        return row, pick

    def strategies(self, found: list[tuple[int, int, int]]) -> tuple[int, ...]:
        """Return the strategy of every layer, for stages given as (first layer, the one after the last, group)."""
        parts = self.parts
        places = [(parts.kind[s], group, parts.node[first, last]) for s, (first, last, group) in enumerate(found)]
        limit = np.full(self.most.shape, -np.inf)
        for place in places:
            limit[place] = self.most[place] * (1 + SLACK)
        levels = list(self._labels(limit))
        strategies: list[int] = []
        for (kind, group, node), (first, last, _) in zip(places, found, strict=True):
            labels = levels[last - first - 1]
            here = (labels.node == node - parts.levels[last - first - 1].at.start) & (labels.group == group)
            here &= parts.room_kind[labels.room] == kind
            at = int(np.where(here, labels.seconds(parts), np.inf).argmin())
            path = []
            for labels in reversed(levels[: last - first]):
                path.append(int(parts.strategy[labels.pick[at]]))
                at = int(labels.came[at])
            strategies += path[::-1]
        return tuple(strategies)


@dataclass(frozen=True)
class _Labels:
    """Paths through intervals of one length, an array each."""

    room: Array
    node: Array
    group: Array
    time: Array
    size: Array
    moment: Array
    came: Array  # the path it extends
    pick: Array  # strategy of the last layer

    def seconds(self, parts: Parts) -> Array:
        """Return the seconds of paths that fit, infinite for others."""
        return np.where(self.size + self.moment <= parts.memory[self.room], self.time, np.inf)

    def unbeaten(self, parts: Parts) -> _Labels:
        """Return the labels without dominated ones, which another of the same end beats in time, size and moment.

        Sorted by time, a label is dominated in this case: the smallest before it, among those of a moment up to some
        threshold, leaves room for that threshold. Thresholds divide the range of a room; labels of one moment are
        compared separately.
        """
        order = np.lexsort((self.size, self.time, self.group, self.node, self.room))
        same = [self.room[order], self.node[order], self.group[order]]
        size, moment = self.size[order], self.moment[order]
        sizes, rank = np.unique(size, return_inverse=True)
        sizes, none = np.append(sizes, np.inf), len(sizes)
        low, wide = parts.floor[same[0]], (parts.ceiling - parts.floor)[same[0]]
        beaten, new = np.zeros(len(order), dtype=bool), _changes(same)
        for part in np.linspace(0.0, 1.0, _THRESHOLDS) if wide.any() else (0.0,):
            threshold = low + part * wide
            before = _smallest_before(np.where(moment <= threshold, rank, none), none, new)
            beaten |= sizes[before] + np.maximum(threshold - moment, 0.0) <= size
        if wide.any():
            alike = np.lexsort((moment, *same[::-1]))
            before = _smallest_before(rank[alike], none, _changes([array[alike] for array in (*same, moment)]))
            beaten[alike] |= sizes[before] <= size[alike]
        return _Labels(*(getattr(self, field.name)[order[~beaten]] for field in fields(self)))


def _changes(same: list[Array]) -> Array:
    """Return True at neighbours that differ in one of the arrays, and at the first."""
    new = np.ones(len(same[0]), dtype=bool)
    new[1:] = np.logical_or.reduce([array[1:] != array[:-1] for array in same])
    return new


def _smallest_before(rank: Array, none: int, new: Array) -> Array:
    """Return the least rank before each, back to where something is `new`; `none` if nothing is before it."""
    shift = np.cumsum(new) * (none + 1)
    before = np.append(0, np.minimum.accumulate(rank - shift))[: len(rank)]
    return np.where(new, none, before + shift)
