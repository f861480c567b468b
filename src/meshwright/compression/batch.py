"""Batches: many gradients, encoded into one message at once; the common part of all backends."""

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
    """Gradients of given sizes, adjacent in one buffer, and the message that they become.

    - Bad numbers (infinite or NaN) count as 0 one by one: all others of their gradient are encoded as usual.
    - A bad number passes no test (a randomly drawn one is sent as 0) and keeps its residual; `flags` marks its
      gradient. (A codec of one pass has written its message before it has seen a whole gradient.)
    - With a residual, the sum of both is checked. A bad residual would stay bad forever, so it counts as 0 and becomes
      good: the gradient alone is encoded, and `flags` marks it this once.
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
        self.starts = tuple(accumulate(self.counts, initial=0))  # offsets in the buffer; the last is its end
        sizes = [program.layout(count)[""] for count in self.counts]
        self.places = tuple(accumulate(sizes, initial=0))  # offsets in the message
        self.bytes = self.places[-1]
        self._heads_here = torch.tensor([place // 4 for place in self.places[:-1]], dtype=torch.long)
        self._heads = self._heads_here.to(device)
        # The value per gradient on which all ranks agree. `measure` writes it; store its maximum over ranks before
        # encode(..., agreed=True) and decode.
        self.agreed = torch.zeros(len(self.counts), dtype=torch.float32, device=device)

    @abstractmethod
    def measure(self, flat: Tensor, *, residual: Tensor | None = None) -> None:
        """Compute the values on which ranks must agree (`agreed`), for algorithms that need that."""

    @abstractmethod
    def encode(
        self, flat: Tensor, message: Tensor, *, residual: Tensor | None = None, seed: int = 0, agreed: bool = False
    ) -> None:
        """Write the message of numbers plus residual (float32), and leave in the residual what it lacks.

        Without `agreed`, this rank agrees with itself alone.
        """

    @abstractmethod
    def decode(self, message: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Write the decoded message, or add it."""

    def flags(self, message: Tensor) -> Tensor:
        """Return for every gradient nonzero if it or its residual had a bad number; on the message's device."""
        return message.view(torch.int32)[self._heads_here if message.device.type == "cpu" else self._heads]

    def new_message(self) -> Tensor:
        """Return an empty message of the right length."""
        return torch.zeros(self.bytes, dtype=torch.uint8, device=self.device)

    def check(self, message: Tensor | None, flat: Tensor, residual: Tensor | None = None, *, out: bool = False) -> None:
        """Refuse buffers that do not fit, before anything is written beyond their ends.

        Decoded numbers (`out`) may have another type than the encoded ones.
        """
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
