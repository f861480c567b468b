"""Simulate a training step as the synchroniser runs it: computing, encoding and sending overlap and share resources.

One thread computes and submits buckets. One worker encodes, merges and decodes the most urgent strand. Messages leave
one after the other. Threads share the cores of their rank: with fewer cores than threads all slow down together.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from meshwright.compression.auto.inputs import Link
from meshwright.compression.sync.engine import UNDER_WAY


@dataclass(frozen=True)
class Leg:
    """Work of a strand until a transfer, or until its end."""

    work: float  # seconds of a core
    sent: int = 0  # bytes that this rank then sends
    plain: bool = False  # by the backend's all-reduce
    last: bool = False  # no other transfer follows: later work may yield to more urgent work


Strand = tuple[Leg, ...]


@dataclass(frozen=True)
class Times:
    """Times of one step, in seconds."""

    step: float
    computing: float  # until the last bucket was submitted
    worker: float  # worker's core time for encoding and decoding
    wire: float  # link time of messages

    @property
    def exposed(self) -> float:
        """Exposed communication: what the step takes longer than computing."""
        return self.step - self.computing


def simulate(ready: Sequence[float], strands: Sequence[Sequence[Strand]], link: Link, cores: float) -> Times:
    """Simulate one step: bucket i is submitted after `ready[i]` seconds of computing, and becomes `strands[i]`.

    >>> from meshwright.compression.auto.inputs import Cost
    >>> link = Link(Cost(1e-6), Cost(1e-6))
    >>> leg = (Leg(1.0, sent=2_000_000, last=True), Leg(0.5))
    >>> simulate([1.0, 2.0], [[leg], [leg]], link, cores=2.0).step  # 1 + 1 + 2 + 2 + 0.5: the link is full
    6.5
    >>> simulate([1.0, 2.0], [[leg], [leg]], link, cores=1.0).step  # threads share a core for a while
    7.5
    """
    return _Run(ready, strands, link, cores).times()


@dataclass
class _Going:
    """Strand in progress."""

    legs: Strand
    urgency: tuple[bool, int, int]
    leg: int = 0


class _Run:
    def __init__(self, ready: Sequence[float], strands: Sequence[Sequence[Strand]], link: Link, cores: float) -> None:
        self.ready, self.strands, self.link, self.cores = ready, strands, link, cores
        self.now = self.free = self.wire = 0.0  # time; when the link has sent all; how long it was busy
        self.handed, self.serial, self.begun = 0, 0, 0
        self.fresh: deque[_Going] = deque()
        self.waiting: list[tuple[tuple[bool, int, int], int, _Going]] = []  # can go on, the most urgent first
        self.moving: deque[tuple[float, float, _Going]] = deque()  # system's remaining work, link's end
        self.arriving: list[tuple[float, int, _Going]] = []
        self.current: _Going | None = None
        self.left = [
            ready[0] if ready else 0.0,
            0.0,
            0.0,
        ]  # work of the computing thread, of the worker, of the system

    def times(self) -> Times:
        computing = 0.0
        while (
            self.handed < len(self.ready) or self.current or self.arriving or self.moving or self.waiting or self.fresh
        ):
            self._take()
            busy = (self.handed < len(self.ready), self.current is not None, bool(self.moving))
            speed = min(1.0, self.cores / max(sum(busy), 1))
            spans = [left / speed if is_busy else inf for left, is_busy in zip(self.left, busy, strict=True)]
            spans.append(self.arriving[0][0] - self.now if self.arriving else inf)
            passed = max(min(spans), 0.0)
            event = spans.index(min(spans))
            self.now += passed
            self.left = [
                left - passed * speed if is_busy else left for left, is_busy in zip(self.left, busy, strict=True)
            ]
            (self._hand, self._send, self._moved, self._arrive)[event]()
            if event == 0:
                computing = self.now
        worker = sum(leg.work for bucket in self.strands for strand in bucket for leg in strand)
        return Times(self.now, computing, worker, self.wire)

    def _hand(self) -> None:
        for place, strand in enumerate(self.strands[self.handed]):
            self.fresh.append(_Going(strand, (False, self.handed, place)))
        self.handed += 1
        if self.handed < len(self.ready):
            self.left[0] = self.ready[self.handed] - self.ready[self.handed - 1]

    def _take(self) -> None:
        """Give the worker the most urgent strand, as the engine does."""
        if self.current is not None:
            return
        may_begin = self.fresh and self.begun < UNDER_WAY
        if may_begin and not (self.waiting and self.waiting[0][0] < self.fresh[0].urgency):
            self.current = self.fresh.popleft()
            self.begun += 1
        elif self.waiting:
            self.current = heapq.heappop(self.waiting)[2]
        if self.current is not None:
            self.left[1] = self.current.legs[self.current.leg].work

    def _send(self) -> None:
        going, self.current = self.current, None
        assert going is not None
        if going.leg == len(going.legs) - 1:
            self.begun -= 1
            return
        leg = going.legs[going.leg]
        cost = self.link.reduce if leg.plain else self.link.messages
        self.free = max(self.free, self.now) + cost.byte * leg.sent
        self.wire += cost.byte * leg.sent
        if not self.moving:
            self.left[2] = cost.work + cost.work_byte * leg.sent
        self.moving.append((cost.work + cost.work_byte * leg.sent, self.free + cost.latency, going))

    def _moved(self) -> None:
        """Complete the system's part of a transfer."""
        _, sent, going = self.moving.popleft()
        if self.moving:
            self.left[2] = self.moving[0][0]
        self.serial += 1
        heapq.heappush(self.arriving, (max(sent, self.now), self.serial, going))

    def _arrive(self) -> None:
        _, serial, going = heapq.heappop(self.arriving)
        going.urgency = (going.legs[going.leg].last, going.urgency[1], going.urgency[2] + 1)
        going.leg += 1
        heapq.heappush(self.waiting, (going.urgency, serial, going))
