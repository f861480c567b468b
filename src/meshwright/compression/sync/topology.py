"""Topologies: generators of transfers, with the codec's work between them.

In all of them a rank encodes every number at most once a step. So one residual, as long as the bucket, holds all that
the rank has not sent yet: at any time the applied sum and all residuals add up to the sum of all gradients. All ranks
decode the same messages in the same order, so that replicas stay equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.compression.sync.layout import Piece, cut
from meshwright.compression.sync.transport.message import Envelope, Stamp
from meshwright.compression.sync.transport.wire import TAGS, Transfer, Wire


@dataclass(frozen=True)
class Run:
    """One piece of a bucket at one step."""

    numbers: Tensor  # float32: the gradient before, the sum over all ranks after
    residual: Tensor | None
    step: int
    bucket: int
    tag: int  # of its first transfer
    seed: int

    def stamp(self, transfer: int) -> Stamp:
        return Stamp(self.step, self.bucket, (self.tag + transfer) % TAGS)

    def part(self, start: int, stop: int, later: int = 0) -> Run:
        """Return some of its numbers, whose transfers are numbered `later` ones on."""
        residual = None if self.residual is None else self.residual[start:stop]
        return Run(self.numbers[start:stop], residual, self.step, self.bucket, self.tag + later, self.seed)


def seed_of(step: int, tag: int, place: int) -> int:
    """Return the seed of a piece's random numbers: different for every step, piece and rank."""
    return (step * 0x9E3779B1 + tag * 0x85EBCA77 + place) & 0x7FFFFFFF


class Topology(Protocol):
    """Topology of a sum, with its buffers."""

    rounds: int  # number of transfers
    mean: bool  # True if it returns the mean

    def run(self, run: Run) -> Iterator[Transfer]:
        """Replace the numbers by the sum over all ranks, or their mean."""
        ...


class Part:
    """Numbers that are encoded together, and their position in the piece.

    On a CUDA device they are encoded and decoded there, and only messages are copied. Both copies are waited for:
    nothing is sent before the device has written it, and no host buffer is filled while it is read.
    """

    def __init__(self, codec: Any, piece: Piece, device: torch.device) -> None:
        self.start, self.stop, self._counts = piece.start, piece.stop, piece.counts
        self._batch = codec.batch(piece.counts, device, torch.float32)
        self.bytes: int = self._batch.bytes
        self._there = torch.zeros(self.bytes, dtype=torch.uint8, device=device) if device.type == "cuda" else None

    def envelope(self) -> Envelope:
        """Return an empty envelope for its message."""
        return Envelope(self.bytes, pinned=self._there is not None)

    def encode(self, run: Run, into: Envelope) -> None:
        mine = run.part(self.start, self.stop)
        message = into.body if self._there is None else self._there
        self._batch.encode(mine.numbers, message, residual=mine.residual, seed=run.seed + self.start)
        if self._there is not None:
            into.body.copy_(self._there)

    def decode(self, envelope: Envelope, run: Run, *, add: bool) -> None:
        numbers = run.numbers[self.start : self.stop]
        message = envelope.body if self._there is None else self._there.copy_(envelope.body)
        self._batch.decode(message, numbers, add=add)
        tell_bad(self._batch, envelope.body, self._counts, numbers)


def tell_bad(batch: Any, message: Tensor, counts: tuple[int, ...], numbers: Tensor) -> None:
    """Set a gradient to NaN on all ranks if it had infinite numbers or NaN on one.

    Uncompressed sums do the same, and loss scalers and guards rely on it. Messages of its sum repeat the flag; other
    gradients are not touched.
    """
    flags = batch.flags(message)
    if flags.any():
        for flag, numbers_of_one in zip(flags.tolist(), numbers.split(counts), strict=True):
            if flag:
                numbers_of_one.fill_(torch.nan)


class Gather:
    """All-gather of messages: each rank sends its message to all, decodes all and sums."""

    rounds, mean = 1, False

    def __init__(self, codec: Any, counts: tuple[int, ...], wire: Wire, device: torch.device) -> None:
        self.wire, self._part = wire, Part(codec, Piece(0, counts), device)
        self._boxes = [self._part.envelope() for _ in wire.members]

    def run(self, run: Run) -> Iterator[Transfer]:
        others, mine = self.wire.others, self._boxes[self.wire.place]
        self._part.encode(run, mine)
        incoming = [(place, self._boxes[place]) for place in others]
        yield self.wire.swap(run.stamp(0), [(place, mine) for place in others], incoming, last=True)
        for place, box in enumerate(self._boxes):
            self._part.decode(box, run, add=place > 0)


class Scatter:
    """Reduce-scatter and all-gather: each rank owns a part, sums the others' messages, and sends the sum to all.

    Its own share of its own part is never encoded, so the residual of that part is free for the error of the sum.
    """

    rounds, mean = 2, False

    def __init__(self, codec: Any, counts: tuple[int, ...], wire: Wire, device: torch.device) -> None:
        self.wire = wire
        self._parts = [Part(codec, piece, device) for piece in cut(Piece(0, counts), wire.size)]
        self._out = [part.envelope() for part in self._parts]  # shares of others' parts; the sum of the own one
        self._shares = [self._parts[wire.place].envelope() for _ in wire.members]
        self._sums = [part.envelope() for part in self._parts]

    def run(self, run: Run) -> Iterator[Transfer]:
        others, me = self.wire.others, self.wire.place
        mine = self._parts[me]
        for place in others:
            self._parts[place].encode(run, self._out[place])
        outgoing = [(place, self._out[place]) for place in others]
        yield self.wire.swap(run.stamp(0), outgoing, [(place, self._shares[place]) for place in others])
        for place in sorted(others):
            mine.decode(self._shares[place], run, add=True)
        mine.encode(run, self._out[me])
        outgoing = [(place, self._out[me]) for place in others]
        yield self.wire.swap(run.stamp(1), outgoing, [(place, self._sums[place]) for place in others], last=True)
        for place, part in enumerate(self._parts):
            part.decode(self._out[me] if place == me else self._sums[place], run, add=False)


