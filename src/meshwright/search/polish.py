"""Move the cuts of a plan while that makes it faster.

Cuts that are balanced by time may stand better a layer further: where groups have different memory in use, or the ends
of the chain weigh more on some grids than on others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.search.bounds import least_seconds
from meshwright.search.cuts import Cutter, Family
from meshwright.search.modes import Mode
from meshwright.search.shapes import Cuts, Found, Setting, homes_of
from meshwright.search.simulated import best_of
from meshwright.search.stages import Settled

Array = Any
_ROUNDS = 8
_SLACK = 1.002  # of a plan's time: so much slower it may become if more groups are fast
_BALANCED = 3  # rounds of balancing with what memory asks of each group
_SHORT = 32  # stages; longer pipelines have hundreds of neighbours
_ANYWHERE = 17  # cuts; of longer pipelines layers go to a neighbour, or the next but one
_TRIED = 6  # neighbours that are simulated in each round


def polished(
    setting: Setting, places: list[int], modes: list[Mode], found: Found, tried: int = _TRIED,
    known: dict[object, Settled] | None = None,
) -> Found:  # fmt: skip
    """The same choice with cuts that are better than some of their neighbours, the `tried` most promising of each.

    `places` are those where a cut may stand; `known` keeps how groups were settled, for calls with the same choice.
    """
    rounds = _ROUNDS if found.shape.stages <= _SHORT else 2
    known = {} if known is None else known
    best = found
    for _ in range(rounds if found.shape.stages > 1 else 0):
        better = _better(setting, places, modes, found, known, tried)
        if better is None:
            break
        found = better
        best = min(best, found, key=lambda f: f.seconds)
    return best


def started(
    setting: Setting,
    cutter: Cutter,
    modes: list[Mode],
    found: Found,
    cuts: Sequence[Cuts],
    known: dict[object, Settled],
) -> list[Found]:
    """The same choice with other cuts, fastest first: some given ones, and those that weigh how much slower memory
    makes each group."""
    shape, table = found.shape, found.table.take(np.array([found.row]))
    seen: dict[Cuts, Found | None] = {found.cuts: found}
    best, waiting = found, cuts
    for _ in range(_BALANCED):
        for cut in waiting:
            if cut not in seen:
                other = best_of(setting, shape, cut, table, modes, np.inf, known)
                seen[cut] = replace(other, table=found.table, row=found.row) if other else None
        best = min((f for f in seen.values() if f), key=lambda f: f.seconds)
        waiting = cutter.shared(homes_of(shape), _slower(setting, best), _seconds_per_layer(setting, best))
    return sorted((f for f in seen.values() if f), key=lambda f: f.seconds)


def _seconds_per_layer(setting: Setting, found: Found) -> Array:
    table = found.table
    return (table.forward[0, :, found.row] + table.backward[0, :, found.row])[setting.chain.sort]


def _slower(setting: Setting, found: Found) -> Array:
    """(group,): what its layers take under their modes, of what they take with nothing repeated."""
    both = (found.table.forward + found.table.backward)[:, :, found.row]  # (mode, sort)
    counts, factors = setting.chain.counts, []
    for group, (first, second, split) in enumerate(found.modes):
        taken = plain = 0.0
        for low, high in found.shape.ranges(found.cuts, group):
            middle = min(max(split, low), high)
            taken += float(
                (counts[middle] - counts[low]) @ both[first] + (counts[high] - counts[middle]) @ both[second]
            )
            plain += float((counts[high] - counts[low]) @ both[0])
        factors.append(taken / plain)
    return np.array(factors)


def _better(
    setting: Setting, places: list[int], modes: list[Mode], best: Found, known: dict[object, Settled], tried: int
) -> Found | None:
    """One of the neighbours, if it is faster; least bound first."""
    cuts = list(neighbours(best.cuts, places))
    if not cuts:
        return None
    table, found = best.table.take(np.array([best.row])), best
    family = Family(cuts, setting.chain.counts)
    bounds = least_seconds(setting, best.shape, family, table, best.seconds)[:, 0]
    for q in np.argsort(bounds, kind="stable")[:tried]:
        if bounds[q] >= _SLACK * best.seconds:
            break
        other = best_of(setting, best.shape, cuts[q], table, modes, _SLACK * best.seconds, known)
        if other and other.spread < found.spread * (1 - 1e-9):
            found = other
    return replace(found, table=best.table, row=best.row) if found is not best else None


def neighbours(cuts: Cuts, places: list[int]) -> Iterator[Cuts]:
    """One layer (or two) of a stage given to its neighbour, or to another stage: all cuts between them move."""
    every = [0, *places, cuts[-1]]
    index = {place: i for i, place in enumerate(every)}
    at = [index[cut] for cut in cuts]
    far = len(cuts) if len(cuts) <= _ANYWHERE else 2
    moves = [(i, i, step) for step in (-2, 2) for i in range(1, len(cuts) - 1)]
    for first in range(1, len(cuts) - 1):
        moves += [(first, last, step) for last in range(first, min(first + far, len(cuts) - 1)) for step in (-1, 1)]
    for first, last, step in moves:
        moved = [a + step if first <= i <= last else a for i, a in enumerate(at)]
        if all(b > a for a, b in pairwise(moved)):
            yield tuple(every[a] for a in moved)
