"""Count and time of each kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.reading import Category, Trace

QUANTILES = (0.5, 0.9, 0.99)
BITS = 32  # for durations: 4.3 s in nanoseconds


@dataclass(frozen=True)
class Kernel:
    """All runs of one kernel; times in nanoseconds. Concurrent runs count separately."""

    name: str
    count: int
    total: int
    shortest: int
    median: float
    p90: float
    p99: float
    longest: int

    @property
    def mean(self) -> float:
        return self.total / self.count


def _in_order(names: NDArray[np.int32], durations: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sort by name, then duration: as one number of both, which is five times as fast, if durations are short enough."""
    if len(durations) and durations.max() < 1 << BITS:
        keys = np.sort((names.astype(np.int64) << BITS) + durations)
        return keys >> BITS, keys & ((1 << BITS) - 1)
    order = np.lexsort((durations, names))
    return names[order].astype(np.int64), durations[order]


def kernel_table(trace: Trace, *categories: Category) -> tuple[Kernel, ...]:
    """Return kernels, or events of other categories, by total time, longest first."""
    rows = trace.complete(*(categories or (Category.KERNEL,)))
    names, durations = _in_order(trace.events.name[rows], trace.events.dur[rows])
    firsts = np.flatnonzero(np.append(True, names[1:] != names[:-1])) if len(names) else np.zeros(0, np.int64)
    counts = np.diff(np.append(firsts, len(names)))
    totals = np.add.reduceat(durations, firsts) if len(names) else firsts
    places = firsts[:, None] + (counts[:, None] - 1) * np.array(QUANTILES)
    low = np.floor(places).astype(np.int64)
    high = np.ceil(places).astype(np.int64)
    quantiles = durations[low] + (durations[high] - durations[low]) * (places - low)
    found = [
        Kernel(
            name=trace.texts[names[first]],
            count=int(count),
            total=int(total),
            shortest=int(durations[first]),
            median=float(q[0]),
            p90=float(q[1]),
            p99=float(q[2]),
            longest=int(durations[first + count - 1]),
        )
        for first, count, total, q in zip(firsts, counts, totals, quantiles, strict=True)
    ]
    return tuple(sorted(found, key=lambda kernel: (-kernel.total, kernel.name)))
