"""Many gradients, encoded into one message at once: what every back end has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from meshwright.compression.program import Program
from meshwright.errors import InputError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Batch(ABC):
    """Gradients of given sizes that lie one after the other in one buffer, and the message that they become.

    Bad numbers, which are infinite or none, count as 0 one by one: all others of their gradient are encoded as usual. A bad
    number passes no test (one that is drawn is 0) and keeps its residual, and `flags` tells of its gradient. (A
    codec of one pass has written its message before all of a gradient has been seen: it could not do without the rest.)
    With a residual, the sum of both is judged. A residual that is bad itself, which it would be for ever, is taken as 0 and
    so becomes good: the gradient alone is encoded, and `flags` tells of it this once.
    """

    def __init__(
        self, program: Program, counts: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        if dtype not in DTYPES:
            raise InputError(f"is {dtype}", field="dtype", valid=", ".join(map(str, DTYPES)))
        if any(count < 0 or count >= 2**31 for count in counts):
            raise InputError(
                "a gradient has too many numbers, or less than none", field="counts", valid="0 to 2^31 - 1"
            )
        self.program, self.counts, self.device, self.dtype = program, tuple(counts), device, dtype
        self.starts = tuple(accumulate(self.counts, initial=0))  # in the buffer; the last is where it ends
        sizes = [program.layout(count)[""] for count in self.counts]
        self.places = tuple(accumulate(sizes, initial=0))  # in the message
        self.bytes = self.places[-1]
        self._heads_here = torch.tensor([place // 4 for place in self.places[:-1]], dtype=torch.long)
        self._heads = self._heads_here.to(device)
        # What all processes agree on, one value for every gradient: `measure` writes it, the largest over all processes is
        # to be put into it, then encode(..., agreed=True) and decode read it.
        self.agreed = torch.zeros(len(self.counts), dtype=torch.float32, device=device)

    @abstractmethod
    def measure(self, flat: Tensor, *, residual: Tensor | None = None) -> None:
        """Find what processes must agree on (`agreed`), for an algorithm that wants that."""

    @abstractmethod
    def encode(
        self, flat: Tensor, message: Tensor, *, residual: Tensor | None = None, seed: int = 0, agreed: bool = False
    ) -> None:
        """Write the message. With a residual (float32), what is encoded is the sum of both, and what the message does not
        say of it stays in the residual. Without `agreed`, this process agrees with itself alone."""

    @abstractmethod
    def decode(self, message: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Write what the message says, or add it."""

    def flags(self, message: Tensor) -> Tensor:
        """For every gradient, not zero if it or its residual had a bad number; where the message lies, without waiting."""
        return message.view(torch.int32)[self._heads_here if message.device.type == "cpu" else self._heads]

    def new_message(self) -> Tensor:
        """An empty message of the right length."""
        return torch.zeros(self.bytes, dtype=torch.uint8, device=self.device)

    def check(self, message: Tensor | None, flat: Tensor, residual: Tensor | None = None, *, out: bool = False) -> None:
        """Refuse buffers that do not fit, before anything is written beyond their ends; numbers that come `out` may have
        another type than those that are encoded."""
        if message is not None:
            _check("message", message, self.bytes, (torch.uint8,), self.device)
            if message.data_ptr() % 16:
                raise InputError(
                    "does not begin at a multiple of 16 bytes", field="message", valid="a tensor of its own"
                )
        _check("gradients", flat, self.starts[-1], DTYPES if out else (self.dtype,), self.device)
        if residual is not None:
            _check("residual", residual, self.starts[-1], (torch.float32,), self.device)


def _check(name: str, tensor: Tensor, count: int, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if tensor.dim() != 1 or tensor.numel() != count or tensor.dtype not in dtypes or not tensor.is_contiguous():
        raise InputError(
            f"{tuple(tensor.shape)} of {tensor.dtype}",
            field=name,
            valid=f"{count} of {' or '.join(map(str, dtypes))}, dense",
        )
    if tensor.device.type != device.type:
        raise InputError(f"lies on {tensor.device}", field=name, valid=f"on {device}")
