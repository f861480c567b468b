"""Cut a chain of layers into pipeline stages and choose a strategy for every layer: the exact optimum.

The problem extends UniAP's (arXiv 2307.16375): memory in flight that differs per stage, transient memory, and time to
change the layout. A step of m micro-batches takes the sum of all stages and links, and m - 1 times the slowest of them.
The step needs only the fastest path of an interval that fits its memory, per strategy of the last layer, whose `send`
depends on it. So:

1. Equal intervals and interchangeable strategies are merged (`Parts`).
2. Prices on memory bound the time of every interval from below; those of their paths that fit bound it from above.
3. Intervals that may still be part of a better step are solved exactly, label by label (`Paths`).
4. Cuts come from a dynamic programme under a cap on the slowest stage or link, with branching over caps (`_Cuts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.search.refine.chain_paths import SLACK, Instance, Parts, Paths

Array = Any
_PIECES = 12  # ranges of caps that are searched separately
_CLASSES = 4  # ranges of transient memory, at first
_SHARES = (0.1, 0.4, 1.0)  # of the gap between bound and best: is there a step below this?


@dataclass(frozen=True)
class Solution:
    """Cuts and strategies: stage s holds layers `cuts[s]` up to, not including, `cuts[s + 1]`."""

    value: float
    cuts: tuple[int, ...]
    strategies: tuple[int, ...]


@np.errstate(invalid="ignore")  # inf - inf and 0 * inf, where something is not allowed
def solve(instance: Instance, limit: float = np.inf, enough: float = 0.0, effort: float = np.inf) -> Solution | None:
    """Return the least step; None if nothing fits, or nothing is below `limit`.

    The result is within one part in 1e11 of the optimum, or within `enough` of it, and depends on nothing but the
    arguments. Raises `TooMuch` if it needs more than `effort` paths.
    """
    layers, stages = len(instance.time), instance.stages
    if layers < stages:
        return None
    values = np.unique(instance.moment[np.isfinite(instance.time)])
    fastest = instance.time.min(axis=1).sum()
    whole = layers - stages + 1
    count, longest = _CLASSES, min(whole, 2 * -(-layers // stages))
    while True:
        parts = Parts(instance, _classes(values, count), longest)
        paths, cuts = Paths(parts, effort), _Cuts(parts)
        best, found = cuts.least(paths.most, limit)
        if longest < whole and fastest + cuts.more * paths.shortest < best:
            longest = min(whole, 2 * longest)
        elif np.isinf(best) and count < len(values):
            count *= 4  # the fit depends on transient memory inside a class
        elif np.isinf(best):
            return None
        else:
            break
    for share in _SHARES:
        low = min(cuts.worth(paths.least, best)[1], best)
        while True:
            worth = cuts.worth(paths.least, min(low + share * (best - low), best * (1 - enough)))[0]
            unsure = (worth > paths.least * (1 + SLACK)) & (paths.least < paths.most)
            if not unsure.any():
                break
            paths.settle(np.where(unsure, np.minimum(worth, paths.most), -np.inf))
            best, better = cuts.least(paths.most, best)
            found = better or found
    return Solution(best, (0, *(last for _, last, _ in found)), paths.strategies(found)) if found else None


def _classes(values: Array, count: int) -> Array:
    """Return (class, 2): ranges of transient memory that hold all values, each with its least and its most."""
    if len(values) <= count:
        return np.stack([values, values], axis=1) if len(values) else np.zeros((1, 2))
    edges = np.linspace(values[0], values[-1], count + 1)[1:-1]
    groups = np.split(values, np.searchsorted(values, edges, side="right"))
    return np.array([[group[0], group[-1]] for group in groups if len(group)])


class _Cuts:
    """Every interval that a stage may hold, one row each, and the dynamic programme over them."""

    def __init__(self, parts: Parts) -> None:
        layers, stages = len(parts.send), parts.stages
        stage, first, last = np.ogrid[:stages, :layers, : layers + 1]
        may = (first >= stage) & (last > first) & (last - first <= len(parts.levels))
        may &= (last <= layers - (stages - 1 - stage)) & ((stage > 0) | (first == 0))
        may &= (stage < stages - 1) | (last == layers)
        self.stage, self.first, self.last = self.rows = np.nonzero(may)
        self.shape, self.more = may.shape, parts.micro_batches - 1
        self.kind, self.node = parts.kind[self.stage], parts.node[self.first, self.last]
        self.link = np.where(self.stage[:, None] < stages - 1, parts.send[self.last - 1], 0.0)

    def least(self, table: Array, best: float) -> tuple[float, list[tuple[int, int, int]] | None]:
        """Return the least step below `best` for these times of intervals, with the interval and group per stage."""
        seconds = table[self.kind, :, self.node]
        total, height = seconds + self.link, np.maximum(seconds, self.link)
        found, ranges = None, [(self._slowest(height), float(np.finfo(np.float64).max))]
        while ranges:
            low, high = ranges.pop()
            allowed = np.where(height <= high, total, np.inf)
            ahead, sums = self._ahead(allowed)
            least = float(ahead[-1, -1])
            if not least + self.more * low < best * (1 - SLACK):
                continue
            path: list[tuple[int, int, int]] = []
            slowest = 0.0
            for s in reversed(range(self.shape[0])):
                last = path[0][0] if path else self.shape[1]
                first = int((ahead[s, :-1] + sums[s, :, last]).argmin())
                row = np.flatnonzero((self.stage == s) & (self.first == first) & (self.last == last))[0]
                group = int(allowed[row].argmin())
                path.insert(0, (first, last, group))
                slowest = max(slowest, float(height[row, group]))
            if least + self.more * slowest < best:
                best, found = least + self.more * slowest, path
            if slowest > low:
                middle = (low + slowest) / 2
                ranges += [(low, middle), (middle, float(np.nextafter(slowest, 0.0)))]
        return best, found

    def worth(self, table: Array, aim: float) -> tuple[Array, float]:
        """Return the longest useful time of an interval in a step below `aim`, given least times; and a lower bound."""
        worth, bound = np.full(table.shape, -np.inf), np.inf
        seconds = table[self.kind, :, self.node]
        total, height = seconds + self.link, np.maximum(seconds, self.link)
        low, least = self._slowest(height), self._around(total)[1]
        high = (aim - least) / self.more if self.more else np.inf
        if not low <= high or np.isinf(low):
            return worth, least + self.more * low
        edges = np.linspace(low, high, _PIECES + 1) if self.more else np.array([low, high])
        useful = np.full(total.shape, -np.inf)
        for low, high in pairwise(edges):
            around, least = self._around(np.where(height <= high, total, np.inf))
            bound = min(bound, least + self.more * low)
            if least + self.more * low < aim:
                left = aim - around[:, None] - self.link
                longest = np.minimum(left - self.more * np.maximum(self.link, low), left / (self.more + 1))
                may = np.isfinite(left) & (self.link <= high)  # 0 * inf is no number
                np.maximum(useful, np.where(may, np.minimum(longest, high), -np.inf), out=useful)
        np.maximum.at(worth, (self.kind[:, None], np.arange(useful.shape[1]), self.node[:, None]), useful)
        return worth, bound

    def _dense(self, per_row: Array) -> Array:
        dense = np.full(self.shape, np.inf)
        dense[self.rows] = per_row
        return dense

    def _slowest(self, height: Array) -> float:
        """Return the least height of the highest stage or link."""
        reached = np.append(0.0, np.full(self.shape[1], np.inf))
        for stage in self._dense(height.min(axis=1)):
            reached = np.maximum(reached[:-1, None], stage).min(axis=0)
        return float(reached[-1])

    def _ahead(self, total: Array) -> tuple[Array, Array]:
        """Return (stage, layer): the least sum of all stages before; and (stage, first, last): the least times."""
        sums = self._dense(total.min(axis=1))
        ahead = np.full((self.shape[0] + 1, self.shape[2]), np.inf)
        ahead[0, 0] = 0.0
        for s, stage in enumerate(sums):
            ahead[s + 1] = (ahead[s, :-1, None] + stage).min(axis=0)
        return ahead, sums

    def _around(self, total: Array) -> tuple[Array, float]:
        """Return per row the least sum of all other stages, and the least sum of all."""
        ahead, sums = self._ahead(total)
        behind = np.full(ahead.shape, np.inf)
        behind[-1, -1] = 0.0
        for s in reversed(range(len(sums))):
            behind[s, :-1] = (sums[s] + behind[s + 1]).min(axis=1)
        return ahead[self.stage, self.first] + behind[self.stage + 1, self.last], float(ahead[-1, -1])
