"""Find ranks that are slower than others with equal work, by how much, and since when."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.job.collectives.ordering import Ints

Floats = NDArray[np.float64]
KEPT = 0.8  # share of deviations that counts: a spike in a fifth of the steps is no noise; below FEW steps, all
SPREAD = 1.78  # standard deviations of a normal distribution per mean of the least four fifths of its deviations
MEDIAN = 1.2533  # standard error of a median, relative to a mean
SURE, SURER, SUREST = 6.0, 8.0, 10.0  # standard deviations that are significant, by how well these are known
FEW = 6  # steps; fewer do not determine deviations well
ALONE = {2: 830.0, 3: 41.0, 4: 17.0, 5: 11.0}
"""By how many ranks tell what is usual, where there is one step: 1.3 times Student's t at 1/2000 (the worst is chosen)."""
FEWEST = {(2, 2): 830.0, (2, 3): 41.0, (3, 1): 830.0, (3, 2): 830.0}
"""Likewise by ranks and steps where one or two differences are all that tells of noise: it must be next to none."""
JUMP = 30.0  # factor by which a change must exceed the variance of a step
SHORTEST = 3  # minimum steps that a change must last


@dataclass(frozen=True, eq=False)
class Slow:
    """Slow ranks: one value per rank."""

    sure: NDArray[np.bool_]
    level: Floats  # excess of its values over those of its peers, from `since` on
    since: Ints  # index of the first slow step; 0 if slow from the start


def excess(values: Floats) -> Floats:
    """Return [ranks, steps]: each rank's excess over the median of its peers; of two, over the other.

    >>> excess(np.array([[1.0], [1.0], [4.0]])).tolist(), excess(np.array([[1.0], [4.0]])).tolist()
    ([[0.0], [0.0], [3.0]], [[-3.0], [3.0]])
    """
    if len(values) == 2:
        return values - values[::-1]
    return values - np.median(values[alike(np.median(values, axis=1))], axis=0)


def alike(usual: Floats) -> NDArray[np.bool_]:
    """Return True for normal ranks: all, or those below a gap that separates at most half as slow.

    >>> alike(np.array([1.0, 1.3, 1.0, 1.3])).tolist(), alike(np.array([1.0, 1.1, 1.2, 1.3])).tolist()
    ([True, False, True, False], [True, True, True, True])
    """
    order = np.sort(usual)
    gaps = np.diff(order)[(len(order) + 1) // 2 - 1 :]
    if len(order) < 4 or gaps.max() <= (order[-1] - order[0]) / 2:
        return np.ones(len(usual), np.bool_)
    below: NDArray[np.bool_] = usual <= order[(len(order) + 1) // 2 - 1 + int(np.argmax(gaps))]
    return below


def slow(over: Floats, least: float) -> Slow:
    """Find ranks whose values exceed those of their peers by at least `least` and by more than noise.

    Noise has two sources: variation from step to step, and differences between normal ranks.

    >>> found = slow(np.array([[0.0, 0.01, -0.01, 0.0, 0.01, 0.0]] * 4 + [[0.0, 0.01, 0.2, 0.21, 0.19, 0.2]]), 0.04)
    >>> found.sure.tolist(), int(found.since[4]), round(float(found.level[4]), 2)
    ([False, False, False, False, True], 2, 0.2)
    """
    ranks, steps = over.shape
    since = _changes(over)
    later = np.arange(steps) >= since[:, None]
    level = np.nanmedian(np.where(later, over, np.nan), axis=1)
    before = np.array(
        [np.median(row[:first]) if first else 0.0 for row, first in zip(over, since.tolist(), strict=True)]
    )
    own = _own(over - np.where(later, level[:, None], before[:, None]))
    noise = MEDIAN * np.maximum(own, np.median(own)) / (steps - since) ** 0.5
    usual = np.median(over, axis=1)
    times = np.where(steps - since < FEW, SUREST if ranks == 2 or steps < SHORTEST else SURER, SURE)
    if steps == 1:
        times[:] = ALONE.get(int(alike(usual).sum()), SUREST)
    times[:] = FEWEST.get((ranks, steps), times)
    sure = level >= np.maximum(least, times * np.maximum(noise, _between(usual)))
    if ranks == 2 and steps == 1:
        sure[:] = False  # the normal value is unknown
    return Slow(sure, level, since)


def _own(deviations: Floats) -> Floats:
    """Return each rank's noise from step to step. Of two, one mirrors the other, and a known rise looks like noise."""
    own = _spread(deviations)
    return np.full(2, own.min()) if len(own) == 2 else own


def _spread(deviations: Floats) -> Floats:
    """Return the standard deviation of [..., many] deviations, regardless of their largest fifth.

    A median of so few would be the lesser of two gaps, and often almost zero by chance.
    """
    many = deviations.shape[-1]
    kept = np.sort(np.abs(deviations))[..., : many if many < FEW else math.ceil(KEPT * many)]
    return SPREAD * np.asarray(kept.mean(axis=-1))


def _between(usual: Floats) -> Floats:
    """Return the spread among the other ranks, for each rank: of three, a slow one would itself count as noise."""
    if len(usual) < 3:
        return np.zeros(len(usual))
    if len(usual) == 3:
        others = np.array([np.delete(usual, rank) for rank in range(3)])
        return _spread(others - np.median(others, axis=1, keepdims=True))
    good = usual[alike(usual)]
    return np.full(len(usual), float(_spread(good - np.median(good))))


def _changes(over: Floats) -> Ints:
    """Return the step from which each rank's values are clearly higher than before; 0 if there is none."""
    ranks, steps = over.shape
    if steps < 2 * SHORTEST:
        return np.zeros(ranks, np.int64)
    calm = _without_spikes(over)
    places = np.arange(1, steps - SHORTEST + 1)
    sums = np.cumsum(calm, axis=1)
    head = sums[:, places - 1] / places
    tail = (sums[:, -1:] - sums[:, places - 1]) / (steps - places)
    explained = places * (steps - places) / steps * (tail - head) ** 2
    best = np.argmax(np.where(tail > head, explained, -1.0), axis=1)
    at = (np.arange(ranks), best)
    levels = np.where(np.arange(steps) < places[best][:, None], head[at][:, None], tail[at][:, None])
    own = _own(over - levels)
    noise = np.maximum(own, np.median(own)) ** 2
    real = (tail[at] > 0) & (head[at] < tail[at] / 2) & (tail[at] > head[at]) & (explained[at] > JUMP * noise)
    return np.where(real, places[best], 0)


def _without_spikes(values: Floats) -> Floats:
    """Return medians of three neighbours, so that one odd step is no change."""
    wide = np.concatenate([values[:, :1], values, values[:, -1:]], axis=1)
    middle: Floats = np.median(np.stack([wide[:, :-2], wide[:, 1:-1], wide[:, 2:]]), axis=0)
    return middle
