"""Rotary positions (Su et al., 2021), with the scalings of models for long contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import InputError


@dataclass(frozen=True, eq=False)
class Turns:
    """Rotary frequencies. Layers with equal ones share an object, so that a micro-batch computes its angles once.

    They are float32, whatever the training precision: in bfloat16, positions past 256 would coincide.
    """

    inverse: Tensor  # (dim / 2,) radians per position
    scale: float  # of cosines and sines

    @staticmethod
    def of(dim: int, theta: float, scaling: Mapping[str, Any]) -> Turns:
        return _turns(dim, theta, tuple(sorted(scaling.items())))


@lru_cache(maxsize=64)
def _turns(dim: int, theta: float, scaling: tuple[tuple[str, Any], ...]) -> Turns:
    with torch.device("cpu"):
        return Turns(*frequencies(dim, theta, dict(scaling)))


def frequencies(dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Return radians per position of (dim / 2,), and the factor of cosines and sines."""
    plain = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind == "default":
        return plain.float(), 1.0
    factor = float(scaling["factor"])
    if kind == "linear":
        return (plain / factor).float(), 1.0
    if kind == "llama3":
        return _llama3(plain, factor, scaling).float(), 1.0
    if kind == "yarn":
        return _yarn(plain, dim, theta, factor, scaling)
    raise InputError(f"is '{kind}'", field="rope_scaling.rope_type", valid="default, linear, llama3, yarn")


def _llama3(plain: Tensor, factor: float, scaling: Mapping[str, Any]) -> Tensor:
    """Slow low frequencies, keep high ones, and blend those in between (Llama 3.1)."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * plain / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain / factor * (1 - blend) + plain * blend


def _yarn(plain: Tensor, dim: int, theta: float, factor: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Scale by NTK-by-parts (YaRN; Peng et al., 2023)."""
    length = float(scaling["original_max_position_embeddings"])

    def place(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(place(float(scaling.get("beta_fast", 32)))), 0)
    high = min(math.ceil(place(float(scaling.get("beta_slow", 1)))), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    found = plain / factor * ramp + plain * (1 - ramp)

    def scaled(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    one, all_ = scaling.get("mscale"), scaling.get("mscale_all_dim")
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = scaled(float(one)) / scaled(float(all_)) if one and all_ else scaled(1.0)
    return found.float(), float(attention)


def halves(x: Tensor) -> Tensor:
    """Reorder adjacent pairs (DeepSeek) to be half a head apart."""
    return torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)
