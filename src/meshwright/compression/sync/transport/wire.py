"""Transfers between a few ranks: posted at once, waited for elsewhere, every wait with a limit.

Messages are point to point, not collectives: so the awaited peer is always known, the order in which ranks post does
not matter, and many transfers may be in progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.compression.sync.transport.failure import Failed, Fault
from meshwright.compression.sync.transport.message import Bare, Envelope, Stamp

Addressed = Sequence[tuple[int, Envelope]]  # by a rank's index in the wire
Raw = Sequence[tuple[int, Tensor]]
TAGS = 1 << 20  # tags are reused after so many transfers


@dataclass
class Traffic:
    """Counter of the bytes that this rank has sent, with a callback before each counts as done."""

    sent: int = 0
    pace: Callable[[int], None] | None = None  # waits as long as a link would need for so many bytes

    def spend(self, size: int) -> None:
        self.sent += size
        if self.pace:
            self.pace(size)


@dataclass(frozen=True)
class Wire:
    """Ranks that exchange messages; a rank's place is its index among them."""

    group: Any  # of all ranks; its backend takes CPU tensors
    members: tuple[int, ...]  # ranks in that group
    place: int  # of this rank
    limit: float  # seconds that a wait may take
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def others(self) -> list[int]:
        """Places of the others, the next one first: not all send to the same one at once."""
        return [(self.place + i) % self.size for i in range(1, self.size)]

    def swap(self, stamp: Stamp, sends: Addressed, receives: Addressed, *, last: bool = False) -> Transfer:
        """Start to send and to receive; never waits."""
        works: list[tuple[int, Any, Envelope | Bare | None]] = []
        for place, envelope in receives:
            rank = self.members[place]
            works.append((rank, self._receive(envelope.whole, rank, stamp), envelope))
        for envelope in {id(envelope): envelope for _, envelope in sends}.values():
            envelope.seal(stamp)
        for place, envelope in sends:
            rank = self.members[place]
            works.append((rank, self._send(envelope.whole, rank, stamp), None))
        size = sum(envelope.whole.numel() for _, envelope in sends)
        return Transfer(works, stamp, self.limit, self.traffic, size, last)

    def exchange(self, stamp: Stamp, sends: Raw, receives: Raw, *, last: bool = False) -> Transfer:
        """Start to exchange float32 numbers without an envelope, directly from and to their memory."""
        works: list[tuple[int, Any, Envelope | Bare | None]] = []
        for place, numbers in receives:
            bare, rank = Bare(numbers), self.members[place]
            works.append((rank, self._receive(numbers, rank, stamp), bare))
        for place, numbers in sends:
            works.append((self.members[place], self._send(numbers, self.members[place], stamp), None))
        size = sum(numbers.numel() * numbers.element_size() for _, numbers in sends)
        return Transfer(works, stamp, self.limit, self.traffic, size, last)

    def _receive(self, numbers: Tensor, rank: int, stamp: Stamp) -> Any:
        try:
            return dist.irecv(numbers, group_src=rank, group=self.group, tag=stamp.tag)
        except RuntimeError as error:
            raise Failed(Fault(rank, "closed its connection", stamp.step, stamp.bucket)) from error

    def _send(self, numbers: Tensor, rank: int, stamp: Stamp) -> Any:
        try:
            return dist.isend(numbers, group_dst=rank, group=self.group, tag=stamp.tag)
        except RuntimeError as error:
            raise Failed(Fault(rank, "closed its connection", stamp.step, stamp.bucket)) from error

    def reduce(self, stamp: Stamp, numbers: Tensor) -> Transfer:
        """Start to sum float32 numbers in place by the backend's own all-reduce; all ranks do so in the same order."""
        work = dist.all_reduce(numbers, group=self.group, async_op=True)
        size = 2 * (self.size - 1) * numbers.numel() * numbers.element_size() // self.size
        return Transfer([(-1, work, None)], stamp, self.limit, self.traffic, size, last=True)


@dataclass(frozen=True)
class Transfer:
    """Messages in progress."""

    works: list[tuple[int, Any, Envelope | Bare | None]]
    stamp: Stamp
    limit: float
    traffic: Traffic
    size: int
    last: bool = False  # no other transfer of this piece follows: later work may yield to more urgent work

    def wait(self) -> None:
        """Wait until all has arrived; raises a fault that names the peer."""
        until = time.monotonic() + self.limit
        for rank, work, envelope in self.works:
            try:
                work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))
            except RuntimeError as error:
                late = time.monotonic() >= until - 0.05 or "imed out" in str(error)
                reason = f"nothing came in {self.limit:g} s" if late else "closed its connection"
                raise Failed(self._fault(rank, reason)) from error
            if envelope is not None and (problem := envelope.problem(self.stamp)):
                raise Failed(self._fault(rank, problem, sure=True))
        self.traffic.spend(self.size)

    def _fault(self, rank: int, reason: str, *, sure: bool = False) -> Fault:
        return Fault(rank, reason, self.stamp.step, self.stamp.bucket, sure)
