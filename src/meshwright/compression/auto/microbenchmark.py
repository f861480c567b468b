"""Microbenchmark of strategies on this device: every topology runs on a fake wire, and its work is timed.

So nothing about topologies and codecs is defined twice: legs, bytes and work are those of the real code.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwright.compression.auto.inputs import SMALL
from meshwright.compression.auto.simulation import Leg, Strand
from meshwright.compression.sync.bucket import Bucket, Gradients, Memory
from meshwright.compression.sync.layout import Choice, Piece, pieces
from meshwright.compression.sync.reduce_scatter import Owned
from meshwright.compression.sync.transport.join import Wires
from meshwright.compression.sync.transport.message import Stamp

SIZES = (1 << 12, 1 << 20)  # numbers: start-up costs, and more than a core's cache


@dataclass(frozen=True)
class _Posted:
    sent: int
    last: bool
    copies: tuple[tuple[Any, Any], ...] = ()

    def arrive(self) -> None:
        for box, envelope in self.copies:
            box.whole.copy_(envelope.whole)


@dataclass(frozen=True)
class Mirror:
    """Fake wire on which every rank sends what this rank sends."""

    size: int
    place: int = 0

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    @property
    def others(self) -> list[int]:
        return [(self.place + i) % self.size for i in range(1, self.size)]

    def swap(self, stamp: Stamp, sends: Any, receives: Any, *, last: bool = False) -> _Posted:
        for envelope in {id(envelope): envelope for _, envelope in sends}.values():
            envelope.seal(stamp)
        alike = {envelope.whole.numel(): envelope for _, envelope in sends}
        copies = [(box, alike[box.whole.numel()]) for _, box in receives if box.whole.numel() in alike]
        return _Posted(sum(envelope.whole.numel() for _, envelope in sends), last, tuple(copies))

    def exchange(self, stamp: Stamp, sends: Any, receives: Any, *, last: bool = False) -> _Posted:
        return _Posted(sum(numbers.numel() * numbers.element_size() for _, numbers in sends), last)


@dataclass
class Rehearsal:
    """Legs of strategies, timed at two sizes (PowerSGD at every shape), and interpolated linearly in between.

    >>> from meshwright.compression import codec
    >>> strands = Rehearsal(4).strands(Choice(codec("fp16"), "scatter", 1 << 16), [(300, 300)])
    >>> len(strands), [leg.sent > 0 for leg in strands[0]]
    (2, [True, True, False])
    """

    members: int
    feedback: bool = True
    owned: bool = False  # sums stay with the ranks that own their parts
    times: int = 2  # runs, of which the fastest counts: the first may compile
    _known: dict[Any, Strand] = field(default_factory=dict)

    def strands(self, choice: Choice, shapes: Sequence[tuple[int, ...]]) -> list[Strand]:
        """Return the strands of adjacent gradients of these shapes."""
        counts = [torch.Size(shape).numel() for shape in shapes]
        if choice.codec is not None and choice.codec.rounds > 1:
            large = [shape for shape, count in zip(shapes, counts, strict=True) if count >= SMALL] or list(shapes)
            return [_summed([self._timed(choice, shape) for shape in large])]
        parts = len(pieces(choice, Piece(0, tuple(counts))))
        return [self._between(choice, sum(counts) // parts)] * parts

    def _between(self, choice: Choice, numbers: int) -> Strand:
        """Interpolate between two benchmarks, with the smaller one as the minimum."""
        low, high = (self._timed(choice, (size,)) for size in SIZES)
        part = (numbers - SIZES[0]) / (SIZES[1] - SIZES[0])
        return tuple(
            replace(
                one, work=max(one.work + part * (other.work - one.work), min(one.work, other.work) / 4),
                sent=max(int(one.sent + part * (other.sent - one.sent)), 0),
            )
            for one, other in zip(low, high, strict=True)
        )  # fmt: skip

    def _timed(self, choice: Choice, shape: tuple[int, ...]) -> Strand:
        key = (choice.codec, choice.topology, shape)
        if key not in self._known:
            whole = replace(choice, piece=max(choice.piece, torch.Size(shape).numel()))
            run = rehearsed_owned if self.owned else rehearsed
            runs = run(whole, [shape], self.members, self.times, feedback=self.feedback)
            self._known[key] = _quickest([strands[0] for strands in runs])
        return self._known[key]


def rehearsed(
    choice: Choice, shapes: Sequence[tuple[int, ...]], members: int, times: int, *, feedback: bool
) -> list[list[Strand]]:
    """Run the strands of adjacent gradients some times."""
    wire: Any = Mirror(members)
    alone: Any = Mirror(1)
    gradients = Gradients(tuple(range(len(shapes))), tuple(shapes))
    numbers = torch.randn(sum(gradients.counts), generator=torch.Generator().manual_seed(0))
    residual = torch.zeros_like(numbers) if feedback else None
    memory: dict[str, Any] = {"residual": residual, "momentum": None, "warm": Memory()}
    made = Bucket(gradients, [choice] * len(shapes), Wires(wire, alone, wire), **memory, device=torch.device("cpu"))
    with torch.no_grad():
        return [[_legs(one) for one in made.strands(numbers.clone(), step, 0, 0)] for step in range(times)]


def rehearsed_owned(
    choice: Choice, shapes: Sequence[tuple[int, ...]], members: int, times: int, *, feedback: bool
) -> list[list[Strand]]:
    """Run the strands with a reduce-scatter: each rank owns a part of every gradient."""
    wire: Any = Mirror(members)
    counts = [-(-torch.Size(shape).numel() // members) for shape in shapes]
    numbers = torch.randn(members * sum(counts), generator=torch.Generator().manual_seed(0))
    residual = torch.zeros_like(numbers) if feedback else None
    made = Owned(counts, [choice] * len(counts), wire, residual=residual, device=torch.device("cpu"))
    with torch.no_grad():
        into = torch.empty(sum(counts))
        return [[_legs(one) for one in made.strands((numbers.clone(), into), step, 0, 0)] for step in range(times)]


def _legs(strand: Any) -> Strand:
    found: list[Leg] = []
    while True:
        begin = time.thread_time()
        posted = next(strand, None)
        work = time.thread_time() - begin
        if posted is None:
            return (*found, Leg(work))
        posted.arrive()
        found.append(Leg(work, posted.sent, last=posted.last))


def _quickest(same: Sequence[Strand]) -> Strand:
    return tuple(min(legs, key=lambda leg: leg.work) for legs in zip(*same, strict=True))


def _summed(several: Sequence[Strand]) -> Strand:
    """Merge strands of gradients that are sent in the same messages; vectors have no part in the second one."""
    longest = max(several, key=len)
    found = []
    for place, leg in enumerate(longest):
        legs = [strand[place] for strand in several if place < len(strand)]
        found.append(replace(leg, work=sum(one.work for one in legs), sent=sum(one.sent for one in legs)))
    return tuple(found)
