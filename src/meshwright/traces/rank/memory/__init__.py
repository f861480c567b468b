"""A rank's device memory: totals, peak, allocator snapshots.

- `memory`: how much memory of devices was in use, from the allocator's events
- `peak_memory`: what held a device's memory at its fullest moment
- `snapshot`: memory that PyTorch wrote down beside a trace
"""
