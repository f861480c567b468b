"""Steps from the proven plan to a faster one: layer by layer, offload, swap, compression.

- `chain`: cut a chain of layers into pipeline stages and choose a strategy for every layer
- `chain_paths`: paths through intervals of a chain of layers
- `layers`: every layer with a way of its own
- `milp`: the chain problem as a mixed-integer programme, for the HiGHS solver
- `offload`: offload no more than memory asks for
- `refine`: compress gradients where that makes a plan faster
- `swap`: device-to-device swap (MPress)
"""
