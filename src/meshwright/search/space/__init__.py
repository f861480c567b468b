"""The searched space: limits, grids of degrees, candidates, cuts, schedules.

- `activation_modes`: recompute and offload of a block's activations
- `candidates`: grids with ZeRO levels and offload, as the arrays that the cost model prices
- `cuts`: places to cut a chain of layers into stages
- `grids`: layouts of a stage's devices as a grid of axes
- `headroom`: memory that a plan must leave free
- `limits`: limits of a search
- `schedules`: pipelines that a cluster and a batch allow
- `targets`: abilities of other frameworks, as limits of the search
"""
