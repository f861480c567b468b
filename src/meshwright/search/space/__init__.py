"""The searched space: limits, grids of degrees, candidates, cuts, schedules.

- `activation_modes`: what a block may do with its activations
- `candidates`: grids with ZeRO levels and offload, as the arrays that the cost model prices
- `cuts`: where a chain of layers may be cut into stages
- `grids`: every way to lay a stage's devices out as a grid of axes
- `headroom`: memory that a plan must leave free
- `limits`: what a search may choose from
- `schedules`: which pipelines a cluster and a batch allow
- `targets`: what other frameworks can run, as limits of the search
"""
