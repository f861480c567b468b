"""Time a piece of work on this device, with the spread of its samples."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_LEAST = 9  # samples of every timing
# Minimum seconds of one sample: clocks and launches are then small beside it, and so are the time slices of processes
# that share a core.
_BATCH, _SHARED = 1e-3, 2e-2
_WARM = 2  # warm-up runs
_SPIN = 0.3  # seconds: several time slices of other processes


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: the median of several samples, and the spread of their middle half."""

    seconds: float
    spread: float  # (third quartile - first quartile) / median

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        """Return the median and spread of samples.

        >>> Timing.of([1.0, 1.0, 1.25, 1.5, 9.0])
        Timing(seconds=1.25, spread=0.4)
        """
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Timing(middle, (high - low) / middle)


def timed(run: Callable[[], object], device: str, budget: float = 0.15) -> Timing:
    """Time a piece of work back to back, as training does it, for about `budget` seconds."""
    clock = _cuda if device.startswith("cuda") else _cpu
    for _ in range(_WARM):
        run()
    once = clock(run, 1)
    shared = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > (os.cpu_count() or 1)
    lasts = _SHARED if shared and not device.startswith("cuda") else _BATCH
    count = max(1, min(1000, round(lasts / max(once, 1e-9))))
    samples = [clock(run, count)]
    started = time.perf_counter()
    while len(samples) < _LEAST or time.perf_counter() - started < budget:
        samples.append(clock(run, count))
    return Timing.of(samples)


def _cuda(run: Callable[[], object], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


def _cpu(run: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count


def share_of_a_core(seconds: float = _SPIN) -> float:
    """Return the share of a core that this process got while it wanted a whole one; less than 1 if others compute here.

    >>> 0 < share_of_a_core(0.05) < 1.2
    True
    """
    wall, own = time.perf_counter(), time.process_time()
    while time.perf_counter() < wall + seconds:
        pass
    return (time.process_time() - own) / (time.perf_counter() - wall)
