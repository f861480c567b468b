"""Statistics of a rank's own steps: when buckets were ready, how long steps took, and the worker's load."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from meshwright.compression.sync.bucket import Gradients

_REMEMBERED = 16  # steps whose computing times are remembered: some have extra work, such as a validation

Layout = tuple[Gradients, ...]


class StepStatistics:
    """Statistics of steps with the same buckets.

    A step with other buckets, for example without an unused module, is not counted unless the next one has them, too.
    """

    def __init__(self) -> None:
        self.layout: Layout = ()
        self.now: list[tuple[Gradients, float]] = []  # buckets of this step, with the computing time until each
        self.seconds: list[float] = []  # of steps since the last vote
        self._other: Layout = ()  # of the last step, if it differed
        self._begun = (0.0, 0.0)  # computed and wall seconds when the last step had been submitted
        self._ready: deque[list[float]] = deque(maxlen=_REMEMBERED)
        self._worked, self._marks = 0.0, [0.0]  # worker's total, and its value at each step's end since the last vote

    def handed(self, gradients: Gradients) -> None:
        """Record that a bucket is submitted."""
        self.now.append((gradients, time.thread_time()))

    def ended(self, *, counts: bool = True) -> bool:
        """Record that all buckets of a step are submitted; return True if it was a usual step and some were counted."""
        layout, computed, wall = tuple(one for one, _ in self.now), time.thread_time(), time.perf_counter()
        if layout == self.layout and self._begun[1] and counts:
            self.seconds.append(wall - self._begun[1])
            self._ready.append([at - self._begun[0] for _, at in self.now])
            self._marks.append(self._worked)
        elif layout != self.layout and (not self.layout or layout == self._other):
            self.layout, self.seconds = layout, []
            self._ready.clear()
            self._marks = [self._worked]
        self._other, self._begun, self.now = layout, (computed, wall), []
        return layout == self.layout and bool(self.seconds)

    def timed(self, strand: Iterator[Any]) -> Iterator[Any]:
        """Run a strand and count its work."""
        while True:
            begin = time.thread_time()
            transfer = next(strand, None)
            self._worked += time.thread_time() - begin
            if transfer is None:
                return
            yield transfer

    def told(self) -> list[float]:
        """Return the numbers for a vote: seconds of a step, the worker's load in it, and when each bucket was ready."""
        worked = (self._marks[-1] - self._marks[0]) / max(len(self._marks) - 1, 1)
        ready = [statistics.median(times) for times in zip(*self._ready, strict=True)]
        return [statistics.median(self.seconds), worked, *ready]

    def begin(self) -> None:
        """Start counting for the next vote."""
        self.seconds, self._marks = [], self._marks[-1:]
