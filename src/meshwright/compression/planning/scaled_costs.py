"""Costs of gradients of any size: large ones are benchmarked as smaller ones of the same form, and scaled.

Work grows with the numbers, and so do messages; those of PowerSGD grow with the sides of a matrix. A piece of a scaled
gradient stands for several: it is simulated with fewer and longer pieces than in a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt

from meshwright.compression.auto.inputs import Way
from meshwright.compression.auto.microbenchmark import Rehearsal
from meshwright.compression.auto.simulation import Leg, Strand

MOST = 1 << 22  # numbers of a unit: 16 MiB
_MEMBERS = 64  # with more ranks nothing is gathered
_SMALL = 1 << 12  # numbers up to which gradients are not scaled, so that vectors stay vectors

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Scaled:
    """Costs for `decide`; `width` is the bytes of a number in exact sums, `shards`: a reduce-scatter only.

    >>> from meshwright.compression.auto.inputs import usual
    >>> plain = usual()[0]
    >>> [sum(leg.sent for strand in Scaled(Rehearsal(4), width)(plain, ((8192, 4096),)) for leg in strand) >> 20
    ...  for width in (4, 2)]  # 128 MiB of float32, 6/4 of which each process sends
    [192, 96]
    """

    rehearsal: Rehearsal
    width: float = 4.0
    shards: bool = False

    def __call__(self, way: Way, shapes: Shapes) -> list[Strand]:
        fewer = small(shapes, MOST)
        work = _numbers(shapes) / _numbers(fewer)
        sent = sqrt(work) if way.choice.codec is not None and way.choice.codec.rounds > 1 else work
        strands = self.rehearsal.strands(way.choice, fewer)
        if way.exact:
            strands = [_reduced(strand) for strand in strands]
        return [tuple(self._leg(leg, work, sent) for leg in self._way(strand)) for strand in strands]

    def _way(self, strand: Strand) -> Strand:
        """Remove the return of sums from a strand: shards stay with their owners."""
        return (strand[0], Leg(strand[1].work)) if self.shards else strand

    def _leg(self, leg: Leg, work: float, sent: float) -> Leg:
        scale = sent * self.width / (8 if self.shards else 4) if leg.plain else sent
        return replace(leg, work=leg.work * work, sent=round(leg.sent * scale))


def _reduced(strand: Strand) -> Strand:
    """Return exact sums by a backend's all-reduce: one transfer, and the benchmarked work."""
    sent = sum(leg.sent for leg in strand)
    return Leg(0.0, sent, plain=True, last=True), Leg(sum(leg.work for leg in strand))


def rehearsable(ways: Sequence[Way], members: int) -> tuple[Way, ...]:
    """Return strategies without those in which a rank holds messages of all ranks, if these would fill gigabytes.

    >>> from meshwright.compression.auto.inputs import usual
    >>> len(usual()) - len(rehearsable(usual(), 65)), len(usual()) - len(rehearsable(usual(), 64))
    (4, 0)
    """
    return tuple(way for way in ways if members <= _MEMBERS or topology(way) != "gather")


def topology(way: Way) -> str:
    """Return a strategy's topology.

    >>> from meshwright.compression.auto.inputs import usual
    >>> sorted({topology(way) for way in usual()})
    ['all-reduce', 'gather', 'ring', 'scatter', 'two rounds']
    """
    kind = way.choice.codec
    if kind is None:
        return "all-reduce"
    return "two rounds" if kind.rounds > 1 else way.choice.topology


def small(shapes: Shapes, numbers: int) -> Shapes:
    """Return shapes with at most about `numbers` numbers: both sides of matrices shrink alike.

    >>> small(((8192, 4096), (512,)), 1 << 23), small(((64, 64),), 1 << 23)
    (((4096, 2048), (512,)), ((64, 64),))
    """
    fixed = sum(prod(shape) for shape in shapes if prod(shape) <= _SMALL)
    part = max(numbers - fixed, 1) / max(_numbers(shapes) - fixed, 1)
    return shapes if part >= 1 else tuple(_cut(shape, part) for shape in shapes)


def _cut(shape: tuple[int, ...], part: float) -> tuple[int, ...]:
    if prod(shape) <= _SMALL:
        return shape
    sides = (shape[0], prod(shape[1:])) if len(shape) > 1 else shape
    return tuple(max(round(side * part ** (1 / len(sides))), 1) for side in sides)


def _numbers(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes)
