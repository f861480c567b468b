"""What was expected of a decision, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.compression.auto.choose import Decision
from meshwright.compression.auto.inputs import Facts

_MOST = 2.0  # times as long as simulated that others on the machine make a step


@dataclass(frozen=True)
class Expectation:
    """What was decided before a step, and what came of it."""

    step: int
    facts: Facts
    decision: Decision
    expected: float  # seconds of a step
    seen: float = 0.0  # the median until the next vote; 0: none yet


@dataclass(frozen=True)
class Drag:
    """What steps take against simulations: longer by a factor, since others use the machine, too; what is more than twice as
    long is waiting for something else, such as data, and no choice changes it.

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
        """Halfway: neither the last vote nor those before it are forgotten at once."""
        return Drag((self.times + other.times) / 2, (self.idle + other.idle) / 2)

    def expected(self, simulated: float) -> float:
        """Seconds of a step that would take so many alone."""
        return self.times * simulated + self.idle
