"""Reduce-scatter through codecs: each rank owns an equal part of the numbers, and gets the sum of that part alone.

It is the first half of the topology `scatter`: each rank sends each owner its share of the owner's part. The owner adds
the decoded shares to its own, which is never encoded. So at any time the owners' parts and all residuals add up to the
sum of all gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.compression.sync.layout import Choice, Piece, cut, spans
from meshwright.compression.sync.topology import Part, Run, seed_of
from meshwright.compression.sync.transport.message import Envelope
from meshwright.compression.sync.transport.wire import Transfer, Wire


class Owned:
    """Gradients of one module, laid out as `fully_shard` does.

    The shards of all gradients of the first rank come first, then those of the next; `counts` are the numbers of one
    rank's shards.
    """

    def __init__(
        self,
        counts: Sequence[int],
        choices: Sequence[Choice],
        wire: Wire,
        *,
        residual: Tensor | None,
        device: torch.device,
    ) -> None:
        self._wire, self._residual, width = wire, residual, sum(counts)
        self._width = width
        self._pieces = [
            _Columns(choice.codec, piece, width, wire, device)
            for choice, span in spans(counts, choices)
            for piece in cut(span, -(-span.numbers * wire.size // choice.piece))
            if piece.numbers
        ]
        self.rounds = len(self._pieces)
        self._plain = all(choice.codec is None for choice in choices)
        self._said = residual is None  # True if codecs have left no residual

    @property
    def exact(self) -> bool:
        """Return True if a sum of the numbers is all there is to do."""
        return self._plain and self._said and self._wire.size > 1

    def strands(self, given: tuple[Tensor, Tensor], step: int, bucket: int, tag: int) -> list[Iterator[Transfer]]:
        """Return strands that sum whole gradients, and write this rank's part into the second tensor."""
        whole, into = given
        numbers = whole.float()  # the tensor itself, if it is float32 already
        found = []
        for i, piece in enumerate(self._pieces):
            seed = seed_of(step, tag + i, self._wire.place)
            run = Run(numbers, self._residual, step, bucket, tag + i, seed)
            found.append(self._strand(piece, run, into))
        self._said |= self._plain
        return found

    def _strand(self, piece: _Columns, run: Run, into: Tensor) -> Iterator[Transfer]:
        if run.numbers.is_cuda:
            run.numbers.record_stream(torch.cuda.current_stream())  # its memory came from another stream
        yield from piece.run(run)
        first = self._wire.place * self._width + piece.start
        into[piece.start : piece.stop].copy_(run.numbers[first : first + piece.stop - piece.start])


class _Columns:
    """Numbers at equal positions in every rank's part."""

    def __init__(self, codec: Any, piece: Piece, width: int, wire: Wire, device: torch.device) -> None:
        self.start, self.stop, self.wire = piece.start, piece.stop, wire
        pieces = [Piece(place * width + piece.start, piece.counts) for place in range(wire.size)]
        self._parts = [_Exact(one, device) if codec is None else Part(codec, one, device) for one in pieces]
        self._out = [part.envelope() for part in self._parts]
        self._shares = [self._parts[wire.place].envelope() for _ in wire.members]

    def run(self, run: Run) -> Iterator[Transfer]:
        others, mine = self.wire.others, self._parts[self.wire.place]
        for place in others:
            self._parts[place].encode(run, self._out[place])
        outgoing = [(place, self._out[place]) for place in others]
        yield self.wire.swap(run.stamp(0), outgoing, [(place, self._shares[place]) for place in others], last=True)
        for place in sorted(others):
            mine.decode(self._shares[place], run, add=True)


class _Exact:
    """Numbers that are sent uncompressed, with their residual."""

    def __init__(self, piece: Piece, device: torch.device) -> None:
        self._own, self._pinned = slice(piece.start, piece.stop), device.type == "cuda"
        self._bytes = 4 * piece.numbers

    def envelope(self) -> Envelope:
        return Envelope(self._bytes, pinned=self._pinned)

    def encode(self, run: Run, into: Envelope) -> None:
        into.numbers().copy_(run.numbers[self._own])
        if run.residual is not None:
            into.numbers().add_(run.residual[self._own].to("cpu"))
            run.residual[self._own].zero_()

    def decode(self, envelope: Envelope, run: Run, *, add: bool) -> None:
        run.numbers[self._own].add_(envelope.numbers().to(run.numbers.device))
