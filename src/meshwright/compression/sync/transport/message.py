"""Messages: a body that a codec fills, and a head that identifies truncated or foreign ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

HEAD = 32  # bytes; the body starts at a multiple of 16, for wide loads
_MAGIC = 0x6D736877
_NEVER = 0x7FA5C3D1  # a float32 signalling NaN, which no computation returns: its signal would be gone


@dataclass(frozen=True)
class Stamp:
    """Identity of a message in a run; all ranks count alike."""

    step: int
    bucket: int
    tag: int  # of the transfer, different for all that may be in progress at once


class Envelope:
    """Buffer for one message, made once and used at every step.

    >>> here, there = Envelope(3), Envelope(3)
    >>> here.body.copy_(torch.tensor([1, 2, 3], dtype=torch.uint8)).tolist()
    [1, 2, 3]
    >>> here.seal(Stamp(step=4, bucket=0, tag=9))
    >>> there.whole.copy_(here.whole).numel() == HEAD + 8
    True
    >>> there.problem(Stamp(4, 0, 9)), there.problem(Stamp(5, 0, 9))
    ('', 'sent bucket 0 of step 4 (9) where bucket 0 of step 5 (9) was due')
    """

    def __init__(self, size: int, *, pinned: bool = False) -> None:
        self.whole = torch.zeros(HEAD + -(-size // 8) * 8, dtype=torch.uint8, pin_memory=pinned)
        self.body = self.whole[HEAD : HEAD + size]
        self._head = self.whole[:HEAD].numpy().view(np.uint32)
        self._words = self.whole[HEAD:].numpy().view(np.uint64)

    def numbers(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the body as numbers."""
        return self.body.view(dtype)

    def seal(self, stamp: Stamp) -> None:
        """Write the head over a finished body."""
        self._head[:] = (_MAGIC, self.whole.numel(), stamp.step, stamp.bucket, stamp.tag, *self._sum(), 0)

    def problem(self, stamp: Stamp) -> str:
        """Return what is wrong with a received message, or ""."""
        magic, size, step, bucket, tag, low, high, _ = map(int, self._head)
        if magic != _MAGIC:
            return "sent something that is no message"
        if (step, bucket, tag) != (stamp.step, stamp.bucket, stamp.tag):
            due = f"bucket {stamp.bucket} of step {stamp.step} ({stamp.tag})"
            return f"sent bucket {bucket} of step {step} ({tag}) where {due} was due"
        if size != self.whole.numel():
            return f"sent a message of {size} bytes where {self.whole.numel()} were due"
        if (low, high) != self._sum():
            return "sent a message that was cut short or changed on its way (its sum is wrong)"
        return ""

    def _sum(self) -> tuple[int, int]:
        total = int(np.add.reduce(self._words, dtype=np.uint64)) if self._words.size else 0
        return total & 0xFFFFFFFF, total >> 32


class Bare:
    """Buffer in which numbers arrive without a head: overwritten marks show that all did.

    >>> numbers = torch.zeros(3)
    >>> bare = Bare(numbers)
    >>> bare.problem(Stamp(0, 0, 0)), numbers.copy_(torch.ones(3)).sum().item(), bare.problem(Stamp(0, 0, 0))
    ('sent numbers that were cut short', 3.0, '')
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._end = numbers[-1:].view(torch.int32)
        self._end.fill_(_NEVER)

    def problem(self, stamp: Stamp) -> str:
        """Return what is wrong with what was received, or ""."""
        return "sent numbers that were cut short" if int(self._end) == _NEVER else ""
