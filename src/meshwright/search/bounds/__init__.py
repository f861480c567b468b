"""Seconds and bytes of candidates, and lower bounds on any plan.

- `dominance`: grids that another grid dominates, dropped before they are priced
- `layer_times`: times of grids without recompute, sharding or offload
- `lower_bounds`: lower bounds on a shape's plans, for many choices and several cuts at once
- `memory_fit`: the best modes of one device group
- `pipeline_shapes`: pipelines of one shape
- `prices`: cost of every kind of layer under every choice
- `pruning`: cheap bounds that drop choices early
- `relaxation`: lower bound on the cost of memory
- `step_time`: the time of a step for many candidates at once
"""
