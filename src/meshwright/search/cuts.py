"""Where a chain of layers may be cut into stages.

Cuts are balanced by time on one device, with several ways to round to whole layers or whole blocks; 1F1B and GPipe
may then move every cut (`boundaries.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.model import Model
from meshwright.search.limits import Limits

Array = Any


def places(model: Model, limits: Limits) -> Array:
    """Positions between layers at which a pipeline may be cut: anywhere, or between blocks only."""
    layers = model.layers
    inside = [bool(layers[i].block) and layers[i].block == layers[i - 1].block for i in range(1, len(layers))]
    allowed = [i + 1 for i, cut in enumerate(inside) if limits.allows("split") or not cut]
    return np.array(allowed, dtype=np.int64)


def balanced(weights: Array, stages: int, where: Array, model: Model) -> list[tuple[int, ...]]:
    """Cuts into so many stages that take about the same time; each starts with 0 and ends with the last layer."""
    count = len(weights)
    if stages == 1:
        return [(0, count)]
    if len(where) < stages - 1:
        return []
    blocks = _between_blocks(model)
    found: dict[tuple[int, ...], None] = {}
    for allowed in (where, np.intersect1d(where, blocks)):
        if len(allowed) < stages - 1:
            continue
        found.update(dict.fromkeys(_rounded(weights, stages, allowed)))
        found.update(dict.fromkeys(_packed(weights, stages, allowed)))
    return list(found)


def _between_blocks(model: Model) -> Array:
    layers = model.layers
    return np.array([i for i in range(1, len(layers)) if not layers[i].block or layers[i].block != layers[i - 1].block])


def _rounded(weights: Array, stages: int, allowed: Array) -> list[tuple[int, ...]]:
    """Each cut at the allowed place nearest to its share of the total."""
    total = np.concatenate([[0.0], np.cumsum(weights)])
    chosen: list[int] = []
    for s in range(1, stages):
        target = total[-1] * s / stages
        low = np.searchsorted(allowed, chosen[-1] if chosen else 0, side="right")
        high = len(allowed) - (stages - 1 - s)
        if low >= high:
            return []
        window = allowed[low:high]
        chosen.append(int(window[np.argmin(np.abs(total[window] - target))]))
    return [(0, *chosen, len(weights))]


def _packed(weights: Array, stages: int, allowed: Array) -> list[tuple[int, ...]]:
    """The least longest stage, filled from the front, and from the back."""
    total = np.concatenate([[0.0], np.cumsum(weights)])
    ends = np.concatenate([allowed, [len(weights)]])
    starts = np.concatenate([[0], allowed])
    best = _least_longest(total, stages, ends)
    found = []
    for forward in (True, False):
        cuts = _fill(total, stages, ends if forward else starts, best, forward=forward)
        if cuts:
            found.append(cuts)
    return found


def _least_longest(total: Array, stages: int, ends: Array) -> float:
    low, high = float(total[-1]) / stages, float(total[-1])
    for _ in range(40):
        middle = (low + high) / 2
        if _fill(total, stages, ends, middle, forward=True):
            high = middle
        else:
            low = middle
    return high


def _fill(total: Array, stages: int, ends: Array, most: float, *, forward: bool) -> tuple[int, ...] | None:
    """Stages as long as `most` allows, each at least one place long; nothing if they do not reach the end."""
    places_, last = (ends, len(total) - 1) if forward else (ends[::-1], 0)
    cuts, at = [0 if forward else len(total) - 1], -1
    for s in range(stages):
        spare = stages - 1 - s
        window = places_[at + 1 : len(places_) - spare]
        if not len(window):
            return None
        length = np.abs(total[window] - total[cuts[-1]])
        fits = int(np.searchsorted(length, most * (1 + 1e-12), side="right"))
        if not fits:
            return None
        at = at + fits
        cuts.append(int(places_[at]))
    if cuts[-1] != last:
        return None
    return tuple(cuts if forward else cuts[::-1])
