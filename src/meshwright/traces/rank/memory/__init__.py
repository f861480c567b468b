"""A rank's device memory: totals, peak, allocator snapshots.

- `memory`: device memory in use, from the allocator's events
- `peak_memory`: holders of a device's memory at its peak
- `snapshot`: PyTorch's memory snapshots and timelines
"""
