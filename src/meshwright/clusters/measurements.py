"""Measured rates of a machine, used instead of its datasheet and the catalogue's curves.

`meshwright measure` fits these few numbers to its timings. A cluster file holds them; `cost/` uses each one that is
present. Units in the file are for people (TFLOP/s, GB/s, microseconds); here everything is SI.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from meshwright.base.tables import Table
from meshwright.base.units import GIB, GIGA, MICRO, TERA

Rate = Annotated[float, Meta(gt=0, le=1e9)]
Some = Annotated[float, Meta(ge=0, le=1e9)]
Part = Annotated[float, Meta(ge=0, le=10)]


class ProductTable(Table, frozen=True, kw_only=True):
    """Matrix products of one precision: (m + half) (k + half_k) (n + half) / rate, with a least time."""

    tflops: Rate
    half_k: Some = 0.0
    half: Some = 0.0
    floor_us: Some = 0.0


class AttentionTable(Table, frozen=True, kw_only=True):
    """Fused kernel of one precision, forward and backward.

    Its rate is: rate x keys / (keys + half) x rows / (rows + half).
    """

    tflops: tuple[Rate, Rate]
    half_keys: tuple[Some, Some] = (0.0, 0.0)
    half_rows: tuple[Some, Some] = (0.0, 0.0)
    head_power: Part = 0.0  # heads smaller than 128 reach (size / 128) to this power


class MeasuredTable(Table, frozen=True, kw_only=True):
    """The `measured` table of a cluster file; everything is optional."""

    how: str = ""  # when, and with which software
    product: dict[str, ProductTable] = {}
    attention: dict[str, AttentionTable] = {}
    memory_gb_s: Rate | None = None  # kernels that only read and write memory
    cached_gb_s: Rate | None = None  # data that fits into a cache of `cache_mib`
    cache_mib: Some = 0.0
    norm_gb_s: Rate | None = None
    kernel_us: Some | None = None  # the smallest kernel
    update_gb_s: Rate | None = None  # optimizer step
    host_gb_s: Rate | None = None  # to or from host memory
    host_update_gb_s: Rate | None = None  # update of offloaded states on the host
    launch_us: Some | None = None  # the host's time to issue a kernel
    issues_alone: bool | None = None  # True if no kernel runs while the host issues the next
    contention: Part | None = None  # seconds that computation loses per second of overlapped communication
    shard_us: Some | None = None  # the host's time to gather a sharded layer, both passes
    context_gib: Some | None = None  # driver, kernels and communicators
    fragmentation: Part | None = None  # memory reserved beyond the peak of activations and temporaries


class MeasuredLinkTable(Table, frozen=True, kw_only=True):
    """Measured rates of collectives on a link, per device."""

    reduce_gb_s: Rate
    gather_gb_s: Rate  # all-gather and reduce-scatter
    exchange_gb_s: Rate
    send_gb_s: Rate
    step_us: Some  # of one step of a ring
    start_us: Some  # to start a collective


@dataclass(frozen=True)
class Products:
    """Rates of (m x k) @ (k x n) in one precision."""

    rate: float  # FLOP/s of large products
    half_k: float  # steps along k that every product loses
    half: float  # rows and columns that every product loses
    floor: float  # seconds


@dataclass(frozen=True)
class Attention:
    """Rates of a fused kernel in one precision, forward and backward."""

    rate: tuple[float, float]  # FLOP/s
    half_keys: tuple[float, float]
    half_rows: tuple[float, float]
    head_power: float


@dataclass(frozen=True)
class Measured:
    """Measured rates of one kind of device; None if not measured."""

    how: str = ""
    products: Mapping[str, Products] = field(default_factory=dict)  # by precision
    attention: Mapping[str, Attention] = field(default_factory=dict)
    memory: float | None = None  # bytes/s
    cached: float | None = None  # bytes/s of data that fits into a cache
    cache: float = 0.0  # bytes in that cache
    norm: float | None = None  # bytes/s
    kernel: float | None = None  # seconds
    update: float | None = None  # bytes/s
    host: float | None = None  # bytes/s
    host_update: float | None = None  # bytes/s
    launch: float | None = None  # seconds
    issues_alone: bool | None = None
    contention: float | None = None
    shard: float | None = None  # seconds
    context: float | None = None  # bytes
    fragmentation: float | None = None


@dataclass(frozen=True)
class MeasuredLink:
    """Measured rates of collectives on a link: bytes/s of one device by kind, seconds of a step and of a start."""

    reduce: float
    gather: float
    exchange: float
    send: float
    step: float
    start: float


def measured(table: MeasuredTable) -> Measured:
    """Convert a table from the units of a file."""

    def scaled(value: float | None, unit: float) -> float | None:
        return None if value is None else value * unit

    return Measured(
        table.how,
        {
            name: Products(p.tflops * TERA, p.half_k, p.half, p.floor_us * MICRO)
            for name, p in table.product.items()
        },
        {
            name: Attention((a.tflops[0] * TERA, a.tflops[1] * TERA), a.half_keys, a.half_rows, a.head_power)
            for name, a in table.attention.items()
        },
        scaled(table.memory_gb_s, GIGA), scaled(table.cached_gb_s, GIGA), table.cache_mib * 2**20,
        scaled(table.norm_gb_s, GIGA), scaled(table.kernel_us, MICRO),
        scaled(table.update_gb_s, GIGA), scaled(table.host_gb_s, GIGA), scaled(table.host_update_gb_s, GIGA),
        scaled(table.launch_us, MICRO), table.issues_alone, table.contention,
        scaled(table.shard_us, MICRO), scaled(table.context_gib, GIB), table.fragmentation,
    )  # fmt: skip


def measured_link(table: MeasuredLinkTable) -> MeasuredLink:
    """Convert a table from the units of a file."""
    return MeasuredLink(
        table.reduce_gb_s * GIGA, table.gather_gb_s * GIGA, table.exchange_gb_s * GIGA, table.send_gb_s * GIGA,
        table.step_us * MICRO, table.start_us * MICRO,
    )  # fmt: skip
