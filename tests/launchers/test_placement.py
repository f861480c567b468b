"""Ranks at the plan's devices: against counting by hand, and against loops over groups, nodes and devices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.errors import InputError
from meshwright.launchers.placement import alike, in_words, placement
from tests.launchers.plans import UNLIKE, using

KINDS = ("cpu", "a100-80gb", "v100-32gb", "h100")


def places(plan: mw.Plan) -> list[tuple[int, int, int, int]]:
    return [(p.device, p.group, p.node, p.local) for p in placement(plan.resolve(), plan)]


def test_two_kinds_of_nodes_all_in_use() -> None:
    plan = using("2x8xa100-80gb+4x8xv100-32gb", list(range(48)))
    found = places(plan)
    assert [found[rank] for rank in (0, 7, 8, 15, 16, 23, 24, 47)] == [
        (0, 0, 0, 0), (7, 0, 0, 7), (8, 0, 1, 0), (15, 0, 1, 7), (16, 1, 0, 0), (23, 1, 0, 7), (24, 1, 1, 0), (47, 1, 3, 7),
    ]  # fmt: skip
    assert [(a.group, a.nodes, a.locals, a.first_node, a.first_rank) for a in alike(plan.resolve(), plan)] == [
        (0, 2, tuple(range(8)), 0, 0), (1, 4, tuple(range(8)), 2, 16),
    ]  # fmt: skip


def test_idle_devices_idle_nodes_and_parts_of_nodes() -> None:
    """Node 0 from its fifth device on, node 1 not at all, node 2 whole, one device of the other kind."""
    plan = using("3x8xh100+2x4xa100-80gb", [4, 5, 6, 7, *range(16, 24), 29])
    found = places(plan)
    assert found[0] == (4, 0, 0, 4)
    assert found[4] == (16, 0, 2, 0)
    assert found[12] == (29, 1, 1, 1)
    job = plan.resolve()
    assert [in_words(job, some) for some in alike(job, plan)] == [
        "ranks 0-3: 1 node of 8 h100, devices 4-7 of it",
        "ranks 4-11: 1 node of 8 h100",
        "rank 12: 1 node of 4 a100-80gb, device 1 of it",
    ]


def test_a_plan_of_several_pipelines_and_strided_stages() -> None:
    """Two stages over every other device: the order of stages does not matter, that of devices does."""
    job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("2x2xcpu"), 4, seq_len=32, precision="fp32")
    stages = [{"layers": "embed..block.1", "devices": "1-3/2"}, {"layers": "block.2..head", "devices": "0-2/2"}]
    plan = mw.Plan.of({"stages": stages, "micro_batches": 2}, job)
    assert places(plan) == [(0, 0, 0, 0), (1, 0, 0, 1), (2, 0, 1, 0), (3, 0, 1, 1)]
    assert len(alike(job, plan)) == 1


def test_an_unlike_plan_of_the_other_tests() -> None:
    plan = mw.Plan.of(UNLIKE)
    assert places(plan) == [(0, 0, 0, 0), (1, 0, 0, 1), (3, 1, 0, 1)]


def test_swaps_find_their_peer_where_nodes_differ_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 6 to 9 are a node of four after one of six: rank 7 is its second device."""
    from types import SimpleNamespace

    from meshwright.run.parallel.apply import _places

    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("1x6xh100+1x4xh100"), 4, seq_len=32)
    parts = ("embed..block.0", "block.1..block.2", "block.3..head")
    stages: list[dict[str, Any]] = [
        {"layers": part, "devices": d} for part, d in zip(parts, ("0", "7", "8"), strict=True)
    ]
    stages[2]["swap"] = {"to": 1, "activations": 0.5}
    pipeline = mw.Plan.of({"stages": stages, "micro_batches": 4}, job).pipelines[0]
    how: Any = SimpleNamespace(ranks={device: device for device in range(10)}, device="cuda:2", me=8)
    (place,) = _places(how, pipeline, pipeline.stages[2].spans[0], 0)
    assert place.device == "cuda:1"
    how.ranks = {**how.ranks, 7: 5}
    with pytest.raises(InputError, match="another node"):
        _places(how, pipeline, pipeline.stages[2].spans[0], 0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_part_of_any_cluster(data: st.DataObject) -> None:
    groups = data.draw(
        st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from(KINDS)), min_size=1, max_size=3)
    )
    every = [(g, n, i) for g, (nodes, size, _) in enumerate(groups) for n in range(nodes) for i in range(size)]
    used = sorted(data.draw(st.sets(st.integers(0, len(every) - 1), min_size=1)))
    plan = using("+".join(f"{nodes}x{size}x{kind}" for nodes, size, kind in groups), used)
    assert places(plan) == [(device, *every[device]) for device in used]
    job, unfolded = plan.resolve(), []
    for some in alike(job, plan):
        assert some.first_rank == len(unfolded)
        assert some.size == groups[some.group][1]
        unfolded += [(some.group, local) for _ in range(some.nodes) for local in some.locals]
    assert unfolded == [(every[device][0], every[device][2]) for device in used]
    nodes = sum(some.nodes for some in alike(job, plan))
    assert nodes == len({every[device][:2] for device in used})
