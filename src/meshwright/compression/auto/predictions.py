"""Predictions of decisions, and their outcomes."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.compression.auto.choose import Decision
from meshwright.compression.auto.inputs import Facts

_MOST = 2.0  # maximum slow-down by other programs, relative to the simulation


@dataclass(frozen=True)
class Expectation:
    """Prediction before a step, and its outcome."""

    step: int
    facts: Facts
    decision: Decision
    expected: float  # seconds of a step
    seen: float = 0.0  # the median until the next vote; 0: none yet


@dataclass(frozen=True)
class Drag:
    """Ratio of observed to simulated step times: other programs share the machine.

    Time beyond twice the simulation is waiting for something else, such as data, which no choice changes.

    >>> Drag.of(0.75, 0.5).expected(1.0), Drag.of(2.0, 0.5).expected(1.0)
    (1.5, 3.0)
    """

    times: float = 1.0
    idle: float = 0.0  # seconds

    @classmethod
    def of(cls, seen: float, simulated: float) -> Drag:
        times = min(seen / simulated, _MOST)
        return cls(times, seen - times * simulated)

    def between(self, other: Drag) -> Drag:
        """Return the mean of both: neither the last vote nor earlier ones are forgotten at once."""
        return Drag((self.times + other.times) / 2, (self.idle + other.idle) / 2)

    def expected(self, simulated: float) -> float:
        """Return the expected seconds of a step from the simulated ones."""
        return self.times * simulated + self.idle
