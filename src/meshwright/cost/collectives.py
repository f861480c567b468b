"""Seconds of a collective over the real topology.

A group of devices is (size, stride): its members are every `stride`-th device. Inside one span of a link's tier sit
`span // stride` of them; between spans the group's ring crosses as many network adapters at once as it has members
there (one rail each), and every other group of the same kind crosses on the adapters of its own members. All
functions take numbers or numpy arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.cluster import Group, Link
from meshwright.cost.constants import DEFAULT, Constants

Array = Any
EVERYTHING = 10**9  # more devices than any cluster has
_INSIDE = {"nvlink", "xgmi", "hccs", "ici", "blink", "package", "pcie", "memory"}


@dataclass(frozen=True)
class Tier:
    """One level of links: how many consecutive devices it joins, and what each of them gets."""

    span: int  # devices; EVERYTHING for the outermost
    bandwidth: float  # bytes/s of one device in one direction when all use it, as collectives reach it
    latency: float  # seconds per step


@dataclass(frozen=True)
class Fabric:
    """The tiers of one group of nodes, inner to outer."""

    tiers: tuple[Tier, ...]
    start: float = 0.0  # seconds to start a collective

    @staticmethod
    def of(group: Group, constants: Constants = DEFAULT, between: Link | None = None) -> Fabric:
        """From the links of a group of nodes; `between` is a slower link that joins it to others."""
        tiers = []
        for link in (*group.links, *([between] if between else [])):
            reached = constants.nvlink if link.kind in _INSIDE else constants.network
            sharers = min(link.span, group.devices_per_node) if link.inside_node else group.devices_per_node
            each = min(link.bandwidth, link.aggregate / max(sharers, 1))
            last = link.span == 0
            tiers.append(Tier(EVERYTHING if last else link.span, each * reached, link.latency * constants.hop))
        if between:
            tiers[-2] = Tier(group.devices, tiers[-2].bandwidth, tiers[-2].latency)
        return Fabric(tuple(tiers), constants.collective)

    def steps(self, size: Array, stride: Array) -> list[tuple[Tier, Array, Array]]:
        """(tier, members joined by the tiers below it, factor by which this tier grows the group)."""
        found = []
        below: Array = np.ones_like(np.asarray(size, dtype=float))
        for tier in self.tiers:
            inside = np.clip(tier.span // stride, 1, size)
            found.append((tier, below, inside / below))
            below = inside
        return found


def gather_seconds(fabric: Fabric, moved: Array, size: Array, stride: Array = 1) -> Array:
    """All-gather to `moved` bytes per device, or reduce-scatter from them: a ring over all members.

    Each device passes on moved (size - 1) / size bytes; the slowest tier decides. A ring takes size - 1 steps.
    """
    slowest: Array = 0.0
    latency: Array = 0.0
    for tier, below, factor in fabric.steps(size, stride):
        used = factor > 1
        slowest = np.maximum(slowest, used / (tier.bandwidth * below))
        latency = latency + used * (factor - 1) * tier.latency
    return moved * (size - 1) / size * slowest + latency + fabric.start


def reduce_seconds(fabric: Fabric, moved: Array, size: Array, stride: Array = 1) -> Array:
    """All-reduce of `moved` bytes: a ring (reduce-scatter, then all-gather) or a tree, whichever is faster."""
    slowest: Array = 0.0
    ring: Array = 0.0
    tree: Array = 0.0
    for tier, below, factor in fabric.steps(size, stride):
        used = factor > 1
        slowest = np.maximum(slowest, used / (tier.bandwidth * below))
        ring = ring + used * 2 * (factor - 1) * tier.latency
        # Trees join nodes; inside one, NCCL keeps to rings.
        hops = np.where(below > 1, np.ceil(np.log2(np.maximum(factor, 1))), factor - 1)
        tree = tree + used * 2 * hops * tier.latency
    return 2 * moved * (size - 1) / size * slowest + np.minimum(ring, tree) + fabric.start


def exchange_seconds(fabric: Fabric, moved: Array, size: Array, stride: Array = 1, *, copies: int = 0) -> Array:
    """All-to-all in which each device sends `moved` bytes, one part to every member (itself included).

    Tiers work side by side, so the slowest decides. Where each token goes to `copies` members and crosses to a node
    once, however many of them are there (DeepEP), the network carries (1 - (1 - 1/nodes)^copies) nodes / copies of it.
    """
    slowest: Array = 0.0
    latency: Array = 0.0
    for tier, below, factor in fabric.steps(size, stride):
        part = (factor - 1) * below / size  # of what a device sends, the part that leaves by this tier
        if copies:
            part = part * np.where(below > 1, factor * (1 - (1 - 1 / factor) ** copies) / copies, 1.0)
        slowest = np.maximum(slowest, part / tier.bandwidth)
        latency = latency + (factor > 1) * tier.latency
    return moved * slowest + latency + fabric.start


def send_seconds(fabric: Fabric, moved: Array, distance: Array) -> Array:
    """A message to the device `distance` further on."""
    bandwidth: Array = fabric.tiers[-1].bandwidth
    latency: Array = fabric.tiers[-1].latency
    for tier in reversed(fabric.tiers[:-1]):
        inside = distance < tier.span
        bandwidth = np.where(inside, tier.bandwidth, bandwidth)
        latency = np.where(inside, tier.latency, latency)
    return moved / bandwidth + latency
