"""Groups on real devices: counted from the numbers of the devices, whatever their order."""

from __future__ import annotations

from typing import Any

import pytest

import meshwright as mw
from meshwright.cost.estimate import estimate
from meshwright.cost.layers.collectives import Fabric
from meshwright.cost.layers.rank_groups import counts, group, halves, placement
from meshwright.plans import Span

CLUSTER = mw.Cluster.preset("4x8xh100")
FABRIC = Fabric.of(CLUSTER.groups[0])


def test_groups_of_an_axis() -> None:
    span = Span(layers="all", tp=2, ring=2, dp=4)
    assert group(span, ("tp",)) == [0, 1]
    assert group(span, ("ring",)) == [0, 2]
    assert group(span, ("dp",)) == [0, 4, 8, 12]
    assert group(span, ("ulysses", "ring", "dp")) == [0, 2, 4, 6, 8, 10, 12, 14]


@pytest.mark.parametrize(
    ("ranks", "inside"),
    [
        (range(8), 8),
        (range(7, -1, -1), 8),  # backwards
        (range(4, 12), 4),  # across two nodes
        ([0, 1, 8, 9, 16, 17, 24, 25], 2),
        (range(0, 32, 4), 2),
        ([0, 1, 2, 3, 4, 5, 6, 8], 1),  # one sits apart
    ],
)
def test_members_that_a_node_joins(ranks: Any, inside: int) -> None:
    assert counts(CLUSTER, tuple(ranks), list(range(8)), FABRIC) == (inside, 8)


def test_axes_that_are_not_adjacent() -> None:
    """dp inside, ring outside: replicas are pairs side by side, 16 devices apart from the next pair."""
    span = Span(layers="all", dp=2, tp=4, ring=4, order=("dp", "tp", "ulysses", "ring"))
    assert group(span, ("ulysses", "ring", "dp")) == [0, 1, 8, 9, 16, 17, 24, 25]
    assert placement(CLUSTER, span, tuple(range(32)), FABRIC).ring == (1, 4)


def test_hybrid_groups() -> None:
    assert halves((8, 32), 8, 32) == ((8, 8), (1, 4))
    assert halves((8, 32), 4, 32) == ((4, 4), (2, 8))
    assert halves((8, 32), 16, 32) == ((8, 16), (1, 2))


def price(devices: str, **plan: Any) -> float:
    job = mw.Job(mw.Model.preset("llama3-8b"), CLUSTER, 8, 4096)
    stages = [{"layers": "embed..head", "devices": devices, **plan}]
    return estimate(job, mw.Plan.of({"stages": stages}, job), "megatron").breakdown["tp"]


def test_scattered_devices_pay_for_the_network() -> None:
    near = price("0-7", tp=8)
    assert price("7,6,5,4,3,2,1,0", tp=8) == pytest.approx(near)
    assert price("4-11", tp=8) > 1.2 * near  # four adapters at once
    assert price("0-1,8-9,16-17,24-25", tp=8) > 2.5 * near


def test_spans_of_one_stage_take_their_own_shares() -> None:
    """Half of the layers with dp 8, half with tp 8: between the two pure plans, not eight times as many samples."""
    job = mw.Job(mw.Model.preset("llama3-8b"), mw.Cluster.preset("1x8xh100"), 64, 4096)
    pure = [mw.Plan.of({**how, "micro_batches": 8, "zero": 0}, job) for how in ({"dp": 8}, {"tp": 8})]
    table = pure[0].to_table()
    spans = [
        plan.to_table()["pipelines"][0]["stages"][0]["spans"][0] | {"layers": layers}
        for plan, layers in zip(pure, ("embed..block.15", "block.16..head"), strict=True)
    ]
    table["pipelines"][0]["stages"][0]["spans"] = spans
    first, second, mixed = (
        estimate(job, mw.Plan.of(p, None), "megatron") for p in (*(x.to_table() for x in pure), table)
    )
    low, high = sorted((first.step_seconds, second.step_seconds))
    assert 0.95 * low < mixed.step_seconds < 1.05 * high
    assert mixed.breakdown["relayout"] > 0


def test_the_slower_group_decides_whichever_comes_first() -> None:
    seconds = []
    for text in ("2x8xh100+2x8xa100", "2x8xa100+2x8xh100"):
        job = mw.Job(mw.Model.preset("llama3-8b"), mw.Cluster.preset(text), 32, 2048)
        seconds.append(estimate(job, mw.Plan.of({"dp": 32, "zero": 0}, job), "megatron").step_seconds)
    assert seconds[0] == pytest.approx(seconds[1], rel=0.02)
