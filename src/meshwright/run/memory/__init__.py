"""Recompute, offload and swap of activations; memory of ranks on CPUs.

- `checkpointing`: operators that are recomputed in the backward pass
- `host_memory`: memory of a process that trains on the CPU
- `offload`: activations that are offloaded or swapped between the passes
- `offload_share`: choice of tensors to offload, up to a fraction
- `recompute`: a plan's recompute settings, applied to a decoder
"""
