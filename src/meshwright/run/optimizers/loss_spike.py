"""Guard against harmful steps: if the loss is far above its recent level, the update is skipped."""

from __future__ import annotations

import math
from dataclasses import dataclass

_FAR = 6.0  # deviations above the mean
_MOST = 3.0  # maximum deviations by which one loss moves the mean, so that an accepted outlier hides no later one
_MEMORY = 0.98  # decay of the running mean and deviation: about the last 50 steps
_FIRST = 20  # good steps before any loss is judged
_IN_A_ROW = 5  # consecutive spikes after which the level counts as changed


@dataclass
class LossSpikeGuard:
    """Running mean of the loss, and of its distance from the mean.

    >>> guard = LossSpikeGuard()
    >>> [guard.judge(loss) for loss in [2.0, 2.1] * 10 + [9.0, 2.0, math.nan]][-3:]
    [False, True, False]
    """

    mean: float = 0.0
    deviation: float = 0.0
    good: int = 0  # accepted losses
    spikes: int = 0  # consecutive spikes

    def judge(self, loss: float) -> bool:
        """Return True if a step with this loss is to be taken; every rank decides the same."""
        if not math.isfinite(loss):
            return False
        if self.good >= _FIRST and loss > self.mean + _FAR * self.deviation:
            self.spikes += 1
            if self.spikes <= _IN_A_ROW:
                return False
            self.good = 0  # a new level: learn it again
        self.spikes = 0
        weight = max(1 / (self.good + 1), 1 - _MEMORY)  # plain means at first
        away = loss - self.mean if self.good else 0.0
        if self.good >= _FIRST:
            away = max(-_MOST * self.deviation, min(away, _MOST * self.deviation))
        self.mean = self.mean + weight * away if self.good else loss
        # The mean distance of normal values is 0.8 deviations; 1 % of the mean never counts as a spike.
        distance = max(1.25 * abs(away), 0.01 * abs(self.mean))
        self.deviation += weight * (distance - self.deviation)
        self.good += 1
        return True
