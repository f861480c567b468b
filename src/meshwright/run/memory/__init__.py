"""Recompute, offload and swap of activations; memory of processes on CPUs.

- `checkpointing`: operators that are run again in the backward pass instead of keeping what they made
- `host_memory`: memory of a process that trains on processors
- `offload`: activations that live elsewhere between the passes
- `offload_share`: a fraction of many things of different sizes, spread evenly over them
- `recompute`: what a plan says of layers' recomputation, applied to a decoder
"""
