"""Exact means by point-to-point messages: each rank owns a part, averages all ranks' copies of it, and sends it to all.

This is a reduce-scatter and an all-gather, directly from and to the memory of gradients. Nothing is copied, and every
part is read once (a ring reads and writes its sums at every hop). There are two rounds for any number of ranks, and the
awaited peer is known.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from meshwright.base.native import BuildError, compiler, loaded
from meshwright.compression.backends.c.batch import address
from meshwright.compression.sync.layout import Piece, cut
from meshwright.compression.sync.topology import Run
from meshwright.compression.sync.transport.wire import Transfer, Wire


class Exact:
    """Exact mean. An existing residual is added to the first sums; after that there is none."""

    rounds, mean = 2, True

    def __init__(self, wire: Wire, count: int, device: torch.device) -> None:
        self.wire = wire
        self._edges = [slice(part.start, part.stop) for part in cut(Piece(0, (count,)), wire.size)]
        mine = self._edges[wire.place]
        self._shares = [(place, torch.empty(mine.stop - mine.start, device=device)) for place in wire.others]
        self.clean = False  # True if the residual is empty and stays so

    def run(self, run: Run) -> Iterator[Transfer]:
        if run.residual is not None and not self.clean:
            run.numbers.add_(run.residual)
            run.residual.zero_()
        self.clean = True
        if self.wire.size == 1:
            return
        parts = [run.numbers[edge] for edge in self._edges]
        own, others = parts[self.wire.place], self.wire.others
        sends = [(place, parts[place]) for place in others if parts[place].numel()]
        shares = [pair for pair in self._shares if own.numel()]
        yield self.wire.exchange(run.stamp(0), sends, shares)
        averaging()(own, [share for _, share in sorted(shares, key=lambda pair: pair[0])])
        told = [(place, own) for place in others if own.numel()]
        yield self.wire.exchange(run.stamp(1), told, sends, last=True)


def _by_torch(into: Tensor, others: Sequence[Tensor]) -> None:
    for other in others:
        into.add_(other)
    into.mul_(1 / (len(others) + 1))


@cache
def averaging() -> Callable[[Tensor, Sequence[Tensor]], None]:
    """Return a function that replaces numbers by the mean of themselves and others, added in order.

    >>> into = torch.ones(3)
    >>> averaging()(into, [torch.tensor([1.0, 2.0, 3.0])])
    >>> into.tolist()
    [1.0, 1.5, 2.0]
    """
    if not compiler():
        return _by_torch
    try:
        library = loaded(files("meshwright.compression.sync").joinpath("sums.c").read_text())
    except BuildError:
        return _by_torch

    def mean(into: Tensor, others: Sequence[Tensor]) -> None:
        places = (ctypes.c_void_p * len(others))(*(other.data_ptr() for other in others))
        library.mean_of(address(into), places, ctypes.c_int64(len(others)), ctypes.c_int64(into.numel()))

    return mean
