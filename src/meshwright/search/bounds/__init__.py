"""Seconds and bytes of candidates, and bounds that no plan can beat.

- `dominance`: grids that another one beats in every respect, left out before anything else is done with them
- `layer_times`: grids with nothing repeated, sharded or offloaded
- `lower_bounds`: seconds below which no plan of a shape can be, for many choices and several cuts at once
- `memory_fit`: the best way to run one device group
- `pipeline_shapes`: pipelines of one shape
- `prices`: what every sort of layer costs under every choice
- `pruning`: a first look at choices
- `relaxation`: what memory costs at least
- `step_time`: seconds of a step at least, in closed form
"""
