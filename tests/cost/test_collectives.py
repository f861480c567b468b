"""Collectives: against arithmetic by hand, and against a ring simulated hop by hop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.clusters import Cluster
from meshwright.cost.constants import DEFAULT
from meshwright.cost.layers.collectives import (
    Fabric,
    Tier,
    exchange_seconds,
    gather_seconds,
    reduce_seconds,
    send_seconds,
)

FREE = Fabric((Tier(8, 400e9, 0.0), Tier(10**9, 50e9, 0.0)))  # 8 devices at 400 GB/s, adapters of 50 GB/s


def ring(parts: list[float], links: list[float]) -> float:
    """All-gather on a ring, step by step: in each of n - 1 steps every device passes one part to its neighbour."""
    count = len(parts)
    at = [0.0] * count  # when each device holds the part it passes on next
    held = list(range(count))
    for _ in range(count - 1):
        arrive = [at[i] + parts[held[i]] / links[i] for i in range(count)]
        at = [max(arrive[i - 1], arrive[i]) for i in range(count)]
        held = [held[i - 1] for i in range(count)]
    return max(at)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_gather_inside_a_node_is_a_ring(size: int) -> None:
    whole = 8e9
    expected = ring([whole / size] * size, [400e9] * size)
    assert gather_seconds(FREE, whole, size) == pytest.approx(expected)
    assert reduce_seconds(FREE, whole, size) == pytest.approx(2 * expected)


@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_between_nodes_every_member_brings_its_adapter(nodes: int) -> None:
    """One ring per rail: eight rings of an eighth of the bytes, each crossing nodes on an adapter of its own."""
    whole, size = 8e9, 8 * nodes
    links = [50e9 if i % 8 == 7 else 400e9 / 8 for i in range(size)]  # eight rings share NVLink; one adapter each
    one_rail = ring([whole / 8 / size] * size, links)
    assert gather_seconds(FREE, whole, size) == pytest.approx(one_rail, rel=0.02)


def test_groups_with_one_member_per_node_have_one_adapter() -> None:
    """Tensor parallelism inside the node: each of its eight replicas' groups crosses on one adapter."""
    assert gather_seconds(FREE, 1e9, 4, 8) == pytest.approx(1e9 * 3 / 4 / 50e9)
    assert gather_seconds(FREE, 1e9, 8, 4) == pytest.approx(1e9 * 7 / 8 / 100e9)  # two members per node: two adapters


@given(st.integers(1, 6), st.integers(0, 4), st.floats(1e3, 1e10))
def test_all_to_all_counts_what_leaves_by_each_tier(log_size: int, log_stride: int, moved: float) -> None:
    """Against a count of every pair of members."""
    size, stride = 2**log_size, 2**log_stride
    members = [i * stride for i in range(size)]
    inside = sum(1 for other in members[1:] if other // 8 == 0) * moved / size / 400e9
    outside = sum(1 for other in members[1:] if other // 8 != 0) * moved / size / 50e9
    assert exchange_seconds(FREE, moved, size, stride) == pytest.approx(max(inside, outside))


def test_a_token_crosses_to_a_node_once() -> None:
    """8 copies of a token over 4 nodes of 8: it has experts on 4 (1 - (3/4)^8) nodes, of which one is its own."""
    plain = exchange_seconds(FREE, 1e9, 32)
    once = exchange_seconds(FREE, 1e9, 32, copies=8)
    assert once / plain == pytest.approx(4 * (1 - 0.75**8) / 8)
    draws = np.random.default_rng(0).integers(0, 4, size=(20000, 8))
    others = np.mean([len(set(row) - {0}) for row in draws])
    assert once == pytest.approx(others / 8 * 1e9 / 50e9, rel=0.02)


def test_messages_take_the_link_they_cross() -> None:
    """Devices 4 and 8 are as far apart as 0 and 4, but on different nodes."""
    cluster, exact = Cluster.preset("2x8xh100"), replace(DEFAULT, nvlink=1.0, network=1.0, hop=0.0)
    times = [send_seconds(cluster, 1e9, a, b, exact) for a, b in ((0, 4), (4, 8), (0, 0))]
    assert times == pytest.approx([1e9 / 450e9, 1e9 / 50e9, 0])


def test_trees_beat_rings_where_latency_rules() -> None:
    slow = Fabric((Tier(8, 400e9, 1e-6, tree=False), Tier(10**9, 50e9, 10e-6)))
    assert reduce_seconds(slow, 1e3, 256, 8) == pytest.approx(2 * 8 * 10e-6, rel=1e-2)  # one member per node
    small = reduce_seconds(slow, 1e3, 8 * 256)
    assert small == pytest.approx(
        2 * 7 * 1e-6 + 2 * 8 * 10e-6, rel=1e-2
    )  # up and down: 7 in the node, log2(256) between


def test_shared_adapters_are_shared() -> None:
    """Two adapters of 12.5 GB/s for eight devices: each device gets an eighth of both."""
    link = {"kind": "ethernet", "topology": "shared", "bandwidth_gb_s": 12.5, "aggregate_gb_s": 25, "latency_us": 1}
    inner = {"kind": "nvlink", "topology": "all-to-all", "bandwidth_gb_s": 300, "latency_us": 1, "span": 8}
    table = {"group": [{"device": "a100", "nodes": 2, "devices_per_node": 8, "link": [inner, link]}]}
    exact = replace(DEFAULT, network=1.0, nvlink=1.0)
    fabric = Fabric.of(Cluster.from_table(table).groups[0], exact)
    assert [tier.bandwidth for tier in fabric.tiers] == [300e9, 25e9 / 8]


def test_arrays_give_what_numbers_give() -> None:
    sizes, strides = np.array([1, 2, 8, 16, 64]), np.array([1, 4, 1, 8, 2])
    for collective in (gather_seconds, reduce_seconds, exchange_seconds):
        together = collective(FREE, 1e8, sizes, strides)
        apart = [collective(FREE, 1e8, int(n), int(s)) for n, s in zip(sizes, strides, strict=True)]
        assert together == pytest.approx(apart)
