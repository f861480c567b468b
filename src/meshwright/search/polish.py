"""Move the cuts of a plan while that makes it faster.

Cuts that are balanced by time may stand better a layer further: where groups have different memory in use, or the ends
of the chain weigh more on some grids than on others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from meshwright.search.bounds import least_seconds
from meshwright.search.modes import Mode
from meshwright.search.shapes import Cuts, Found, Setting
from meshwright.search.simulated import best_of
from meshwright.search.stages import Settled

_ROUNDS = 8
_SHORT = 32  # stages; longer pipelines have hundreds of neighbours
_TRIED = 6  # neighbours that are simulated in each


def polished(setting: Setting, places: list[int], modes: list[Mode], found: Found) -> Found:
    """The same choice with cuts that no neighbour of theirs beats; `places` are those where a cut may stand."""
    rounds = _ROUNDS if found.shape.stages <= _SHORT else 2
    known: dict[object, Settled] = {}
    for _ in range(rounds if found.shape.stages > 1 else 0):
        better = _better(setting, places, modes, found, known)
        if better is None:
            break
        found = better
    return found


def _better(
    setting: Setting, places: list[int], modes: list[Mode], best: Found, known: dict[object, Settled]
) -> Found | None:
    """One of the neighbours, if it is faster; least bound first."""
    cuts = list(neighbours(best.cuts, places))
    if not cuts:
        return None
    table, found = best.table.take(np.array([best.row])), best
    bounds = least_seconds(setting, best.shape, cuts, table, best.seconds)[:, 0]
    for q in np.argsort(bounds, kind="stable")[:_TRIED]:
        if bounds[q] >= found.seconds:
            break
        found = best_of(setting, best.shape, cuts[q], table, modes, found.seconds, known) or found
    return replace(found, table=best.table, row=best.row) if found is not best else None


def neighbours(cuts: Cuts, places: list[int]) -> Iterator[Cuts]:
    """One cut moved by one or two places, or two cuts next to each other moved together."""
    every = [0, *places, cuts[-1]]
    index = {place: i for i, place in enumerate(every)}
    at = [index[cut] for cut in cuts]
    inner = range(1, len(cuts) - 1)
    moves = [(i, i, step) for step in (-1, 1, -2, 2) for i in inner]
    moves += [(i, i + 1, step) for step in (-1, 1) for i in inner if i + 1 in inner]
    for first, last, step in moves:
        moved = [a + step if first <= i <= last else a for i, a in enumerate(at)]
        if all(b > a for a, b in pairwise(moved)):
            yield tuple(every[a] for a in moved)
