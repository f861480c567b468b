"""Seconds of one operator on one device: matrix products, attention, and memory-bound kernels.

All functions take numbers or numpy arrays (one entry for each candidate strategy).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.clusters import Device
from meshwright.clusters.measurements import Attention, Measured, Products
from meshwright.cost.constants import DEFAULT, Architecture, Constants, seen_on
from meshwright.cost.runtime import Runtime

Array = Any  # a number or an array of them

# Precision of a job -> the datasheet rates its products may use, best first.
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
    """Return the fastest dense peak that a job's matrix products may use; else the device's slowest."""
    return next((device.flops[p] for p in _RATES[precision] if p in device.flops), min(device.flops.values()))


@dataclass(frozen=True)
class Chip:
    """Sustained rates of one device."""

    products: Products  # the job's matrix products
    products_16: Products  # products that stay in 16 bits: language head, router
    attention: Attention
    memory: float  # bytes/s of a copy
    cached: float  # bytes/s of a copy that fits into a cache
    cache: float  # bytes in that cache
    norm: float  # bytes/s of a norm
    update: float  # bytes/s of an optimizer step
    low: bool  # True if operands are quantised to 8 or 4 bits
    constants: Constants

    @property
    def product_16(self) -> float:
        """FLOP/s that large 16-bit products sustain."""
        return self.products_16.rate

    @staticmethod
    def of(device: Device, precision: str, runtime: Runtime, constants: Constants = DEFAULT) -> Chip:
        """Return the rates a device sustains in a job's precision with a runtime's kernels."""
        constants = seen_on(device, constants)
        slowest = min(device.flops, key=lambda p: device.flops[p])
        best = next((p for p in _RATES[precision] if p in device.flops), slowest)
        bits = {"fp8": 1, "fp4": 2}.get(best, 0)
        high = next((p for p in _RATES["bf16" if bits else precision] if p in device.flops), best)
        usual = _usual(device, best, high, runtime, constants)
        seen = device.measured or Measured()
        # A measured kernel is the machine's best; older ones follow the catalogue.
        attention = seen.attention.get(high) if runtime.attention == "native" else None
        return Chip(
            seen.products.get(best, usual.products),
            seen.products.get(high, usual.products_16),
            attention or usual.attention,
            seen.memory or usual.memory,
            seen.cached or seen.memory or usual.memory,
            seen.cache,
            seen.norm or usual.norm,
            seen.update or seen.memory or usual.memory,
            bits > 0,
            constants,
        )


def _usual(device: Device, best: str, high: str, runtime: Runtime, constants: Constants) -> Chip:
    """Return the usual rates of the device's architecture, without measurements."""
    arch = constants.architecture(device.architecture)
    bits = {"fp8": 1, "fp4": 2}.get(best, 0)
    power = _power(device, arch, constants)
    peak = device.flops[high] * power
    kernel = {"native": arch.native, "triton": arch.triton}.get(runtime.attention, arch.flash)
    sixteen = device.flops[high] * min(power * arch.products[0], constants.most)
    attention = (peak * kernel[0], peak * kernel[1])
    if high == "fp32":  # vector units: neither the tiles nor the power of matrix units limit them
        sixteen = device.flops[high] * constants.vector
        attention = (sixteen, sixteen)
    product = device.flops[best] * min(power * arch.products[bits], constants.most) if bits else sixteen
    keys, rows, head = (0.0, 0.0), (0.0, 0.0), 0.0
    if arch.wants_rows:
        keys, head = constants.attention_keys, constants.head_size
        forward, backward = constants.attention_rows
        rows = (forward * attention[0], backward * attention[0])  # more units need more rows
    tiles = (constants.product_k, constants.product_n, constants.product_floor)
    memory, norm = (device.memory_bandwidth * part for part in (constants.memory, constants.norm))
    return Chip(
        Products(product, *tiles), Products(sixteen, *tiles), Attention(attention, keys, rows, head),
        memory, memory, 0.0, norm, memory, bits > 0, constants,
    )  # fmt: skip


def _power(device: Device, arch: Architecture, constants: Constants) -> float:
    """Return the power factor: more power per FLOP than the measured board sustains more of the peak."""
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
    """Return the seconds of (m x k) @ (k x n) with `size` bytes per number, or of `groups` such products (experts).

    Partial tiles waste part of the rate. Loads overlap with computation, but not fully: on the H200, the root of the
    sum of squares of the two times fits. Grouped products overlap less: a power of 1.5 fits what SimuMax printed for a
    B200, from 128 to 1024 rows per expert. A result added to one in memory, of `added_to` bytes per element, does not
    overlap.
    """
    known = chip.products if low else chip.products_16
    flops = 2.0 * groups * (m + known.half) * (k + known.half_k) * (n + known.half)
    computing, loading = flops / known.rate, size * groups * (m * k + k * n + m * n) / chip.memory
    adding = 2.0 * added_to * groups * m * n / chip.memory
    power = np.where(np.asarray(groups) > 1, 1.5, 2.0)
    both = (computing**power + loading**power) ** (1 / power)
    return both + adding + known.floor


def attention_seconds(chip: Chip, flops: Array, keys: Array, rows: Array, head_dim: float, *, backward: bool) -> Array:
    """Return the seconds of a fused kernel of `rows` queries (times heads) over `keys` each.

    The backward pass does 2.5 times the forward's FLOPs (Dao, 2023). Smaller heads do less per load.
    """
    known = chip.attention
    rate = (
        known.rate[backward] * keys / (keys + known.half_keys[backward]) * min(1.0, head_dim / 128) ** known.head_power
    )
    rate = rate * rows / (rows + known.half_rows[backward])
    return flops * (2.5 if backward else 1.0) / rate + (2 if backward else 1) * chip.products_16.floor


def memory_seconds(chip: Chip, moved: Array, *, norm: bool = False) -> Array:
    """Return the seconds of a kernel that reads and writes `moved` bytes; those that fit into a cache use its rate."""
    if norm:
        return moved / chip.norm + chip.constants.memory_floor
    beyond = np.maximum(moved - chip.cache, 0.0)
    return (moved - beyond) / chip.cached + beyond / chip.memory + chip.constants.memory_floor
