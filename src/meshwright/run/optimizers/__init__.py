"""Optimizers: AdamW, 8-bit AdamW, Muon and SGD, with states on the device or offloaded to the host."""

from meshwright.run.optimizers.adam8bit import AdamW8bit, step_in_backward

__all__ = ["AdamW8bit", "step_in_backward"]
