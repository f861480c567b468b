"""Two threads per process that turn gradients into sums.

A *strand* is the way of one piece of a bucket: a generator that computes (encodes, merges, decodes), yields a transfer, and
goes on when that has arrived. The *worker* computes, always what the wire needs soonest; the *waiter* waits for transfers in
the order they were posted. Nothing else ever waits: not the caller, not a callback.

No deadlock: a transfer that is waited for was posted by some process after all it depends on had arrived there, so whatever
holds up the slowest process was posted earlier still; such a chain ends.
"""

from __future__ import annotations

import heapq
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.futures import Future

from meshwright.compress.sync.wire import Transfer

Strand = Iterator[Transfer]


@dataclass(eq=False)
class _Job:
    strands: int  # that are not at their end
    result: Any
    future: Future[Any]


class Engine:
    """Runs strands.

    >>> engine = Engine(lambda error: error)
    >>> numbers = torch.ones(2)
    >>> engine.submit([iter(())], numbers).wait()
    tensor([1., 1.])
    >>> engine.close()
    """

    def __init__(self, verdict: Callable[[Exception], Exception]) -> None:
        self.error: Exception | None = None
        self._verdict = verdict  # what is told of an error, after asking others
        self._ready: list[tuple[tuple[bool, int, int], int, _Job, int, Strand]] = []
        self._jobs: set[_Job] = set()
        self._changed = threading.Condition()
        self._posted: queue.SimpleQueue[tuple[Transfer, _Job, tuple[int, int, int], Strand] | None]
        self._posted = queue.SimpleQueue()
        self._closing = False
        self._serial = self._count = 0
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._work, self._wait)]
        for thread in self._threads:
            thread.start()

    def submit(self, strands: Sequence[Strand], result: Any) -> Future[Any]:
        """Begin; the future has the result when all strands are at their end. The first strand is the most urgent."""
        job = _Job(len(strands), result, Future())
        with self._changed:
            self._serial += 1
            if self.error is None and strands:
                self._jobs.add(job)
                for place, strand in enumerate(strands):
                    self._push((False, self._serial, place), job, self._serial, strand)
                self._changed.notify()
            else:
                job.future.set_result(self.error or result)
        # An error set on the first future would reach C++ as a value; raised in a callback it arrives as an error.
        return job.future.then(_raised)

    def close(self) -> None:
        """End the threads; what is under way is given up."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._posted.put(None)
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join(5.0)

    def _push(self, urgency: tuple[bool, int, int], job: _Job, serial: int, strand: Strand) -> None:
        self._count += 1
        heapq.heappush(self._ready, (urgency, self._count, job, serial, strand))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._closing)
                if self._closing:
                    return
                urgency, _, job, serial, strand = heapq.heappop(self._ready)
            try:
                with torch.no_grad():
                    transfer = next(strand, None)
            except Exception as error:
                self._fail(error)
            else:
                if transfer is None:
                    self._finish(job)
                else:
                    self._posted.put((transfer, job, (serial, urgency[2], transfer.last), strand))

    def _wait(self) -> None:
        while (posted := self._posted.get()) is not None:
            transfer, job, (serial, place, last), strand = posted
            if self.error is not None:
                continue
            try:
                transfer.wait()
            except Exception as error:
                self._fail(error)
            else:
                with self._changed:
                    # A later round of an early piece counts like the first round of the next piece.
                    self._push((bool(last), serial, place + 1), job, serial, strand)
                    self._changed.notify()

    def _finish(self, job: _Job) -> None:
        with self._changed:
            job.strands -= 1
            done = job.strands == 0 and job in self._jobs
            if done:
                self._jobs.remove(job)
        if done:
            job.future.set_result(job.result)

    def _fail(self, error: Exception) -> None:
        told = self._verdict(error)
        with self._changed:
            if self.error is not None:
                return
            self.error = told
            self._ready.clear()
            jobs, self._jobs = self._jobs, set()
        for job in jobs:
            job.future.set_result(told)


def _raised(future: Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, Exception):
        raise value
    return value
