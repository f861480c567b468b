"""Buffers of a bucket of gradients, and its path through momentum, error feedback, topology and mean."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.compression.codec import codec
from meshwright.compression.sync.layout import Choice, Piece, pieces, spans
from meshwright.compression.sync.sums import LowRank, Plain, Summed, sums_as
from meshwright.compression.sync.topology import Gather, Ring, Run, Scatter, Topology, Tree, TwoLevels, seed_of
from meshwright.compression.sync.transport.join import Wires
from meshwright.compression.sync.transport.wire import Transfer
from meshwright.compression.sync.uncompressed import Exact

_MADE: dict[str, Any] = {"gather": Gather, "scatter": Scatter, "ring": Ring, "tree": Tree}


@dataclass(frozen=True)
class Gradients:
    """Gradients of a bucket, one after the other."""

    keys: tuple[Hashable, ...]  # of the parameters, by which residuals are found again
    shapes: tuple[tuple[int, ...], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(torch.Size(shape).numel() for shape in self.shapes)


def as_it_lies(weight: Tensor) -> tuple[int, ...]:
    """Return a parameter's shape in the order of its memory, which is that of its gradient in a bucket.

    >>> as_it_lies(torch.empty(3, 5).t()), as_it_lies(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last))
    ((3, 5), (2, 4, 5, 3))
    """
    strides = weight.stride()
    return tuple(weight.shape[i] for i in sorted(range(weight.dim()), key=lambda i: -strides[i]))


@dataclass
class Memory:
    """Numbers kept for every parameter between steps, however buckets are cut.

    >>> memory = Memory()
    >>> memory.flat(("a", "b"), (2, 1)).add_(torch.tensor([1.0, 2.0, 3.0])).tolist()
    [1.0, 2.0, 3.0]
    >>> memory.flat(("b", "c"), (1, 1)).tolist(), memory.flat(("a",), (2,)).tolist()
    ([3.0, 0.0], [1.0, 2.0])
    """

    kept: dict[Hashable, Tensor] = field(default_factory=dict)

    def flat(self, keys: Sequence[Hashable], counts: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Return one buffer for these parameters, with their kept numbers."""
        made = torch.zeros(sum(counts), dtype=torch.float32, device=device)
        for key, view in zip(keys, made.split(list(counts)), strict=True):
            if (old := self.kept.get(key)) is not None and old.numel() == view.numel():
                view.copy_(old)
            self.kept[key] = view
        return made


class Bucket:
    """Everything that is made once for a bucket of this layout under these choices."""

    def __init__(
        self,
        gradients: Gradients,
        choices: Sequence[Choice],
        wires: Wires,
        *,
        residual: Tensor | None,
        momentum: tuple[float, Tensor] | None,
        warm: Memory,
        device: torch.device,
        mean: bool = True,
    ) -> None:
        self._wires, self._residual, self._momentum = wires, residual, momentum
        self._keys, self._shapes = gradients.keys, gradients.shapes
        self._warm, self._device, self._factor = warm, device, 1 / wires.all.size if mean else 1.0
        self._mean = mean
        self._scratch: Tensor | None = None  # float32, for buckets of other types
        counts = gradients.counts
        self._pieces = [made for choice, span in spans(counts, choices) for made in self._made(choice, span)]
        self.rounds = sum(topology.rounds for _, topology in self._pieces)

    @property
    def exact(self) -> bool:
        """Return True if a mean of the numbers is all there is to do."""
        clean = all(isinstance(topology, Exact) and topology.clean for _, topology in self._pieces)
        return clean and not self._momentum and self._scratch is None and self._mean and self._wires.all.size > 1

    def strands(self, flat: Tensor, step: int, bucket: int, tag: int) -> list[Iterator[Transfer]]:
        """Return the strands of all pieces at one step; `flat` holds the mean (or sum) of all ranks at the end."""
        if flat.dtype != torch.float32 and self._scratch is None:
            self._scratch = torch.empty(flat.numel(), dtype=torch.float32, device=self._device)
        found = []
        for piece, topology in self._pieces:
            found.append(self._strand(piece, topology, flat, step, bucket, tag))
            tag += topology.rounds
        return found

    def _strand(
        self, piece: Piece, topology: Topology, flat: Tensor, step: int, bucket: int, tag: int
    ) -> Iterator[Transfer]:
        own = slice(piece.start, piece.stop)
        numbers = flat[own] if self._scratch is None else self._scratch[own].copy_(flat[own])
        residual = None if self._residual is None else self._residual[own]
        if self._momentum:
            gathered, good = self._momentum[1][own], numbers.isfinite()
            # A bad number is sent like any other, and its momentum stays as it was, or it would be bad forever.
            gathered.copy_(torch.where(good, gathered * self._momentum[0] + numbers, gathered))
            numbers.copy_(torch.where(good, gathered, numbers))
        seed = seed_of(step, tag, self._wires.all.place)
        yield from topology.run(Run(numbers, residual, step, bucket, tag, seed))
        if self._momentum and residual is not None and isinstance(topology, (Gather, Scatter, Ring, Tree)):
            # Numbers sent in full lose their momentum (DGC's masking); all others keep it.
            gathered.mul_(residual != 0)
        factor = self._factor * (self._wires.all.size if topology.mean else 1)
        if factor != 1:
            numbers.mul_(factor)
        if self._scratch is not None:
            flat[own].copy_(numbers)

    def _made(self, choice: Choice, span: Piece) -> list[tuple[Piece, Topology]]:
        make = self._low_rank if choice.codec is not None and choice.codec.rounds > 1 else self._topology
        return [(piece, make(choice, piece)) for piece in pieces(choice, span)]

    def _topology(self, choice: Choice, piece: Piece) -> Topology:
        codec, wires = choice.codec, self._wires
        if codec is None:
            plain: Any = Exact if self._device.type == "cpu" else Plain
            summing: Topology = plain(wires.all, piece.numbers, self._device)
            return summing
        make = Summed if sums_as(codec) else _MADE[choice.topology]
        if wires.inner.size > 1:
            return TwoLevels(codec, piece.counts, wires.inner, wires.outer, make, self._device)
        made: Topology = make(codec, piece.counts, wires.all, self._device)
        return made

    def _low_rank(self, choice: Choice, piece: Piece) -> Topology:
        from meshwright.compression.powersgd.low_rank import LowRank as Factors

        starts = [sum(torch.Size(shape).numel() for shape in self._shapes[:i]) for i in range(len(self._shapes))]
        mine = [i for i, at in enumerate(starts) if piece.start <= at < piece.stop]
        options, wire = choice.codec.options, self._wires.all
        factors = Factors([self._shapes[i] for i in mine], options["rank"], self._device)
        factors.keep_in(self._warm.flat((self._keys[mine[0]],), (sum(factors.seconds),), self._device))
        shrunk = codec(options["factors"]) if options["factors"] else None
        return LowRank(factors, wire, shrunk, self._device, choice.topology)
