"""Seconds of one operator on one device: matrix products, attention, and what is bound by memory.

All functions take numbers or numpy arrays (one entry for each candidate strategy).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.cluster import Device
from meshwright.cost.constants import DEFAULT, Architecture, Constants
from meshwright.cost.runtime import Runtime

Array = Any  # a number or an array of them

# Precision of a job -> the rates of the datasheet its products may use, best first.
_RATES = {
    "fp32": ("fp32",),
    "tf32": ("tf32", "fp32"),
    "bf16": ("bf16", "fp16", "tf32", "fp32"),
    "fp16": ("fp16", "bf16", "tf32", "fp32"),
    "fp8": ("fp8", "bf16", "fp16"),
    "mxfp8": ("fp8", "bf16", "fp16"),
    "nvfp4": ("fp4", "fp8", "bf16"),
}


def peak_flops(device: Device, precision: str) -> float:
    """The dense peak of the fastest rate that a job's matrix products may use; else the slowest the device has."""
    return next((device.flops[p] for p in _RATES[precision] if p in device.flops), min(device.flops.values()))


@dataclass(frozen=True)
class Chip:
    """One device as a cost model sees it: the rates it sustains."""

    product: float  # FLOP/s of the job's matrix products
    product_16: float  # FLOP/s of those that stay in 16 bits: language head, router, attention
    attention: tuple[float, float]  # FLOP/s forward and backward, head size 128, long sequence
    memory: float  # bytes/s of a copy
    norm: float  # bytes/s of a norm
    low: bool  # whether operands are quantised to 8 or 4 bits
    wants_rows: bool  # whether attention kernels need many rows and keys to reach their rate
    constants: Constants

    @staticmethod
    def of(device: Device, precision: str, runtime: Runtime, constants: Constants = DEFAULT) -> Chip:
        """The rates a device sustains in a job's precision under a runtime's kernels."""
        arch = constants.architecture(device.architecture)
        slowest = min(device.flops, key=lambda p: device.flops[p])
        best = next((p for p in _RATES[precision] if p in device.flops), slowest)
        bits = {"fp8": 1, "fp4": 2}.get(best, 0)
        high = next((p for p in _RATES["bf16" if bits else precision] if p in device.flops), best)
        power = _power(device, arch, constants)
        peak = device.flops[high] * power
        kernel = {"native": arch.native, "triton": arch.triton}.get(runtime.attention, arch.flash)
        sixteen = device.flops[high] * min(power * arch.products[0], constants.most)
        attention = (peak * kernel[0], peak * kernel[1])
        if high == "fp32":  # vector units: neither the tiles nor the power of matrix units limit them
            sixteen = device.flops[high] * constants.vector
            attention = (sixteen, sixteen)
        product = device.flops[best] * min(power * arch.products[bits], constants.most) if bits else sixteen
        return Chip(
            product,
            sixteen,
            attention,
            device.memory_bandwidth * constants.memory,
            device.memory_bandwidth * constants.norm,
            bits > 0,
            arch.wants_rows,
            constants,
        )


def _power(device: Device, arch: Architecture, constants: Constants) -> float:
    """More power per FLOP of the peak than the board that was measured has: more of the peak is sustained."""
    peak = device.flops.get("bf16") or device.flops.get("fp16")
    if not (device.watts and arch.watts_per_tflop and peak):
        return 1.0
    return float((device.watts / (peak / 1e12) / arch.watts_per_tflop) ** constants.power)


def product_seconds(
    chip: Chip,
    m: Array,
    k: Array,
    n: Array,
    *,
    low: bool = True,
    groups: Array = 1,
    added_to: float = 0.0,
    size: float = 2.0,
) -> Array:
    """(m x k) @ (k x n) of numbers of `size` bytes; or so many `groups` of them, the experts of a mixture.

    Tiles that are not full waste part of the rate. Loads hide behind computation but not wholly: the root of the sum
    of squares lies between the larger of the two times and their sum, as measured on the H200. Grouped products hide
    less (a power of 1.5 fits what SimuMax printed for a B200, from 128 to 1024 rows per expert), and a result that is
    added to one in memory, of `added_to` bytes per element, hides nothing.
    """
    c = chip.constants
    rate = chip.product if low else chip.product_16
    flops = 2.0 * groups * (m + c.product_n) * (k + c.product_k) * (n + c.product_n)
    computing, loading = flops / rate, size * groups * (m * k + k * n + m * n) / chip.memory
    adding = 2.0 * added_to * groups * m * n / chip.memory
    power = np.where(np.asarray(groups) > 1, 1.5, 2.0)
    both = (computing**power + loading**power) ** (1 / power)
    return both + adding + c.product_floor


def attention_seconds(chip: Chip, flops: Array, keys: Array, rows: Array, head_dim: float, *, backward: bool) -> Array:
    """A fused kernel of `rows` queries (times heads) over `keys` each.

    The backward pass does 2.5 times the forward's FLOPs (Dao, 2023). Smaller heads do less per load.
    """
    c = chip.constants
    rate = chip.attention[backward]
    if chip.wants_rows:
        rate = rate * keys / (keys + c.attention_keys[backward]) * min(1.0, head_dim / 128) ** c.head_size
        rate = rate * rows / (rows + c.attention_rows[backward] * chip.attention[0])  # more units want more rows
    return flops * (2.5 if backward else 1.0) / rate + (2 if backward else 1) * c.product_floor


def memory_seconds(chip: Chip, moved: Array, *, norm: bool = False) -> Array:
    """A kernel that reads and writes `moved` bytes."""
    return moved / (chip.norm if norm else chip.memory) + chip.constants.memory_floor
