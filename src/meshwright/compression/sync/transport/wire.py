"""Messages between a few processes: posted at once, waited for elsewhere, every wait with a limit.

Everything goes from one process to another, not through collectives: so it is always known for whom one waits, nothing
depends on the order in which processes post, and many transfers may be under way.
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

Addressed = Sequence[tuple[int, Envelope]]  # by a member's place
Raw = Sequence[tuple[int, Tensor]]
TAGS = 1 << 20  # after so many transfers their tags are used again


@dataclass
class Traffic:
    """What this process has sent, in bytes, and who is told of it before it counts as done."""

    sent: int = 0
    pace: Callable[[int], None] | None = None  # waits as long as a link would need for so many bytes

    def spend(self, size: int) -> None:
        self.sent += size
        if self.pace:
            self.pace(size)


@dataclass(frozen=True)
class Wire:
    """Processes that exchange messages; a member's place is its index among them."""

    group: Any  # of all processes; its backend takes CPU tensors
    members: tuple[int, ...]  # ranks in that group
    place: int  # of this process
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
        """Begin to send and to receive; never waits."""
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
        """The same with float32 numbers as they lie, without an envelope: from and to where they belong."""
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
        """Begin to sum float32 numbers in place by the backend's own all-reduce; all processes do so in one order."""
        work = dist.all_reduce(numbers, group=self.group, async_op=True)
        size = 2 * (self.size - 1) * numbers.numel() * numbers.element_size() // self.size
        return Transfer([(-1, work, None)], stamp, self.limit, self.traffic, size, last=True)


@dataclass(frozen=True)
class Transfer:
    """Messages under way."""

    works: list[tuple[int, Any, Envelope | Bare | None]]
    stamp: Stamp
    limit: float
    traffic: Traffic
    size: int
    last: bool = False  # no other transfer of this piece follows: what comes after may yield to more urgent work

    def wait(self) -> None:
        """Until all is there, or a fault that names the peer."""
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
