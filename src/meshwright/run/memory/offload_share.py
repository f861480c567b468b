"""A fraction of many things of different sizes, spread evenly over them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Evenly:
    """Takes things one after the other, so that what is taken stays as close to the fraction as sizes allow.

    >>> half = Evenly(0.5)
    >>> [half.takes(8) for _ in range(4)]
    [True, False, True, False]
    """

    fraction: float
    seen: int = 0
    moved: int = 0

    def takes(self, size: int, *, must: bool = False) -> bool:
        """Whether the next one is taken."""
        self.seen += size
        goes = must or (self.fraction > 0 and self.moved + size / 2 <= self.fraction * self.seen)
        self.moved += size if goes else 0
        return goes
