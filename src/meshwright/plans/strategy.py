"""Strategy of one span of layers: its degrees of parallelism and its memory savings."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from meshwright.base.tables import Table
from meshwright.models import Slice

Degree = Annotated[int, Meta(ge=1, le=1_000_000)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Axis = Literal["tp", "ulysses", "ring", "dp"]
DEFAULT_ORDER: tuple[Axis, ...] = ("tp", "ulysses", "ring", "dp")


class Offload(Table, frozen=True, kw_only=True):
    """Fractions of a span's tensors that live in host memory between uses."""

    activations: Fraction = 0.0
    optimizer: Fraction = 0.0
    parameters: Fraction = 0.0


class Swap(Table, frozen=True, kw_only=True):
    """Device-to-device swap (MPress): activations parked on the devices of a stage with room."""

    to: Annotated[int, Meta(ge=0, description="index of the stage that has room")]
    activations: Fraction


class Strategy(Table, frozen=True, kw_only=True):
    """Degrees of one span. dp x tp x ulysses x ring is the number of devices of its stage.

    >>> Strategy(dp=8, tp=4, zero=1).devices
    32
    """

    dp: Annotated[Degree, Meta(description="data-parallel replicas")] = 1
    zero: Annotated[
        Literal[0, 1, 2, 3],
        Meta(description="ZeRO level: shards optimizer states (1), gradients (2), parameters (3)"),
    ] = 0
    zero_group: Annotated[
        int,
        Meta(ge=0, le=1_000_000, description="devices that share one set of shards; 0: all replicas (hybrid if fewer)"),
    ] = 0
    tp: Annotated[Degree, Meta(description="tensor parallelism")] = 1
    sp: Annotated[bool, Meta(description="sequence parallelism over the tensor-parallel devices")] = False
    ulysses: Annotated[Degree, Meta(description="sequence cut, heads cut inside attention")] = 1
    ring: Annotated[Degree, Meta(description="sequence cut, keys and values travel in a ring")] = 1
    ep: Annotated[Degree, Meta(description="expert parallelism, folded over all devices of the stage")] = 1
    etp: Annotated[Degree, Meta(description="tensor parallelism inside each expert")] = 1
    recompute: Annotated[
        Literal["none", "selective", "full"] | tuple[str, ...],
        Meta(description="what the backward pass repeats: a level, or the names of operators"),
    ] = "none"
    offload: Offload = Offload()
    swap: Swap | None = None
    order: Annotated[tuple[Axis, ...], Meta(description="axes from adjacent devices outwards")] = DEFAULT_ORDER
    shares: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...],
        Meta(description="samples of a micro-batch that each replica takes; empty: equal shares"),
    ] = ()

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.ulysses * self.ring

    @property
    def replicas(self) -> int:
        """Devices that hold the same (dense) parameters and see different data: ZeRO shards over these."""
        return self.dp * self.ulysses * self.ring

    @property
    def expert_replicas(self) -> int:
        """Devices that hold the same experts."""
        return max(self.devices // (self.ep * self.etp), 1)

    def shards(self, replicas: int) -> int:
        """Return the number of pieces into which ZeRO cuts the states of `replicas` devices (dense, or experts')."""
        return min(self.zero_group or replicas, replicas)

    @property
    def activations_here(self) -> float:
        """Fraction of the activations that is neither offloaded nor swapped."""
        return 1 - self.offload.activations - (self.swap.activations if self.swap else 0.0)

    @property
    def sequence_pieces(self) -> int:
        """Pieces a sequence is cut into; a ring takes two per device, to balance a causal mask."""
        return self.ulysses * self.ring * (2 if self.ring > 1 else 1) * (self.tp if self.sp else 1)

    def replica(self, position: int) -> int:
        """Return the data-parallel replica of the device at a position of the stage.

        Devices of a stage form a grid, its axes in `order` from adjacent devices outwards. Experts fold over the same
        positions: etp over adjacent devices, then ep, then the experts' replicas. A ZeRO group is `zero_group` adjacent
        replicas.
        """
        stride = 1
        for axis in self.order:
            if axis == "dp":
                break
            stride *= getattr(self, axis)
        return position // stride % self.dp

    def share(self, samples: int, replica: int) -> int:
        """Return the samples of a micro-batch of `samples` that a replica takes."""
        return self.shares[replica] if self.shares else samples // self.dp

    def cut(self, micro_batch: int, seq_len: int, precision: str) -> Slice:
        """Return the work of one device whose replica takes `micro_batch` samples."""
        return Slice(micro_batch, seq_len, precision, self.tp, self.sp, self.ulysses, self.ring, self.ep, self.etp)


class Span(Strategy, frozen=True, kw_only=True):
    """Consecutive layers that share one strategy."""

    layers: Annotated[str, Meta(description="FIRST..LAST by name, both included; a block's name means all its layers")]
