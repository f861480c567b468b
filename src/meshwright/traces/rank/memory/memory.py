"""How much memory of devices was in use, from the allocator's events."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.traces.reading import NONE, Trace

ON_HOST = 0  # torch's number for CPU; 1 is CUDA, 6 HIP


@dataclass(frozen=True)
class Peak:
    """The most that was in use inside the recorded window, in bytes; -1 where the trace has no totals."""

    events: int
    allocated: int
    reserved: int
    rise: int  # the most by which allocations outgrew frees since the window's start


def device_peak(trace: Trace) -> Peak | None:
    """Over all devices of a rank; None where allocations were not recorded."""
    memory = trace.memory
    mine = np.flatnonzero((memory.device_type != ON_HOST) & (memory.bytes != NONE))
    mine = mine[np.argsort(trace.events.ts[memory.row[mine]], kind="stable")]
    if not len(mine):
        return None
    return Peak(
        events=len(mine),
        allocated=max(int(memory.allocated[mine].max()), -1),
        reserved=max(int(memory.reserved[mine].max()), -1),
        rise=max(int(np.cumsum(memory.bytes[mine]).max()), 0),
    )
