"""What compression would lose of gradients that were really seen, for users who set a limit to that.

A process can tell what its own message would lose, |C(g) - g|, and after exact sums how large the mean is. By the triangle
inequality the mean of what is sent differs from the exact mean by no more than the most that any process loses; where sums
are encoded again on their way (scatter, ring, tree), by what that loses besides. So the bound
holds without sending anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.compress.decide.facts import Auto, Unit, Way, units
from meshwright.compress.lowrank import LowRank
from meshwright.compress.sync.bucket import Gradients

_ROUNDS = 3  # of power iteration: later steps begin where earlier ones ended


class Errors:
    """Bounds for every unit and codec, from the gradients of one step."""

    def __init__(self, auto: Auto) -> None:
        assert auto.guard is not None
        self.guard = auto.guard
        self._kinds = list({id(way.choice.codec): way.choice.codec for way in auto.ways if way.choice.codec}.values())
        self._lost: dict[
            Unit, list[float]
        ] = {}  # by this process, and of how much: |C(g) - g| of every codec, then |g|
        self._means: dict[Unit, float] = {}
        self._bounds: dict[Unit, list[tuple[float, float]]] = {}  # once, and for each encoding of a sum besides

    def look(self, place: int, gradients: Gradients, flat: Tensor) -> None:
        """At a bucket of this process, before it is summed."""
        for unit, numbers in _parts(place, gradients, flat):
            lost = [float((said(kind, unit, numbers) - numbers).norm()) for kind in self._kinds]
            self._lost[unit] = [*lost, float(numbers.norm())]

    def mean(self, place: int, gradients: Gradients, flat: Tensor) -> None:
        """The same bucket after exact sums."""
        for unit, numbers in _parts(place, gradients, flat):
            self._means[unit] = float(numbers.norm())

    def told(self, every: Sequence[Unit]) -> list[float]:
        """For a vote: nothing where something is not known yet."""
        none = [0.0] * (len(self._kinds) + 2)
        return [
            value
            for unit in every
            for value in (
                (*self._lost[unit], self._means[unit]) if unit in self._lost and unit in self._means else none
            )
        ]

    def take(self, every: Sequence[Unit], found: Sequence[float]) -> None:
        """The result of a vote: the most of all processes."""
        width = len(self._kinds) + 2
        for place, unit in enumerate(every):
            *lost, own, mean = found[place * width : (place + 1) * width]
            if mean > 0:
                self._bounds[unit] = [(one / mean, one / own if own else 1.0) for one in lost]

    def bound(self, unit: Unit, way: Way) -> float:
        """The most that the aggregated gradient of a unit may be off, relatively; infinite where it is not known."""
        kind = way.choice.codec
        if kind is None:
            return 0.0
        if unit not in self._bounds:
            return float("inf")
        once, again = self._bounds[unit][next(i for i, one in enumerate(self._kinds) if one is kind)]
        return once + (again if kind.rounds == 1 and way.choice.topology != "gather" else 0.0)

    def allowed(self, every: Sequence[Unit], ways: Sequence[Way]) -> dict[Unit, list[Way]]:
        """Ways that keep to the guard; exact ones always do."""
        return {unit: [way for way in ways if self.bound(unit, way) <= self.guard] for unit in every}


def said(kind: Any, unit: Unit, numbers: Tensor) -> Tensor:
    """What a codec leaves of some gradients.

    >>> from meshwright.compress import codec
    >>> said(codec("fp16"), Unit(0, ((2,),)), torch.tensor([1.0, 2049.0])).tolist()
    [1.0, 2048.0]
    """
    if kind.rounds > 1:
        low = LowRank(unit.shapes, kind.options["rank"])
        for _ in range(_ROUNDS):
            out = numbers.float().clone()
            low.finish(low.second(low.first(out)))
        return out
    batch = kind.batch(unit.counts)
    message, out = batch.new_message(), torch.empty(numbers.numel())
    batch.encode(numbers.float(), message)
    batch.decode(message, out)
    return out


def _parts(place: int, gradients: Gradients, flat: Tensor) -> list[tuple[Unit, Tensor]]:
    every = [Unit(place, unit.shapes) for unit in units([gradients.shapes])]
    return list(zip(every, flat.split([unit.numbers for unit in every]), strict=True))
