"""Refinements of the proven plan: per-layer choices, offload, swap, compression.

- `chain`: cut a chain of layers into pipeline stages and choose a strategy for every layer
- `chain_paths`: paths through intervals of a chain of layers
- `layers`: every layer with its own configuration
- `milp`: the chain problem as a mixed-integer programme, for the HiGHS solver
- `offload`: reduce offload to what memory requires
- `refine`: compress gradients where that makes a plan faster
- `swap`: device-to-device swap (MPress)
"""
