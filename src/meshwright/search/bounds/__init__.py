"""Seconds and bytes of candidates, and lower bounds on any plan.

- `dominance`: grids that another grid dominates, dropped before they are priced
- `layer_times`: times of grids without recompute, sharding or offload
- `lower_bounds`: lower bounds on a shape's plans, for many choices and several cuts at once
- `memory_fit`: the best modes of one device group
- `pipeline_shapes`: pipelines of one shape
- `prices`: what every sort of layer costs under every choice
- `pruning`: a first look at choices
- `relaxation`: what memory costs at least
- `step_time`: seconds of a step at least, in closed form
"""
