"""What is known of a job after its traces were read: the facts of every rank and what follows from all of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshwright.observe.gathering import Broken
from meshwright.observe.rank.facts import DeviceFacts, RankFacts
from meshwright.observe.traces import Note
from meshwright.plan import Plan


@dataclass(frozen=True, eq=False)
class Analysis:
    """Facts of a job; `meshwright.analyze` makes it."""

    ranks: tuple[RankFacts, ...]  # in order
    broken: tuple[Broken, ...]  # files that gave nothing
    notes: tuple[Note, ...]  # what was left out or assumed, beside the notes of each rank
    plan: Plan | None  # the plan that was run, if it is known

    @cached_property
    def working(self) -> tuple[RankFacts, ...]:
        """The ranks that recorded work."""
        return tuple(facts for facts in self.ranks if facts.devices)

    @property
    def devices(self) -> tuple[DeviceFacts, ...]:
        """The busiest device of each rank that worked."""
        return tuple(facts.devices[0] for facts in self.working)
