"""Models to train: layers with parameters, FLOPs and activations; presets; configs; any module."""

from meshwright.models.layer import Kept, Layer, Op, Recompute, Slice, Weight
from meshwright.models.model import Model
from meshwright.models.precision import PRECISIONS, Precision, precision
from meshwright.models.presets import Preset, find_preset, presets

__all__ = [
    "PRECISIONS", "Kept", "Layer", "Model", "Op", "Precision", "Preset", "Recompute", "Slice", "Weight",
    "find_preset", "precision", "presets",
]  # fmt: skip
