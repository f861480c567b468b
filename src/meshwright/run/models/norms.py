"""Norms by the names that the cost model uses."""

from __future__ import annotations

from torch import nn

from meshwright.run.models.numerics import Numerics


def norm(kind: str, width: int, numerics: Numerics) -> nn.Module:
    """`rms` or `layer`."""
    return nn.RMSNorm(width, eps=numerics.eps) if kind == "rms" else nn.LayerNorm(width, eps=numerics.eps)
