"""The three passes of PowerSGD over one matrix: in C, where each reads a matrix once, or by PyTorch on other devices."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.base.native import BuildError, compiler, loaded
from meshwright.compression.backends.c.batch import address


class Passes(Protocol):
    """Passes over a matrix `e`, with its thin factors `p` and `q` as [rank, rows] and [rank, columns]."""

    def first(self, e: Tensor, residual: Tensor | None, q: Tensor, p: Tensor) -> None:
        """Add the residual to e, and compute p = q e', with a NaN if e has infinite numbers or NaN."""
        ...

    def second(self, e: Tensor, p: Tensor, q: Tensor) -> None:
        """Compute q = p e."""
        ...

    def finish(self, e: Tensor, residual: Tensor | None, p: Tensor, q: Tensor) -> None:
        """Compute e = p' q; the residual is what the old e had beyond it."""
        ...


class TorchPasses:
    """Passes by PyTorch.

    >>> e, p = torch.ones(2, 3), torch.empty(1, 2)
    >>> TorchPasses().first(e, torch.ones(2, 3), torch.ones(1, 3), p)
    >>> p
    tensor([[6., 6.]])
    """

    def first(self, e: Tensor, residual: Tensor | None, q: Tensor, p: Tensor) -> None:
        if residual is not None:
            e += residual
        torch.mm(q, e.t(), out=p)
        p[0, 0] = torch.where(e.isfinite().all(), p[0, 0], torch.nan)  # without waiting for the device

    def second(self, e: Tensor, p: Tensor, q: Tensor) -> None:
        torch.mm(p, e, out=q)

    def finish(self, e: Tensor, residual: Tensor | None, p: Tensor, q: Tensor) -> None:
        mean = p.t() @ q
        if residual is not None:
            torch.sub(e, mean, out=residual)
        e.copy_(mean)


class NativePasses:
    """Passes in C, built by the machine's compiler."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def first(self, e: Tensor, residual: Tensor | None, q: Tensor, p: Tensor) -> None:
        sizes = map(ctypes.c_int64, (*e.shape, len(p)))
        if not self._library.first(address(e), address(residual), address(q), address(p), *sizes):
            p[0, 0] = torch.nan

    def second(self, e: Tensor, p: Tensor, q: Tensor) -> None:
        self._library.second(address(e), address(p), address(q), *map(ctypes.c_int64, (*e.shape, len(p))))

    def finish(self, e: Tensor, residual: Tensor | None, p: Tensor, q: Tensor) -> None:
        sizes = map(ctypes.c_int64, (*e.shape, len(p)))
        self._library.finish(address(e), address(residual), address(p), address(q), *sizes)


@cache
def passes(device: str) -> Passes:
    """Return the fastest passes on a device."""
    if device != "cpu" or not compiler():
        return TorchPasses()
    try:
        return NativePasses(loaded(files("meshwright.compression.powersgd").joinpath("lowrank.c").read_text()))
    except BuildError:
        return TorchPasses()
