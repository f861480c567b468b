"""What slow ranks cost: by how much a step would be shorter if they were as fast as their peers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.observe.job.across import Across
from meshwright.observe.job.matching import calls_of_rank
from meshwright.observe.job.ordering import Ints
from meshwright.observe.rank.facts import RankFacts

NOBODY = np.iinfo(np.int64).min


def costs_of(facts: Sequence[RankFacts], job: Across, places: Ints, steps: Ints, most: float) -> int:
    """Nanoseconds of a step that others only waited for these ranks, in the mean of some steps: at most `most`.

    In every collective that one of them was the last to join, the others could have begun when the last of the others
    was there. Ranks of one finding are late side by side, not one after the other: the one that delays most counts.
    """
    aligned, matched = job.aligned, job.aligned.matched
    others = ~np.isin(matched.place, places)
    ready = np.full(len(matched.group), NOBODY)
    np.maximum.at(ready, matched.call[others], aligned.start[others])
    tells = aligned.split & (ready != NOBODY)
    led = tells & np.isin(aligned.late, places)
    ahead = np.where(led, np.maximum(aligned.last - np.where(led, ready, 0), 0), 0)
    gains = []
    for place in places.tolist():
        calls = calls_of_rank(facts[place])
        if calls is None:
            continue
        mine = matched.call[slice(*matched.firsts[place : place + 2].tolist())]
        numbers = np.where(calls.step >= 0, facts[place].devices[0].windows.numbers[calls.step], NOBODY)
        chosen = tells[mine] & np.isin(numbers, job.parts.numbers[steps])
        if chosen.any():
            gains.append(ahead[mine[chosen]].sum() / len(np.unique(numbers[chosen])))
    if not gains:  # no call tells: by computing alone
        compute = job.parts.compute[:, steps].mean(axis=1)
        gains.append(max(compute[places].max() - np.delete(compute, places).max(initial=0.0), 0.0))
    return int(min(most, max(gains)))
