"""Seconds of a collective over the real topology.

A group of devices is (size, stride): its members are every `stride`-th device. Devices given one by one are instead the
number of members that each tier's span joins. Between spans, the group's ring uses as many network adapters at once as
it has members there (one rail each). Every other group of the same kind uses the adapters of its own members. All
functions take numbers or numpy arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.clusters import Cluster, Group, Link
from meshwright.cost.constants import DEFAULT, Constants

Array = Any
Counts = tuple[int, ...]  # members of a group that one span of each tier joins
EVERYTHING = 10**9  # more devices than any cluster has
_INSIDE = {"nvlink", "xgmi", "hccs", "ici", "blink", "package", "pcie", "memory"}


@dataclass(frozen=True)
class Tier:
    """One level of links: the number of consecutive devices it joins, and the bandwidth of each."""

    span: int  # devices; EVERYTHING for the outermost
    bandwidth: float  # bytes/s of one device in one direction when all use it, as collectives reach it
    latency: float  # seconds per step
    tree: bool = True  # True if all-reduces may use a tree here: between nodes, not inside one
    # Part of that rate that each kind of collective reaches, if measured.
    reduce: float = 1.0
    gather: float = 1.0
    exchange: float = 1.0


@dataclass(frozen=True)
class Fabric:
    """Tiers of one group of nodes, inner to outer."""

    tiers: tuple[Tier, ...]
    start: float = 0.0  # seconds to start a collective

    @staticmethod
    def of(group: Group, constants: Constants = DEFAULT, between: Link | None = None) -> Fabric:
        """Return the fabric of a group of nodes; `between` is a slower link that joins it to others."""
        tiers = []
        for link in (*group.links, *([between] if between else [])):
            span = link.span or EVERYTHING
            if seen := link.measured:
                parts = (seen.reduce / seen.send, seen.gather / seen.send, seen.exchange / seen.send)
                tiers.append(Tier(span, seen.send, seen.step, False, *parts))
                continue
            inside = link.kind in _INSIDE
            reached = constants.nvlink if inside else constants.network
            tiers.append(Tier(span, device_rate(link, group) * reached, link.latency * constants.hop, not inside))
        if between:
            tiers[-2] = replace(tiers[-2], span=group.devices)
        starts = [link.measured.start for link in group.links if link.measured]
        return Fabric(tuple(tiers), max(starts, default=constants.collective))

    def steps(self, size: Array, stride: Array | Counts) -> list[tuple[Tier, Array, Array]]:
        """Return (tier, members joined by the tiers below it, factor by which this tier grows the group)."""
        found = []
        below: Array = np.ones_like(np.asarray(size, dtype=float))
        for i, tier in enumerate(self.tiers):
            inside = stride[i] if isinstance(stride, tuple) else np.clip(tier.span // stride, 1, size)
            found.append((tier, below, inside / below))
            below = inside
        return found


def device_rate(link: Link, group: Group) -> float:
    """Return the bytes/s of one device on a link when all its neighbours use it too."""
    if link.topology not in {"shared", "pcie-tree"}:
        return link.bandwidth
    sharers = min(link.span, group.devices_per_node) if link.inside_node else group.devices_per_node
    return min(link.bandwidth, link.aggregate / max(sharers, 1))


def gather_seconds(fabric: Fabric, moved: Array, size: Array, stride: Array | Counts = 1) -> Array:
    """Return the seconds of an all-gather to `moved` bytes per device, or a reduce-scatter from them.

    Both use a ring over all members: each device passes on moved (size - 1) / size bytes in size - 1 steps. The slowest
    tier decides.
    """
    per_byte, once = gather_parts(fabric, size, stride)
    return moved * per_byte + once


def gather_parts(fabric: Fabric, size: Array, stride: Array | Counts = 1) -> tuple[Array, Array]:
    """Return an all-gather's cost as (seconds per byte, seconds of latency)."""
    slowest: Array = 0.0
    latency: Array = 0.0
    for tier, below, factor in fabric.steps(size, stride):
        used = factor > 1
        slowest = np.maximum(slowest, used / (tier.bandwidth * tier.gather * below))
        latency = latency + used * (factor - 1) * tier.latency
    return (size - 1) / size * slowest, latency + fabric.start


def reduce_seconds(fabric: Fabric, moved: Array, size: Array, stride: Array | Counts = 1) -> Array:
    """Return the seconds of an all-reduce of `moved` bytes, as a ring or a tree, whichever is faster."""
    per_byte, once = reduce_parts(fabric, size, stride)
    return moved * per_byte + once


def reduce_parts(fabric: Fabric, size: Array, stride: Array | Counts = 1) -> tuple[Array, Array]:
    """Return an all-reduce's cost as (seconds per byte, seconds of latency)."""
    slowest: Array = 0.0
    ring: Array = 0.0
    tree: Array = 0.0
    for tier, below, factor in fabric.steps(size, stride):
        used = factor > 1
        slowest = np.maximum(slowest, used / (tier.bandwidth * tier.reduce * below))
        ring = ring + used * 2 * (factor - 1) * tier.latency
        hops = np.ceil(np.log2(np.maximum(factor, 1))) if tier.tree else factor - 1
        tree = tree + used * 2 * hops * tier.latency
    return 2 * (size - 1) / size * slowest, np.minimum(ring, tree) + fabric.start


def exchange_seconds(
    fabric: Fabric, moved: Array, size: Array, stride: Array | Counts = 1, *, copies: int = 0
) -> Array:
    """Return the seconds of an all-to-all where each device sends `moved` bytes, one part to every member.

    Tiers work in parallel, so the slowest decides. With `copies`, each token goes to so many members but crosses to a
    node only once (DeepEP). The network then carries (1 - (1 - 1/nodes)^copies) nodes / copies of the bytes.
    """
    slowest: Array = 0.0
    latency: Array = 0.0
    for tier, below, factor in fabric.steps(size, stride):
        part = (factor - 1) * below / size  # fraction of a device's bytes that use this tier
        if copies:
            part = part * np.where(below > 1, factor * (1 - (1 - 1 / factor) ** copies) / copies, 1.0)
        slowest = np.maximum(slowest, part / (tier.bandwidth * tier.exchange))
        latency = latency + (factor > 1) * tier.latency
    return moved * slowest + latency + fabric.start


def ring_seconds(fabric: Fabric, moved: Array, size: Array, stride: Array | Counts = 1) -> Array:
    """Return the seconds of one ring step of `moved` bytes: as slow as the slowest link it crosses."""
    slowest: Array = 0.0
    latency: Array = 0.0
    for tier, _, factor in fabric.steps(size, stride):
        used = factor > 1
        slowest = np.maximum(slowest, used / tier.bandwidth)
        latency = np.maximum(latency, used * tier.latency)
    return moved * slowest + latency


def send_seconds(cluster: Cluster, moved: float, a: int, b: int, constants: Constants = DEFAULT) -> float:
    """Return the seconds of a message from one device to another, while their neighbours send theirs."""
    if a == b:
        return 0.0
    link, home = cluster.link(a, b), cluster.groups[cluster.group_index(a)]
    if seen := link.measured:
        return moved / seen.send + seen.step
    reached = constants.nvlink if link.kind in _INSIDE else constants.network
    return moved / (device_rate(link, home) * reached) + link.latency * constants.hop