class Ring:
    """Ring: sums of parts go around once, with one more share in each hop, and once more when they are complete."""

    mean = False

    def __init__(self, codec: Any, counts: tuple[int, ...], wire: Wire, device: torch.device) -> None:
        self.wire, self.rounds = wire, 2 * (wire.size - 1)
        self._parts = [Part(codec, piece, device) for piece in cut(Piece(0, counts), wire.size)]
        self._out = [part.envelope() for part in self._parts]
        self._in = [part.envelope() for part in self._parts]

    def run(self, run: Run) -> Iterator[Transfer]:
        size, me = self.wire.size, self.wire.place
        after, before = (me + 1) % size, (me - 1) % size
        for hop in range(size - 1):
            leaving, coming = (me - hop) % size, (me - hop - 1) % size
            self._parts[leaving].encode(run, self._out[leaving])
            outgoing, incoming = [(after, self._out[leaving])], [(before, self._in[coming])]
            yield self.wire.swap(run.stamp(hop), outgoing, incoming)
            self._parts[coming].decode(self._in[coming], run, add=True)
        whole = self._out[after]  # the part that is complete here
        self._parts[after].encode(run, whole)
        for hop in range(size - 1):
            coming = (me - hop) % size
            stamp = run.stamp(size - 1 + hop)
            yield self.wire.swap(stamp, [(after, whole)], [(before, self._in[coming])], last=hop == size - 2)
            whole = self._in[coming]  # forwarded unchanged
        for place, part in enumerate(self._parts):
            part.decode(self._out[place] if place == after else self._in[place], run, add=False)


class Tree:
    """Binary tree: sums go up, and the total comes down as one message. Few hops, for few numbers."""

    mean = False

    def __init__(self, codec: Any, counts: tuple[int, ...], wire: Wire, device: torch.device) -> None:
        self.wire, self.rounds = wire, 2
        self._part = Part(codec, Piece(0, counts), device)
        self._children = [place for place in (2 * wire.place + 1, 2 * wire.place + 2) if place < wire.size]
        self._above = (wire.place - 1) // 2
        self._boxes = [self._part.envelope() for _ in self._children]
        self._out, self._whole = self._part.envelope(), self._part.envelope()

    def run(self, run: Run) -> Iterator[Transfer]:
        swap, below = self.wire.swap, list(zip(self._children, self._boxes, strict=True))
        root = self.wire.place == 0
        if below:
            yield swap(run.stamp(0), [], below)
            for _, box in below:
                self._part.decode(box, run, add=True)
        self._part.encode(run, self._whole if root else self._out)
        if not root:
            # Two transfers of one tag: the message sent up here is the one that the parent waits for.
            yield swap(run.stamp(0), [(self._above, self._out)], [])
            yield swap(run.stamp(1), [], [(self._above, self._whole)], last=not below)
        if below:
            yield swap(run.stamp(1), [(place, self._whole) for place in self._children], [], last=True)
        self._part.decode(self._whole, run, add=False)


class TwoLevels:
    """Two levels: each rank sums a part uncompressed within its node, compresses it between nodes, and hands it back."""

    mean = False

    def __init__(
        self, codec: Any, counts: tuple[int, ...], inner: Wire, outer: Wire, make: Any, device: torch.device
    ) -> None:
        self.inner = inner
        self._pieces = cut(Piece(0, counts), inner.size)
        mine = self._pieces[inner.place]
        self._between: Topology = make(codec, mine.counts, outer, device)
        self.rounds = 2 + self._between.rounds
        self._out = [Envelope(4 * piece.numbers) for piece in self._pieces]
        self._shares = [Envelope(4 * mine.numbers) for _ in inner.members]
        self._sums = [Envelope(4 * piece.numbers) for piece in self._pieces]

    def run(self, run: Run) -> Iterator[Transfer]:
        others, me = self.inner.others, self.inner.place
        for place in others:
            self._out[place].numbers().copy_(self._of(run, place).numbers)
        outgoing = [(place, self._out[place]) for place in others]
        yield self.inner.swap(run.stamp(0), outgoing, [(place, self._shares[place]) for place in others])
        mine = self._of(run, me, later=2)
        for place in sorted(others):
            mine.numbers.add_(self._shares[place].numbers().to(mine.numbers.device))
        yield from self._between.run(mine)
        self._out[me].numbers().copy_(mine.numbers)
        outgoing = [(place, self._out[me]) for place in others]
        yield self.inner.swap(run.stamp(1), outgoing, [(place, self._sums[place]) for place in others], last=True)
        for place in others:
            self._of(run, place).numbers.copy_(self._sums[place].numbers())

    def _of(self, run: Run, place: int, later: int = 0) -> Run:
        return run.part(self._pieces[place].start, self._pieces[place].stop, later)
