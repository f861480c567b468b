"""Seconds of a step: the pipeline, then gradients and the optimizer.

- `pipeline`: one step of a pipeline, event by event
- `step`: time of a whole step
- `update`: what ends a step
"""
