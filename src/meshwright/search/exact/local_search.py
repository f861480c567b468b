"""Move the cuts of a plan while that makes it faster.

Cuts balanced by time may be better a layer further: groups may use different amounts of memory, or the ends of the
chain may cost more on some grids than on others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.search.bounds.lower_bounds import least_seconds
from meshwright.search.bounds.memory_fit import Settled
from meshwright.search.bounds.pipeline_shapes import Cuts, Found, Setting, homes_of
from meshwright.search.exact.evaluate import best_cuts
from meshwright.search.space.activation_modes import Mode
from meshwright.search.space.cuts import Cutter, Family

Array = Any
_ROUNDS = 24
_SLACK = 1.002  # of a plan's time: it may become this much slower if more groups are fast
_BALANCED = 3  # rounds of balancing with each group's cost of memory
_SHORT = 32  # stages; longer pipelines have hundreds of neighbours
_ANYWHERE = 17  # cuts; in longer pipelines, layers move to the next stage or the one after it
_TRIED = 6  # neighbours that are simulated in each round
_FEW = 4  # stages; their cuts are searched all over the chain
_ROUGH = 96  # of those, fitted roughly
_SETTLED = 4  # times as many are fitted


def polished(
    setting: Setting, places: list[int], modes: list[Mode], found: Found, tried: int = _TRIED,
    known: dict[object, Settled] | None = None,
) -> Found:  # fmt: skip
    """Return the same choice with better cuts, trying the `tried` most promising neighbours in each round.

    `places` are the allowed cuts; `known` keeps fits of groups, for calls with the same choice.
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
    """Return the same choice with other cuts, fastest first.

    Tried are given cuts, cuts weighted by how much memory slows each group, and, for few stages, some from anywhere.
    """
    shape = found.shape
    seen = {found.cuts: found}
    tried, waiting = {found.cuts}, [*cuts, *_anywhere(setting, cutter, found)]
    for _ in range(_BALANCED):
        new = [cut for cut in dict.fromkeys(waiting) if cut not in tried]
        tried.update(new)
        seen |= {
            other.cuts: other for other in _simulated(setting, modes, found, new, np.inf, known, _SETTLED * _TRIED)
        }
        best = min(seen.values(), key=lambda f: f.seconds)
        waiting = cutter.shared(homes_of(shape), _slower(setting, best), _seconds_per_layer(setting, best))
    return sorted(seen.values(), key=lambda f: f.seconds)


def _anywhere(setting: Setting, cutter: Cutter, found: Found) -> list[Cuts]:
    """Return the most promising of cuts all over the chain; with few stages there are few rough cuts."""
    if not 2 <= found.shape.stages <= _FEW:
        return []
    cuts = cutter.roughly(found.shape.stages)
    table = found.table.take(np.array([found.row]))
    bounds = least_seconds(setting, found.shape, Family(cuts, setting.chain.counts), table, found.seconds)[:, 0]
    near = np.argsort(bounds, kind="stable")[:_ROUGH]
    return [cuts[q] for q in near if bounds[q] < found.seconds]


def _simulated(
    setting: Setting, modes: list[Mode], found: Found, cuts: Sequence[Cuts], limit: float, known: dict[object, Settled],
    tried: int,
) -> list[Found]:  # fmt: skip
    """Return a choice with the most promising of other cuts below a limit. One mode for all stages stays so."""
    one, cap = found.table.take(np.array([found.row])), max(found.away, default=1.0)
    if setting.stagewise or found.shape.groups == 1:
        others = best_cuts(setting, found.shape, cuts, one, modes, limit, known, tried, cap)
    else:
        mode = found.modes[0][0]
        others = best_cuts(setting, found.shape, cuts, one.under(mode), [modes[mode]], limit, known, tried, cap)
        others = [replace(o, modes=tuple((mode, mode, split) for _, _, split in o.modes)) for o in others]
    return [replace(other, table=found.table, row=found.row) for other in others]


def _seconds_per_layer(setting: Setting, found: Found) -> Array:
    table = found.table
    return (table.forward[0, :, found.row] + table.backward[0, :, found.row])[setting.chain.sort]


def _slower(setting: Setting, found: Found) -> Array:
    """Return (group,): time of its layers under their modes over the time without recompute."""
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
    """Return one of the neighbours if it is faster; least bound first."""
    cuts = list(neighbours(best.cuts, places))
    if not cuts:
        return None
    most, table = _SLACK * best.seconds, best.table.take(np.array([best.row]))
    bounds = least_seconds(setting, best.shape, Family(cuts, setting.chain.counts), table, most)[:, 0]
    near = np.argsort(bounds, kind="stable")[: _SETTLED * tried]
    others = _simulated(setting, modes, best, [cuts[q] for q in near if bounds[q] < most], most, known, tried)
    found = min(others, key=lambda other: other.spread, default=best)
    return found if found.spread < best.spread * (1 - 1e-9) else None


def neighbours(cuts: Cuts, places: list[int]) -> Iterator[Cuts]:
    """Yield cuts with one layer (or two) moved to another stage; all cuts between them move."""
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
