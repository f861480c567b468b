"""Places to cut a chain of layers into stages.

All cuts are tried if there are few. Else cuts are balanced by time on one device, with several roundings to whole
layers or blocks; `local_search.py` then moves the cuts of the best plan.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from math import comb
from typing import Any

import numpy as np

from meshwright.models import Model
from meshwright.search.space.limits import Limits

Array = Any
Parted = dict[tuple[int, int, bool], list[tuple[int, ...]]]  # cuts by stages, tilts, and whether blocks may be cut
_TILTS = (0.0, 0.1, 0.2, 0.3, 0.45, 0.6, -0.1, -0.2)
PARTS = (1.0, 0.8, 1.2)  # of an even share, for the first stage of a group with several
_TILTED = 16  # device groups; longer pipelines have too little in each stage to tilt
_CLOSE = 1e-3  # of the longest stage
_GRAIN = 0.1  # of a usual layer: resolution of weights
_ROUGHLY = 600  # cuts of a chain into few stages that get a bound at the end
_FEW = 36  # cuts of a chain that are all tried


@dataclass(frozen=True)
class Family:
    """Cuts of a chain into equally many stages, and the layers that every stage then holds."""

    cuts: Sequence[tuple[int, ...]]
    counts: Array  # (place, sort): layers of each sort before each place

    def __len__(self) -> int:
        return len(self.cuts)

    @cached_property
    def where(self) -> Array:
        """(cuts, stage + 1): begin and end of stages."""
        return np.array(self.cuts)

    @cached_property
    def held(self) -> Array:
        """(cuts, stage, sort): layers of each sort."""
        return self.counts[self.where[:, 1:]] - self.counts[self.where[:, :-1]]

    @cached_property
    def turned(self) -> Array:
        """(cuts, sort, stage): as `held`, in the order that matrix products need."""
        return np.ascontiguousarray(self.held.transpose(0, 2, 1))

    def lead(self, groups: int) -> Array:
        """Return (cuts, sort): layers of each sort before a group, summed over all groups.

        A group cannot begin before they have passed on the first micro-batch.
        """
        found: Array = np.einsum("k,qks->qs", groups - 1.0 - np.arange(groups), self.held[:, :groups])
        return found


Known = dict[tuple[tuple[int, ...], tuple[float, ...]], Family]  # cuts by homes and weights


def places(model: Model, limits: Limits) -> Array:
    """Return the positions between layers at which a pipeline may be cut: anywhere, or between blocks only."""
    layers = model.layers
    inside = [bool(layers[i].block) and layers[i].block == layers[i - 1].block for i in range(1, len(layers))]
    allowed = [i + 1 for i, cut in enumerate(inside) if limits.allows("split") or not cut]
    return np.array(allowed, dtype=np.int64)


def balanced(
    weights: Array, homes: tuple[int, ...], where: Array, between: Array, known: Parted | None = None
) -> list[tuple[int, ...]]:
    """Return cuts that give each device group about equal work; each starts with 0 and ends with the last layer.

    Cuts are at some places (`where`), or only at those `between` blocks; `homes` is the group of each stage. Short
    pipelines of one stage per group also get cuts whose stages grow or shrink along the pipeline. If memory is short,
    stages that hold more micro-batches then take fewer layers. `known` keeps results that do not depend on the groups,
    for calls with the same weights and places.
    """
    known = {} if known is None else known
    count, stages = len(weights), len(homes)
    virtual = stages // (max(homes) + 1)
    tilts = _TILTS if virtual == 1 and stages <= _TILTED else _TILTS[:1]
    if stages == 1:
        return [(0, count)]
    if len(where) < stages - 1:
        return []
    if comb(len(where), stages - 1) <= _FEW:
        return [(0, *some, count) for some in combinations(where.tolist(), stages - 1)]
    # Many short stages in a group even out: whole blocks are fine enough with two or more per stage.
    sets = (between,) if virtual > 2 and len(between) >= 2 * stages else (where, between)
    found: dict[tuple[int, ...], None] = {}
    total = np.concatenate([[0.0], np.cumsum(weights)])
    for allowed in sets:
        if len(allowed) < stages - 1:
            continue
        key = (stages, len(tilts), allowed is where)
        if key not in known:
            some = [_rounded(total, stages, allowed, tilt) for tilt in tilts]
            longest = float(np.diff(total[list(some[0])]).max())
            known[key] = [*some, *_packed(total, stages, allowed, longest)]
        found.update(dict.fromkeys(known[key]))
        if virtual > 1:
            found[shared_out(total, homes, allowed, 1.0)] = None
    return list(found)


def even(model: Model, stages: int) -> list[tuple[int, ...]]:
    """Return cuts into stages with equally many blocks, or none. Other layers stay with their neighbours."""
    starts = [i for i, layer in enumerate(model.layers) if layer.block and layer.opens_block]
    if stages == 1:
        return [(0, len(model.layers))]
    if not starts or len(starts) % stages:
        return []
    return [(0, *starts[len(starts) // stages :: len(starts) // stages], len(model.layers))]


def _between_blocks(model: Model) -> Array:
    layers = model.layers
    return np.array([i for i in range(1, len(layers)) if not layers[i].block or layers[i].block != layers[i - 1].block])


def _rounded(total: Array, stages: int, allowed: Array, tilt: float) -> tuple[int, ...]:
    """Return each cut at the allowed place nearest to its share; the last stage takes `1 + tilt` of a fair one."""
    reached = total[allowed]
    part = np.arange(1, stages) / stages
    target = total[-1] * (part - tilt * part * (1 - part))
    near = np.searchsorted(reached, target).clip(1, len(reached) - 1) if len(reached) > 1 else np.zeros(1, dtype=int)
    near = near - (target - reached[near - 1] <= reached[near] - target) if len(reached) > 1 else near
    number = np.arange(stages - 1)
    near = np.maximum.accumulate(near - number) + number  # one place for each cut
    near = np.minimum(near, len(reached) - stages + 1 + number)
    return (0, *allowed[near].tolist(), len(total) - 1)


def shared_out(
    total: Array, homes: tuple[int, ...], allowed: Array, part: float, shares: Array | None = None
) -> tuple[int, ...]:
    """Return cuts where each stage takes an even part of its group's rest, and a group's first stage `part` as much.

    If rounding to whole layers gives a group too much, its later stages have less. `total` is the work before each
    place; `shares` are the groups' parts of all work, or equal.
    """
    places_ = allowed.tolist()
    reached = total[allowed].tolist()
    groups, stages = max(homes) + 1, len(homes)
    fair = np.full(groups, 1 / groups) if shares is None else shares
    left, still = (total[-1] * fair).tolist(), [stages // groups] * groups
    at, here, chosen = -1, 0.0, [0]
    for s, group in enumerate(homes[:-1]):
        first = part if still[group] == stages // groups else 1.0
        target = here + first * left[group] / still[group]
        high = len(places_) - (stages - 2 - s)  # leave a place for each cut that follows
        near = bisect_left(reached, target, at + 1, high)
        if near > at + 1 and (near == high or target - reached[near - 1] <= reached[near] - target):
            near -= 1
        at = min(near, high - 1)
        left[group] -= reached[at] - here
        still[group] -= 1
        here = reached[at]
        chosen.append(places_[at])
    return (*chosen, len(total) - 1)


def _packed(total: Array, stages: int, allowed: Array, most: float) -> list[tuple[int, ...]]:
    """Return cuts with the least longest stage, `most` or less, filled from the front, and from the back."""
    count = len(total) - 1
    ahead = np.append(allowed, count)
    behind = np.append(count - allowed[::-1], count)
    here, there = total[ahead].tolist(), (total[-1] - total[count - behind]).tolist()
    best = _least_longest(here, stages, most)
    found = []
    if front := _fill(here, stages, best):
        found.append((0, *ahead[front].tolist()))
    if back := _fill(there, stages, best):
        found.append((0, *(count - behind[back[:-1]])[::-1].tolist(), count))
    return found


def _least_longest(reached: list[float], stages: int, most: float) -> float:
    longest = max(b - a for a, b in pairwise([0.0, *reached]))
    low, high = max(reached[-1] / stages, longest), most
    while high - low > max(_CLOSE * high, _GRAIN):
        middle = (low + high) / 2
        if _fill(reached, stages, middle):
            high = middle
        else:
            low = middle
    return high


def _fill(reached: list[float], stages: int, most: float) -> list[int] | None:
    """Return the ends of stages as long as `most` allows, at least one place each; None if they end early."""
    found, at, here = [], -1, 0.0
    most *= 1 + 1e-12
    for last in range(len(reached) - stages, len(reached)):
        end = bisect_right(reached, here + most, at + 1, last + 1) - 1
        if end <= at:
            return None
        found.append(end)
        at, here = end, reached[end]
    return found if at == len(reached) - 1 else None


class Cutter:
    """Cuts by stage size and micro-batch, which decide the times of layers and so the balanced cuts."""

    def __init__(self, model: Model, sort: Array, counts: Array, limits: Limits, known: Known | None = None) -> None:
        """Create a cutter; `known` holds cuts from searches of the same model under the same limits."""
        self.model, self.sort, self.counts = model, sort, counts
        self.places = places(model, limits)
        self.between = np.intersect1d(self.places, _between_blocks(model))
        self.even = not limits.allows("uneven")
        self._weights: dict[tuple[int, int], tuple[float, ...]] = {}
        self._cuts: Known = {} if known is None else known
        self._parted: dict[tuple[float, ...], Parted] = {}  # by weights
        self._leads: dict[tuple[tuple[int, ...], tuple[float, ...]], Array] = {}

    def weigh(self, size: int, micro_batches: int, seconds: Array) -> None:
        """Set the time of every kind of layer, in tenths of a usual layer, so that tables can share their cuts."""
        usual = np.mean(seconds[self.sort])
        self._weights[size, micro_batches] = tuple((np.round(10 * seconds / usual) / 10).tolist())

    def cuts(self, homes: tuple[int, ...], size: int, micro_batches: int) -> Family:
        """Return cuts into stages whose device groups are `homes`."""
        key = (homes, self._weights[size, micro_batches])
        if key not in self._cuts:
            each = np.maximum(np.array(key[1]), 1e-3)[self.sort]
            if self.even:
                self._cuts[key] = Family(even(self.model, len(homes)), self.counts)
            else:
                parted = self._parted.setdefault(key[1], {})
                self._cuts[key] = Family(balanced(each, homes, self.places, self.between, parted), self.counts)
        return self._cuts[key]

    def roughly(self, stages: int) -> list[tuple[int, ...]]:
        """Return every cut of the chain at some evenly spaced places: some hundred."""
        count = len(self.places)
        while comb(count, stages - 1) > _ROUGHLY:
            count -= 1
        some = self.places[np.linspace(0, len(self.places) - 1, count).round().astype(int)]
        return [(0, *cut, len(self.sort)) for cut in combinations(some.tolist(), stages - 1)]

    def shared(self, homes: tuple[int, ...], slower: Array, seconds: Array) -> list[tuple[int, ...]]:
        """Return cuts that give each group work in inverse proportion to its slowness; `seconds` are per layer."""
        total = np.concatenate([[0.0], np.cumsum(seconds)])
        shares = 1 / slower / (1 / slower).sum()
        fine = [where for where in (self.places, self.between) if len(where) >= len(homes) - 1]
        return [shared_out(total, homes, where, part, shares) for where in fine for part in PARTS]

    def lead(self, homes: tuple[int, ...], size: int, micro_batches: int) -> Array:
        """Return layers of each sort before each group, summed over the groups: (cuts, sort)."""
        key = (homes, self._weights[size, micro_batches])
        if key not in self._leads:
            self._leads[key] = self.cuts(homes, size, micro_batches).lead(max(homes) + 1)
        return self._leads[key]
