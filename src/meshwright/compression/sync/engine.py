"""Threads of a rank that turn gradients into sums.

- A *strand* is the path of one piece of a bucket: a generator that computes (encodes, merges, decodes), yields a
  transfer, and goes on when that has arrived.
- The *worker* computes, always what the wire needs soonest.
- *Waiters* wait, one for each transfer in progress. Nothing else ever waits: neither the worker, nor the caller, nor a
  callback.

No deadlock: all ranks submit the same strands in the same order and start the earliest first. Their number is limited,
and each has a waiter of its own. So all ranks work on whichever strand is the earliest unfinished one. A single waiter
would not do: while it waits for one strand's message, it would miss that of another for which a peer waits.
"""

from __future__ import annotations

import heapq
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.futures import Future

from meshwright.compression.sync.transport.wire import Transfer
from meshwright.errors import InputError

UNDER_WAY = 16  # maximum of strands that have begun and not ended


@dataclass(eq=False)
class _Job:
    strands: int  # unfinished strands
    result: Any
    future: Future[Any]
    stream: Any  # CUDA stream on which it computes; None on a CPU

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return the context in which the worker computes."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


@dataclass(eq=False)
class _Strand:
    steps: Iterator[Transfer]
    job: _Job
    urgency: tuple[bool, int, int]  # True if only decoding is left; bucket and piece in their order


class Engine:
    """Engine that runs strands.

    >>> engine = Engine(lambda error: error)
    >>> numbers = torch.ones(2)
    >>> engine.submit([iter(())], numbers).wait()
    tensor([1., 1.])
    >>> engine.close()
    True
    """

    def __init__(self, verdict: Callable[[Exception], Exception]) -> None:
        self.error: Exception | None = None
        self._verdict = verdict  # turns an error into the reported one, after asking other ranks
        self._changed = threading.Condition()  # guards all that follows
        self._fresh: deque[_Strand] = deque()  # have not begun
        self._ready: list[tuple[tuple[bool, int, int], int, _Strand]] = []  # can go on, the most urgent first
        self._jobs: set[_Job] = set()
        self._serial = self._count = self._begun = 0
        self._closing = False
        self._posted: queue.SimpleQueue[tuple[Transfer, _Strand] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, daemon=True)
        self._worker.start()
        self._waiters: list[threading.Thread] = []  # as many as strands have ever been in progress at once

    def submit(self, strands: Sequence[Iterator[Transfer]], result: Any, stream: Any = None) -> Future[Any]:
        """Start strands, the first of which is the most urgent; the future gets the result when all have ended.

        With a CUDA `stream`, the worker computes on it, and waiting for the future makes the caller's own stream wait
        for it.
        """
        job = _Job(len(strands), result, Future(devices=None if stream is None else [stream.device]), stream)
        with self._changed:
            if self._closing:
                raise InputError(
                    "was closed", field="synchroniser", valid="one that is open: gradients would wait for ever"
                )
            self._serial += 1
            if self.error is None and strands:
                self._jobs.add(job)
                places = enumerate(strands)
                self._fresh.extend(_Strand(steps, job, (False, self._serial, place)) for place, steps in places)
                self._changed.notify()
            else:
                job.future.set_result(None if self.error else result)
        # An error set on the first future would reach C++ as a value; raised in a callback it arrives as an error.
        return job.future.then(self._value)

    def close(self) -> bool:
        """End the threads and abandon strands in progress. Return False if they had ended before."""
        with self._changed:
            if self._closing:
                return False
            self._closing = True
            self._changed.notify()
        self._worker.join(5.0)
        for _ in self._waiters:
            self._posted.put(None)
        if self.error is None:  # else some may wait for a lost rank, until their limit
            for thread in self._waiters:
                thread.join(5.0)
        return True

    def _work(self) -> None:
        while (strand := self._next()) is not None:
            try:
                with torch.no_grad(), strand.job.on_stream():
                    transfer = next(strand.steps, None)
            except Exception as error:
                self._fail(error)
            else:
                if transfer is None:
                    self._finish(strand)
                else:
                    # A later round of an early piece is as urgent as the first round of the next piece.
                    strand.urgency = (transfer.last, strand.urgency[1], strand.urgency[2] + 1)
                    self._posted.put((transfer, strand))

    def _next(self) -> _Strand | None:
        """Return the most urgent strand that can go on or start; wait for one; None when closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._ready or self._may_begin())
            if self._closing:
                return None
            if not self._may_begin() or (self._ready and self._ready[0][0] < self._fresh[0].urgency):
                return heapq.heappop(self._ready)[2]
            self._begun += 1
            if self._begun > len(self._waiters):
                self._waiters.append(threading.Thread(target=self._wait, daemon=True))
                self._waiters[-1].start()
            return self._fresh.popleft()

    def _may_begin(self) -> bool:
        return bool(self._fresh) and self._begun < UNDER_WAY

    def _wait(self) -> None:
        while (posted := self._posted.get()) is not None:
            transfer, strand = posted
            if self.error is not None:
                continue
            try:
                transfer.wait()
            except Exception as error:
                self._fail(error)
            else:
                with self._changed:
                    self._count += 1
                    heapq.heappush(self._ready, (strand.urgency, self._count, strand))
                    self._changed.notify()

    def _finish(self, strand: _Strand) -> None:
        job = strand.job
        with self._changed:
            self._begun -= 1
            job.strands -= 1
            done = job.strands == 0 and job in self._jobs
            if done:
                self._jobs.remove(job)
        if done:
            with job.on_stream():  # a device's future records the stream's current position
                job.future.set_result(job.result)

    def fail(self, error: Exception) -> Exception:
        """Fail because of an error seen elsewhere; return the error with which everything fails from now on."""
        self._fail(error)
        assert self.error is not None
        return self.error

    def _fail(self, error: Exception) -> None:
        told = self._verdict(error)
        with self._changed:
            if self.error is not None:
                return
            self.error = told
            self._ready.clear()
            self._fresh.clear()
            jobs, self._jobs = self._jobs, set()
        for job in jobs:
            job.future.set_result(None)

    def _value(self, future: Future[Any]) -> Any:
        value = future.value()
        if value is None:
            assert self.error is not None
            raise self.error
        return value
