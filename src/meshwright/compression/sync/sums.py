"""Sums without decoding in between: plain numbers, codes that can be added, and low-rank factors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.compression.sync.topology import Gather, Run, Scatter, tell_bad
from meshwright.compression.sync.transport.message import Envelope
from meshwright.compression.sync.transport.wire import Transfer, Wire
from meshwright.errors import InputError

_SMALL = 1 << 16  # bytes up to which all ranks send all to each other: one round instead of two
_FEW = 4  # ranks up to which all may send encoded factors to each other


class Plain:
    """All-reduce of float32 numbers by the backend, from host memory, with the residual added."""

    rounds, mean = 1, False

    def __init__(self, wire: Wire, count: int, device: torch.device) -> None:
        self.wire = wire
        self._host = torch.empty(count, pin_memory=True) if device.type == "cuda" else None
        self.clean = False  # True if the residual is empty and stays so: sums are exact

    def run(self, run: Run) -> Iterator[Transfer]:
        if run.residual is not None and not self.clean:
            run.numbers.add_(run.residual)
            run.residual.zero_()
        self.clean = True
        if self.wire.size > 1:
            here = run.numbers if self._host is None else self._host.copy_(run.numbers)
            yield self.wire.reduce(run.stamp(0), here)
            if self._host is not None:
                run.numbers.copy_(here)


class Total:
    """Sum or maximum of numbers over all ranks, bit for bit the same everywhere."""

    def __init__(self, wire: Wire, count: int, dtype: torch.dtype, *, largest: bool = False) -> None:
        self.wire, self.count, self.dtype = wire, count, dtype
        self._merge = torch.maximum if largest else torch.add
        width = torch.empty(0, dtype=dtype).element_size()
        self.whole = wire.size <= 2 or count * width <= _SMALL
        self.rounds = 1 if self.whole else 2
        each = count if self.whole else -(-count // wire.size)
        self._edges = [min(i * each, count) for i in range(wire.size + 1)]
        self._boxes = [Envelope(each * width) for _ in range(wire.size)]
        self._out = [Envelope(each * width) for _ in range(1 if self.whole else wire.size)]

    def run(self, run: Run, values: Tensor, first: int = 0, *, last: bool = False) -> Iterator[Transfer]:
        """Reduce in place, with transfers `first` and later."""
        others, me = self.wire.others, self.wire.place
        if self.whole:
            self._out[0].numbers(self.dtype).copy_(values)
            outgoing = [(place, self._out[0]) for place in others]
            yield self.wire.swap(run.stamp(first), outgoing, self._incoming(), last=last)
            self._merged(values, self._out[0].numbers(self.dtype))
            return
        for place in others:
            part = self._part(values, place)
            self._out[place].numbers(self.dtype)[: part.numel()].copy_(part)
        yield self.wire.swap(run.stamp(first), [(place, self._out[place]) for place in others], self._incoming())
        mine = self._part(values, me)
        self._merged(mine, mine.clone())
        self._out[me].numbers(self.dtype)[: mine.numel()].copy_(mine)
        outgoing = [(place, self._out[me]) for place in others]
        yield self.wire.swap(run.stamp(first + 1), outgoing, self._incoming(), last=last)
        for place in others:
            part = self._part(values, place)
            part.copy_(self._boxes[place].numbers(self.dtype)[: part.numel()])

    def _incoming(self) -> list[tuple[int, Envelope]]:
        return [(place, self._boxes[place]) for place in self.wire.others]

    def _part(self, values: Tensor, place: int) -> Tensor:
        return values[self._edges[place] : self._edges[place + 1]]

    def _merged(self, into: Tensor, mine: Tensor) -> None:
        """Merge all ranks' numbers, in the order of ranks."""
        for place in range(self.wire.size):
            theirs = mine if place == self.wire.place else self._boxes[place].numbers(self.dtype)[: into.numel()]
            theirs = theirs.to(into.device)
            if place == 0:
                into.copy_(theirs)
            else:
                self._merge(into, theirs, out=into)


