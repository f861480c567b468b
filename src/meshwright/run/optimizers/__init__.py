"""Optimizers that need less memory than their parameters."""

from meshwright.run.optimizers.adam8bit import AdamW8bit, step_in_backward

__all__ = ["AdamW8bit", "step_in_backward"]
