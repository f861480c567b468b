"""How much of a step each call is to blame for: moments in which several calls are exposed are shared between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.observe.distinct import distinct
from meshwright.observe.job.ordering import Ints
from meshwright.observe.rank.calls import Calls

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Exposed:
    """Nanoseconds of each call of a rank within its steps while nothing computes; together they are those of its steps."""

    transfer: Floats
    waiting: Floats
    bubble: Floats


def exposed(calls: Calls, edges: Ints, waiting: Ints, bubble: Ints) -> Exposed:
    """Each moment between the first and the last edge belongs to the calls that move data then, else to those that wait
    for late ranks, else to those in a bubble; in equal shares.
    """
    arrives = calls.start + waiting
    late = arrives - bubble
    spans = [
        (np.clip(starts, edges[0], edges[-1]), np.clip(ends, edges[0], edges[-1]))
        for starts, ends in ((arrives, calls.end), (calls.start, late), (late, arrives))
    ]
    cuts = distinct(np.concatenate([side for span in spans for side in span]))
    if len(cuts) < 2:
        nothing = np.zeros(len(calls))
        return Exposed(nothing, nothing, nothing)
    left = (np.diff(cuts) - calls.computing(cuts[:-1], cuts[1:])).astype(np.float64)  # what no part has taken yet
    parts = []
    for starts, ends in spans:
        first, last = np.searchsorted(cuts, starts), np.searchsorted(cuts, ends)
        many = np.cumsum(np.bincount(first, minlength=len(cuts)) - np.bincount(last, minlength=len(cuts)))[:-1]
        until = np.append(0.0, np.cumsum(np.where(many > 0, left / np.maximum(many, 1), 0.0)))
        parts.append(until[last] - until[first])
        left[many > 0] = 0.0
    return Exposed(*parts)