class Summed:
    """Codec whose messages are added without decoding and decoded once, after an agreement on shared values."""

    mean = False

    def __init__(self, codec: Any, counts: tuple[int, ...], wire: Wire, device: torch.device) -> None:
        dtype = sums_as(codec)
        assert dtype is not None
        members = dict(codec.options).get("members", wire.size)
        if members < wire.size:
            problem = f"sums of {members} fit, there are {wire.size} processes"
            raise InputError(problem, field=f"{codec.name}.members", valid=f"{wire.size} or more")
        self.batch = codec.batch(counts, device, torch.float32)
        self._counts = counts
        self._message = torch.zeros(self.batch.bytes, dtype=torch.uint8, device=device)
        self._codes = self._message.view(dtype)
        self._total = Total(wire, self._codes.numel(), dtype)
        agrees = codec.program.agrees is not None
        self._agreed = Total(wire, len(counts), torch.float32, largest=True) if agrees else None
        self.rounds = self._total.rounds + (self._agreed.rounds if self._agreed else 0)

    def run(self, run: Run) -> Iterator[Transfer]:
        if self._agreed:
            self.batch.measure(run.numbers, residual=run.residual)
            yield from self._agreed.run(run, self.batch.agreed)
        options: dict[str, Any] = {"agreed": True} if self._agreed else {}
        self.batch.encode(run.numbers, self._message, residual=run.residual, seed=run.seed, **options)
        yield from self._total.run(run, self._codes, self._agreed.rounds if self._agreed else 0, last=True)
        self.batch.decode(self._message, run.numbers)
        tell_bad(self.batch, self._message, self._counts, run.numbers)


def sums_as(codec: Any) -> torch.dtype | None:
    """Return the integer type in which a codec's messages are added, or None if they must be decoded first.

    Halves could be added as well, but it is better to decode them and add in float32.
    """
    kinds = {"i8": torch.int8, "i16": torch.int16, "i32": torch.int32}
    return kinds.get(codec.program.sums)


class LowRank:
    """Two rounds of all-reduces of thin factors (PowerSGD), which a codec may compress further.

    Factors need no error feedback of their own: the residual is the difference between a rank's gradient and the agreed
    product, whatever caused it. Uncompressed gradients need it: what their codec loses goes to the residual. If the
    topology is "gather" and ranks are few, each rank sends encoded factors to all in one round, else in two with fewer
    bytes.
    """

    rounds = 4  # maximum: each sum takes one or two
    mean = True

    def __init__(self, batch: Any, wire: Wire, codec: Any, device: torch.device, topology: str) -> None:
        self.batch, self.wire = batch, wire
        sizes = (batch.firsts, [count for count in batch.seconds if count])
        most = _FEW if topology == "gather" else 2
        make = Gather if wire.size <= most else Scatter
        self._sums = [
            make(codec, tuple(counts), wire, device) if codec else Total(wire, sum(counts), torch.float32)
            for counts in sizes
        ]
        self._lacks = torch.zeros(sum(batch.firsts), device=device) if codec else None

    def run(self, run: Run) -> Iterator[Transfer]:
        if self._lacks is not None:
            self._lacks.zero_()
        left = self.batch.first(run.numbers, run.residual)
        yield from self._sum(0, left, run)
        right = self.batch.second(left.div_(self.wire.size))
        yield from self._sum(1, right, run)
        self.batch.finish(right.div_(self.wire.size), self._lacks)

    def _sum(self, which: int, factor: Tensor, run: Run) -> Iterator[Transfer]:
        way = self._sums[which]
        if isinstance(way, Total):
            yield from way.run(run, factor, 2 * which, last=which == 1)
        elif factor.numel():
            tag = run.tag + 2 * which
            yield from way.run(Run(factor, None if which else self._lacks, run.step, run.bucket, tag, run.seed))
