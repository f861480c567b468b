"""Seconds of a step: the pipeline, then gradients and the optimizer.

- `pipeline`: one step of a pipeline, event by event
- `step`: time of a whole step
- `update`: gradients and optimizer at the end of a step
"""
