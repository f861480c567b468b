"""Move the cuts of the best plan while that makes it faster.

The search proves its plan the best among balanced cuts; a cut may still stand better one layer further, where groups
have different memory in use or the ends of the chain weigh more on some grids than on others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from meshwright.search.bounds import least_seconds
from meshwright.search.shapes import Cuts, Found
from meshwright.search.simulated import best_of
from meshwright.search.solve import Search

_ROUNDS = 8
_TRIED = 6  # neighbours that are simulated in each


def polish(search: Search) -> None:
    """Try neighbours of the best plan's cuts, least bound first, until none is better."""
    for _ in range(_ROUNDS):
        if not search.best or search.best[0].shape.stages == 1 or search.late:
            return
        better = _better(search, search.best[0])
        if better is None:
            return
        search.best.insert(0, better)


def _better(search: Search, best: Found) -> Found | None:
    """The same choice with other cuts, if that is faster."""
    table, setting = best.table.take(np.array([best.row])), search.setting_of(best.shape)
    cuts = list(_neighbours(best.cuts, search))
    if not cuts:
        return None
    bounds = least_seconds(setting, best.shape, cuts, table, best.seconds)[:, 0]
    found = best
    for q in np.argsort(bounds, kind="stable")[:_TRIED]:
        if bounds[q] >= found.seconds:
            break
        found = best_of(setting, best.shape, cuts[q], table, search.modes, found.seconds) or found
    return replace(found, table=best.table, row=best.row) if found is not best else None


def _neighbours(cuts: Cuts, search: Search) -> Iterator[Cuts]:
    """One cut moved by one or two places, or two cuts next to each other moved together."""
    places = [0, *search.places, cuts[-1]]
    at = [places.index(cut) for cut in cuts]
    inner = range(1, len(cuts) - 1)
    moves = [(i, i, step) for step in (-1, 1, -2, 2) for i in inner]
    moves += [(i, i + 1, step) for step in (-1, 1) for i in inner if i + 1 in inner]
    for first, last, step in moves:
        moved = [a + step if first <= i <= last else a for i, a in enumerate(at)]
        if all(b > a for a, b in pairwise(moved)):
            yield tuple(places[a] for a in moved)
