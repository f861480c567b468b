"""Rank groups of each axis of a stage, and how many of their members each tier of links joins."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import numpy as np

from meshwright.clusters import Cluster
from meshwright.cost.layers.collectives import Counts, Fabric
from meshwright.cost.layers.layer import Placement
from meshwright.plans import Span
from meshwright.plans.strategy import Axis

REPLICAS: tuple[Axis, ...] = ("ulysses", "ring", "dp")  # axes whose devices hold the same dense parameters
_MOST = 10**6  # spans in a node, more than can exist


def stride(span: Span, axis: Axis) -> int:
    """Return the distance in positions between two neighbours along an axis."""
    return prod(getattr(span, inner) for inner in span.order[: span.order.index(axis)])


def group(span: Span, axes: tuple[Axis, ...]) -> list[int]:
    """Return the positions in the stage of the first group along some axes.

    >>> group(Span(layers="all", tp=2, dp=4), ("dp",))
    [0, 2, 4, 6]
    """
    ordered = [axis for axis in reversed(span.order) if axis in axes]
    steps = [[i * stride(span, axis) for i in range(getattr(span, axis))] for axis in ordered]
    return [sum(parts) for parts in product(*steps)]


def counts(cluster: Cluster, ranks: tuple[int, ...], positions: list[int], fabric: Fabric) -> Counts:
    """Return the fewest members that one span of each tier joins, over this group and the last of its kind."""
    if len(positions) == 1:
        return (1,) * len(fabric.tiers)
    fewest = [len(positions)] * len(fabric.tiers)
    every = np.asarray(ranks)
    for start in {0, len(ranks) - 1 - positions[-1]}:
        members = every[start + np.asarray(positions)]
        for t, tier in enumerate(fabric.tiers[:-1]):
            fewest[t] = min(fewest[t], _fewest(cluster, members, tier.span))
    return tuple(fewest)


def _fewest(cluster: Cluster, members: np.ndarray, span: int) -> int:
    """Return the fewest members that a span of a tier holds; spans that fit into a node are counted inside it."""
    starts = np.array([cluster.first_rank(i) for i in range(len(cluster.groups))])
    sizes = np.array([group.devices_per_node for group in cluster.groups])
    home = np.searchsorted(starts, members, side="right") - 1
    inside, size = members - starts[home], sizes[home]
    places = np.where(span <= size, inside // size * _MOST + inside % size // span, inside // span)
    return int(np.unique(home * _MOST**2 + places, return_counts=True)[1].min())


def placement(cluster: Cluster, span: Span, ranks: tuple[int, ...], fabric: Fabric) -> Placement:
    """Return the axes of a span on the real devices of its stage."""

    def of(*axes: Axis) -> Counts:
        return counts(cluster, ranks, group(span, axes), fabric)

    experts = counts(cluster, ranks, [span.etp * i for i in range(span.ep)], fabric)
    return Placement(of("tp"), of("ulysses"), of("ring"), experts)


def replicas(cluster: Cluster, span: Span, ranks: tuple[int, ...], fabric: Fabric) -> tuple[Counts, Counts]:
    """Return the devices that hold the same dense parameters, and those that hold the same experts."""
    dense = counts(cluster, ranks, group(span, REPLICAS), fabric)
    step = span.ep * span.etp
    return dense, counts(cluster, ranks, [step * i for i in range(span.expert_replicas)], fabric)


def halves(whole: Counts, shards: Any, size: Any) -> tuple[Counts, Counts]:
    """Return a group cut into hybrid groups of adjacent members: the members inside one, and across them."""
    inside = tuple(np.minimum(count, shards) for count in whole)
    return inside, (*(np.maximum(count // shards, 1) for count in whole[:-1]), size // shards)
