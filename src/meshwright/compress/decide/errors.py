"""What compression would lose of gradients that were really seen, for users who set a limit to that.

A process can tell what its own message would lose, |C(g) - g|, and after exact sums how large the mean is. By the triangle
inequality the mean of what is sent differs from the exact mean by no more than the most that any process loses; where sums
are encoded again on their way (scatter, ring, tree), by what that loses besides. PowerSGD sends no mean of messages: all
project on one space, so that it loses of the mean what one iteration, from numbers by chance, leaves of the mean itself.

With error feedback each message also says what was left of earlier steps, which is wrong for the gradient of this one. If
a part d of what is given is lost each time, at most d / (1 - d) of a gradient has been left; saying that, and leaving as
much again, a sum is off by up to 2 / (1 - d) times what one message loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.compress.codec import codec
from meshwright.compress.decide.facts import Auto, Unit, Way, units
from meshwright.compress.lowrank import LowRank
from meshwright.compress.sync.bucket import Gradients


class Errors:
    """Bounds for every unit and codec, from the gradients of one step in which all sums were exact."""

    def __init__(self, auto: Auto, *, feedback: bool) -> None:
        assert auto.guard is not None
        self.guard, self._feedback = auto.guard, feedback
        self._kinds = list({id(way.choice.codec): way.choice.codec for way in auto.ways if way.choice.codec}.values())
        self._own: dict[Unit, list[float]] = {}  # lost by this process by every codec of one message; then |g|
        self._mean: dict[Unit, list[float]] = {}  # lost of the mean by every other codec; then its norm
        self._bounds: dict[Unit, list[tuple[float, float]]] = {}  # once, and for each encoding of a sum besides

    def look(self, place: int, gradients: Gradients, flat: Tensor) -> None:
        """At a bucket of this process, before it is summed."""
        for unit, numbers in _parts(place, gradients, flat):
            self._own[unit] = self._lost(unit, numbers, several=False)

    def mean(self, place: int, gradients: Gradients, flat: Tensor) -> None:
        """The same bucket after exact sums."""
        for unit, numbers in _parts(place, gradients, flat):
            self._mean[unit] = self._lost(unit, numbers, several=True)

    def _lost(self, unit: Unit, numbers: Tensor, *, several: bool) -> list[float]:
        """By codecs of several messages, or by those of one: |C(x) - x| of each, and |x|."""
        kinds = [kind for kind in self._kinds if (kind.rounds > 1) == several]
        return [*(float((said(kind, unit, numbers) - numbers).norm()) for kind in kinds), float(numbers.norm())]

    def told(self, every: Sequence[Unit]) -> list[float]:
        """For a vote: nothing where something is not known yet."""
        none = [0.0] * (len(self._kinds) + 2)
        return [
            value
            for unit in every
            for value in ((*self._own[unit], *self._mean[unit]) if unit in self._own and unit in self._mean else none)
        ]

    def take(self, every: Sequence[Unit], found: Sequence[float]) -> None:
        """The result of a vote: the most of all processes."""
        width = len(self._kinds) + 2
        alone = sum(kind.rounds == 1 for kind in self._kinds)
        for place, unit in enumerate(every):
            values = found[place * width : (place + 1) * width]
            lost, own, together, mean = values[:alone], values[alone], values[alone + 1 : -1], values[-1]
            if mean > 0:
                singles = iter([(one / mean, one / own if own else 1.0) for one in lost])
                others = iter([(one / mean, one / mean) for one in together])
                self._bounds[unit] = [next(singles if kind.rounds == 1 else others) for kind in self._kinds]

    def bound(self, unit: Unit, way: Way) -> float:
        """The most that the aggregated gradient of a unit may be off, relatively; infinite where it is not known."""
        kind = way.choice.codec
        if kind is None:
            return 0.0
        if unit not in self._bounds:
            return float("inf")
        once, again = self._bounds[unit][next(i for i, one in enumerate(self._kinds) if one is kind)]
        bound = once + (again if kind.rounds == 1 and way.choice.topology != "gather" else 0.0)
        if not self._feedback:
            return bound
        return bound * 2 / (1 - again) if again < 1 else float("inf")

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
        out, low = numbers.float().clone(), LowRank(unit.shapes, kind.options["rank"])
        factors = codec(kind.options["factors"]) if kind.options["factors"] else None
        low.finish(_passed(factors, low.second(_passed(factors, low.first(out)))))
        return out
    out = numbers.float().clone()
    return _passed(kind, out, unit.counts)


def _passed(kind: Any, numbers: Tensor, counts: Sequence[int] = ()) -> Tensor:
    """Numbers after a message."""
    if kind is None or not numbers.numel():
        return numbers
    batch = kind.batch(counts or [numbers.numel()])
    message, out = batch.new_message(), torch.empty(numbers.numel())
    batch.encode(numbers, message)
    batch.decode(message, out)
    return out


def _parts(place: int, gradients: Gradients, flat: Tensor) -> list[tuple[Unit, Tensor]]:
    every = [Unit(place, unit.shapes) for unit in units([gradients.shapes])]
    return list(zip(every, flat.split([unit.numbers for unit in every]), strict=True))
