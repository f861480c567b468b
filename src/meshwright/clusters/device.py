"""Structs of one accelerator, one kind of link, and a group of equal nodes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from meshwright.clusters.measurements import Measured, MeasuredLink

LinkKind = Literal[
    "nvlink", "xgmi", "hccs", "ici", "blink", "package", "pcie", "memory", "infiniband", "roce", "ethernet"
]  # fmt: skip
#   all-to-all  every pair at full rate (NVSwitch, a full mesh)    pairs      bridges between two devices
#   cube-mesh   uneven links between some pairs (DGX-1)            package    two dies in one package
#   pcie-tree   through the host's switches                        ring, torus  neighbours only
#   rails       one adapter per device, rail-optimised fabric      shared     the node's adapters serve all its devices
Topology = Literal[
    "all-to-all", "pairs", "cube-mesh", "package", "pcie-tree", "torus", "ring", "rails", "shared"
]  # fmt: skip


@dataclass(frozen=True)
class Device:
    """One accelerator. `flops` is the dense peak per precision; `sources` says where each number is from."""

    name: str
    title: str
    vendor: str
    memory: int  # bytes
    memory_bandwidth: float  # bytes/s
    flops: dict[str, float]  # FLOP/s
    host_bandwidth: float  # bytes/s to or from host memory, one direction
    architecture: str = ""  # a generation of chips that reach the same part of their peak: hopper, cdna3, ...
    watts: float = 0.0  # power of the board; 0: not known
    measured: Measured | None = None  # measured rates, if any
    sources: dict[str, str] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Link:
    """One tier of the network: the devices it joins, and its speed."""

    kind: LinkKind
    topology: Topology
    bandwidth: float  # bytes/s one device can send, one direction
    aggregate: float  # bytes/s a node (or a span, if smaller) can send when all its devices do
    latency: float  # seconds, one hop, small message
    span: int = 0  # consecutive devices joined; 0: all
    inside_node: bool = False  # a span is counted inside each node; else through all nodes (NVL72)
    pairs: tuple[tuple[int, int, int], ...] = ()  # cube-mesh: (i, j, bricks)
    measured: MeasuredLink | None = None  # measured rates of collectives, if any
    sources: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def joins(self, a: int, b: int) -> bool:
        """Return True if this tier joins two devices (numbered inside their node, or their group)."""
        if not self.span:
            return True
        if a // self.span != b // self.span:
            return False
        return self.topology != "cube-mesh" or self.bricks(a % self.span, b % self.span) > 0

    def bricks(self, i: int, j: int) -> int:
        low, high = min(i, j), max(i, j)
        return next((n for x, y, n in self.pairs if (x, y) == (low, high)), 0)

    def between(self, a: int, b: int) -> Link:
        """Return the link as two given devices see it: a cube mesh gives each pair its own bricks."""
        if self.topology != "cube-mesh":
            return self
        most = max(sum(n for x, y, n in self.pairs if i in (x, y)) for i in range(self.span))  # bricks of one device
        part = self.bricks(a % self.span, b % self.span) / most
        return replace(self, bandwidth=self.bandwidth * part)


@dataclass(frozen=True)
class Group:
    """Equal nodes of one kind of device; links run from inner to outer, the last joins all nodes."""

    nodes: int
    devices_per_node: int
    device: Device
    links: tuple[Link, ...]
    host_memory: int  # bytes per node

    @cached_property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def network(self) -> Link:
        return self.links[-1]

    def link(self, a: int, b: int) -> Link:
        """Return the fastest tier that joins two different devices of the group."""
        size = self.devices_per_node
        same_node = a // size == b // size
        for link in self.links:
            i, j = (a % size, b % size) if link.inside_node else (a, b)
            if (same_node or not link.inside_node) and link.joins(i, j):
                return link.between(i, j)
        raise AssertionError("the last link joins everything")
