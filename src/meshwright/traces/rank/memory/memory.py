"""Device memory in use, from the allocator's events."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.traces.reading import NONE, Trace

ON_HOST = 0  # torch's device type of the CPU; 1 is CUDA, 6 HIP


@dataclass(frozen=True)
class Peak:
    """Peak of memory in the recorded window, in bytes; -1 if the trace has no totals."""

    events: int
    allocated: int
    reserved: int
    rise: int  # maximum of allocations less frees since the window's start


def device_peak(trace: Trace) -> Peak | None:
    """Return the peak over all devices of a rank, or None if allocations were not recorded."""
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
