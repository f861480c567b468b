"""Bounds on the error of compression for gradients seen in training, for users who limit it.

A rank can measure the error of its own message, |C(g) - g|, and after exact sums the norm of the mean. By the triangle
inequality the mean of messages differs from the exact mean by at most the largest error of any rank. If sums are
encoded again on their way (scatter, ring, tree), that error is added.

With error feedback each message also contains the residual of earlier steps, which is wrong for this step's gradient.
If a share d is lost each time, the residual is at most d / (1 - d) of a gradient. With that added and as much lost
again, a sum is off by up to 2 / (1 - d) times the error of one message.

PowerSGD sends no mean of messages: all ranks project on one space, so the mean itself is examined. The residual of a
step lies outside its space, and fills that of the next. So some steps are simulated with the same mean, whose rows and
columns are shuffled, to be as different as gradients of other data may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.compression.auto.inputs import Auto, Unit, Way, units
from meshwright.compression.codec import codec
from meshwright.compression.powersgd.low_rank import LowRank
from meshwright.compression.sync.bucket import Gradients

_STEPS = 8  # simulated steps of PowerSGD
_MARGIN = 1.2  # safety factor over the simulated errors


class Errors:
    """Error bounds for every unit and codec, from the gradients of one step in which all sums were exact.

    A unit's bound is that of its gradient with the largest error.
    """

    def __init__(self, auto: Auto, *, feedback: bool) -> None:
        assert auto.guard is not None
        self.guard, self._feedback = auto.guard, feedback
        every = list({id(way.choice.codec): way.choice.codec for way in auto.ways if way.choice.codec}.values())
        self._single = [kind for kind in every if kind.rounds == 1]
        self._several = [kind for kind in every if kind.rounds > 1]
        # for each gradient of this rank: |g|, and the error of every codec
        self._own: dict[Unit, list[list[float]]] = {}
        self._mean: dict[Unit, list[list[float]]] = {}  # for each mean: its norm, and the error of every other codec
        # once, and once more for each encoding of a sum
        self._bounds: dict[Unit, dict[int, list[tuple[float, float]]]] = {}

    def look(self, place: int, gradients: Gradients, flat: Tensor) -> None:
        """Examine a bucket of this rank, before it is summed."""
        for unit, numbers in _parts(place, gradients, flat):
            lost = [norms(unit, said(kind, unit.counts, numbers) - numbers) for kind in self._single]
            self._own[unit] = [list(each) for each in zip(norms(unit, numbers), *lost, strict=True)]

    def mean(self, place: int, gradients: Gradients, flat: Tensor) -> None:
        """Examine the same bucket after exact sums."""
        steps = _STEPS if self._feedback else 1
        for unit, numbers in _parts(place, gradients, flat):
            lost = [projected(kind, unit, numbers, steps) for kind in self._several]
            self._mean[unit] = [list(each) for each in zip(norms(unit, numbers), *lost, strict=True)]

    def told(self, every: Sequence[Unit]) -> list[float]:
        """Return the numbers for a vote; empty if something is still unknown."""
        none = [0.0] * (len(self._single) + len(self._several) + 2)
        found: list[float] = []
        for unit in every:
            if unit in self._own and unit in self._mean:
                found += [
                    value
                    for pair in zip(self._own[unit], self._mean[unit], strict=True)
                    for one in pair
                    for value in one
                ]
            else:
                found += none * len(unit.shapes)
        return found

    def take(self, every: Sequence[Unit], found: Sequence[float]) -> None:
        """Set the result of a vote: the maximum over ranks."""
        values = iter(found)
        for unit in every:
            bounds: dict[int, list[tuple[float, float]]] = {id(kind): [] for kind in (*self._single, *self._several)}
            known = False
            for _ in unit.shapes:
                own, *single = [next(values) for _ in range(1 + len(self._single))]
                mean, *several = [next(values) for _ in range(1 + len(self._several))]
                known |= own > 0
                for kind, lost in zip((*self._single, *self._several), (*single, *several), strict=True):
                    once = lost / mean if mean else float("inf") if lost else 0.0
                    bounds[id(kind)].append((once, lost / own if own else 0.0))
            if known:
                self._bounds[unit] = bounds

    def bound(self, unit: Unit, way: Way) -> float:
        """Return the maximum relative error of an aggregated gradient in a unit; infinite if unknown."""
        kind = way.choice.codec
        if kind is None:
            return 0.0
        if unit not in self._bounds:
            return float("inf")
        return max(self._one(way, *both) for both in self._bounds[unit][id(kind)])

    def _one(self, way: Way, once: float, again: float) -> float:
        if way.choice.codec.rounds > 1:
            return once * _MARGIN
        bound = once + (again if way.choice.topology != "gather" else 0.0)
        if not self._feedback:
            return bound
        return bound * 2 / (1 - again) if again < 1 else float("inf")

    def allowed(self, every: Sequence[Unit], ways: Sequence[Way]) -> dict[Unit, list[Way]]:
        """Return the strategies of each unit that meet the guard; exact ones always do."""
        return {unit: [way for way in ways if self.bound(unit, way) <= self.guard] for unit in every}


def norms(unit: Unit, numbers: Tensor) -> list[float]:
    """Return the norm of each gradient of a unit."""
    return [float(part.norm()) for part in numbers.float().split(list(unit.counts))]


def said(kind: Any, counts: Sequence[int], numbers: Tensor) -> Tensor:
    """Return gradients as a codec decodes them from its message.

    >>> said(codec("fp16"), (2,), torch.tensor([1.0, 2049.0])).tolist()
    [1.0, 2048.0]
    """
    batch = kind.batch(counts)
    message, out = batch.new_message(), torch.empty(numbers.numel())
    batch.encode(numbers.float().contiguous(), message)
    batch.decode(message, out)
    return out


def projected(kind: Any, unit: Unit, mean: Tensor, steps: int) -> list[float]:
    """Return each gradient's maximum error under PowerSGD in some steps with error feedback, the first without."""
    low = LowRank(unit.shapes, kind.options["rank"])
    factors = codec(kind.options["factors"]) if kind.options["factors"] else None

    def passed(numbers: Tensor, counts: Sequence[int]) -> Tensor:
        return said(factors, [count for count in counts if count], numbers) if factors and numbers.numel() else numbers

    residual, worst = torch.zeros(mean.numel()), [0.0] * len(unit.shapes)
    for step in range(steps):
        given = shuffled(unit, mean.float(), step)
        out = given.clone()
        first = low.first(out, residual)
        sent = passed(first, low.firsts)
        lacks = first - sent if factors else None
        low.finish(passed(low.second(sent), low.seconds), lacks)
        worst = [max(pair) for pair in zip(worst, norms(unit, out - given), strict=True)]
    return worst


def shuffled(unit: Unit, numbers: Tensor, seed: int) -> Tensor:
    """Shuffle the rows and columns of each gradient; seed 0 leaves them unchanged."""
    chance = torch.Generator().manual_seed(seed)
    found = []
    for shape, part in zip(unit.shapes, numbers.split(list(unit.counts)), strict=True):
        rows = part.view(shape[0], -1) if len(shape) > 1 else part.view(1, -1)
        if seed:
            rows = rows[torch.randperm(rows.shape[0], generator=chance)]
            rows = rows[:, torch.randperm(rows.shape[1], generator=chance)]
        found.append(rows.flatten())
    return torch.cat(found)


def _parts(place: int, gradients: Gradients, flat: Tensor) -> list[tuple[Unit, Tensor]]:
    every = [Unit(place, unit.shapes) for unit in units([gradients.shapes])]
    return list(zip(every, flat.split([unit.numbers for unit in every]), strict=True))
