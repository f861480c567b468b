"""What must hold of every best plan: more of anything never makes it slower, and its price is the estimate's."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.cost.estimate import estimate
from meshwright.cost.runtime import RUNTIMES
from meshwright.errors import InputError, UnknownName
from meshwright.plans.rules import check
from meshwright.plans.spans import layers_of
from meshwright.search.exact.solve import Search
from meshwright.search.planner import NothingFits, plan
from meshwright.search.space.limits import FORBIDDABLE
from meshwright.search.space.targets import limits_for, target

MODELS = ["gpt2-medium", "llama3.2-1b", "bert-huge", "t5-large", "qwen3-30b-a3b", "llama3-8b", "vit-huge"]
SLOW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def group_changed(job: mw.Job, **change: Any) -> mw.Job:
    return replace(job, cluster=replace(job.cluster, groups=(replace(job.cluster.groups[0], **change),)))


def fastest(job: mw.Job, runtime: str = "meshwright") -> float:
    search = Search(job, RUNTIMES[runtime])
    search.run()
    return search.limit


jobs = st.builds(
    lambda model, nodes, batch: mw.Job(
        mw.Model.preset(model), mw.Cluster.preset(f"{nodes}x4xa100-40gb"), global_batch=batch
    ),
    st.sampled_from(MODELS), st.sampled_from([1, 2]), st.sampled_from([8, 16, 32]),
)  # fmt: skip


@SLOW
@given(jobs, st.sampled_from([1.2, 2.0]))
def test_more_memory_is_never_slower(job: mw.Job, factor: float) -> None:
    device = job.cluster.groups[0].device
    more = group_changed(job, device=replace(device, memory=int(device.memory * factor)))
    assert fastest(more) <= fastest(job) * (1 + 1e-12)


@SLOW
@given(jobs)
def test_more_nodes_are_never_slower(job: mw.Job) -> None:
    nodes = job.cluster.groups[0].nodes
    assert fastest(group_changed(job, nodes=nodes + 1)) <= fastest(job) * (1 + 1e-12)


@SLOW
@given(jobs)
def test_faster_links_are_never_slower(job: mw.Job) -> None:
    links = tuple(
        replace(link, bandwidth=2 * link.bandwidth, aggregate=2 * link.aggregate)
        for link in job.cluster.groups[0].links
    )
    assert fastest(group_changed(job, links=links)) <= fastest(job) * (1 + 1e-12)


@pytest.mark.parametrize("runtime", ["meshwright", "megatron", "nemo", "deepspeed"])
@pytest.mark.parametrize("model", MODELS)
def test_the_figure_is_the_estimates(model: str, runtime: str) -> None:
    """To the last digit, through the written document."""
    job = mw.Job(mw.Model.preset(model), mw.Cluster.preset("2x8xh100"), global_batch=32)
    answer = plan(job, runtime)
    written = mw.Plan.parse(answer.plan.to_json())
    check(written, job)
    again = estimate(job, written, runtime)
    assert written.estimate is not None
    assert written.search is not None
    assert again.step_seconds == answer.estimate.step_seconds == written.estimate["step_time_s"]
    assert again.fits
    assert written.search["optimal"]
    assert written.search["gap"] == 0
    assert written.search["bound"] == again.step_seconds


def test_the_same_twice() -> None:
    job = mw.Job(mw.Model.preset("llama3-8b"), mw.Cluster.preset("2x8xh100"), global_batch=64, seq_len=8192)
    first, second = (plan(job).plan for _ in range(2))
    assert first.pipelines == second.pipelines


GRID = [
    {"tp": tp, "pp": pp, "zero": zero, "recompute": recompute, "micro_batch": 1, **more}
    for tp in (1, 2, 4, 8)
    for pp in (1, 2, 4)
    for zero in (0, 1, 3)
    for recompute in ("none", "selective", "full")
    for more in ({}, {"virtual": 2}, {"schedule": "zbv"}, {"schedule": "zero-bubble"})
    if pp > 1 or not more
]


@pytest.mark.parametrize(("model", "batch", "seq"), [("llama3-8b", 32, 8192), ("gpt3-6.7b", 32, 2048)])
def test_no_plan_by_hand_is_faster(model: str, batch: int, seq: int) -> None:
    job = mw.Job(mw.Model.preset(model), mw.Cluster.preset("2x8xh100"), global_batch=batch, seq_len=seq)
    ours = plan(job).estimate.step_seconds
    tried = 0
    for short in GRID:
        try:
            found = estimate(job, mw.Plan.of(short, job))
        except InputError:
            continue
        tried += 1
        if found.fits:
            assert found.step_seconds >= ours * (1 - 1e-12), short
    assert tried > 100


def test_restrictions_are_kept() -> None:
    job = mw.Job(mw.Model.preset("llama3-8b"), mw.Cluster.preset("2x8xh100"), global_batch=64, seq_len=8192)
    answer = plan(
        job, fix={"tp": 4, "pp": 2, "zero": 1, "schedule": "1f1b", "micro_batch": 2}, forbid=["offload", "split"]
    )
    pipeline = answer.plan.pipelines[0]
    spans = [span for stage in pipeline.stages for span in stage.spans]
    assert {span.tp for span in spans} == {4}
    assert {span.zero for span in spans} == {1}
    assert len(pipeline.stages) == 2
    assert pipeline.schedule.name == "1f1b"
    assert pipeline.samples == 2 * spans[0].dp
    assert not any(span.offload.activations or span.offload.optimizer for span in spans)
    assert answer.estimate.step_seconds >= plan(job).estimate.step_seconds


@pytest.mark.parametrize("name", sorted(FORBIDDABLE))
def test_everything_can_be_forbidden(name: str) -> None:
    job = mw.Job(mw.Model.preset("qwen3-30b-a3b"), mw.Cluster.preset("2x8xh100"), global_batch=32)
    answer = plan(job, forbid=[name])
    assert answer.estimate.fits


def test_bad_restrictions_are_named() -> None:
    job = mw.Job(mw.Model.preset("gpt2"), mw.Cluster.preset("1xh100"), global_batch=8)
    with pytest.raises(UnknownName, match="offlod"):
        plan(job, forbid=["offlod"])
    with pytest.raises(UnknownName, match="tensor"):
        plan(job, fix={"tensor": 2})
    with pytest.raises(InputError, match="zero"):
        plan(job, fix={"zero": -1})


def test_what_is_short_where_nothing_fits() -> None:
    job = mw.Job(mw.Model.preset("llama3-70b"), mw.Cluster.preset("1x2xa100-40gb"), global_batch=8, seq_len=4096)
    with pytest.raises(NothingFits) as caught:
        plan(job, forbid=["offload"])
    error = caught.value
    assert error.closest is not None
    found = estimate(job, error.closest)
    assert error.short_by_bytes == max(row.short_by for row in found.memory) > 0
    assert set(error.as_json()) == {"error", "closest", "short_by_bytes", "suggestion"}
    assert "nodes" in error.suggestion


def test_a_time_limit_states_its_gap() -> None:
    job = mw.Job(mw.Model.preset("mixtral-8x7b"), mw.Cluster.preset("16x8xh100"), global_batch=512)
    hurried = plan(job, time_limit=0.0)
    assert hurried.estimate.fits
    assert hurried.plan.search is not None
    assert not hurried.plan.search["optimal"]
    assert 0 < hurried.plan.search["gap"] < 1
    assert hurried.plan.search["bound"] <= plan(job).estimate.step_seconds * (1 + 1e-12)


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "seq", "samples"),
    [
        ("llama3-8b", "8xh100", 64, 8192, 8),
        ("llama3-8b", "8xh100", 64, 8192, 32),
        ("gpt2-xl", "8xa100-40gb", 64, 1024, 1),
    ],
)
def test_a_fixed_micro_batch_holds_for_every_layer(
    model: str, cluster: str, batch: int, seq: int, samples: int
) -> None:
    job = mw.Job(mw.Model.preset(model), mw.Cluster.preset(cluster), global_batch=batch, seq_len=seq)
    found = plan(job, fix={"micro_batch": samples}).plan
    for pipeline in found.pipelines:
        for stage in pipeline.stages:
            assert all(pipeline.samples // span.dp == samples for span in stage.spans)


def test_stages_may_be_kept_even() -> None:
    job = mw.Job(mw.Model.preset("llama3-8b"), mw.Cluster.preset("2x8xrtx4090"), global_batch=64, seq_len=4096)
    free, kept = plan(job, fix={"pp": 4}), plan(job, fix={"pp": 4}, forbid=["uneven"])
    assert free.estimate.step_seconds <= kept.estimate.step_seconds
    assert kept.plan.pipelines
    for pipeline in kept.plan.pipelines:
        blocks = [
            {layer.block for span in stage.spans for layer in layers_of(job.model, span.layers) if layer.block}
            for stage in pipeline.stages
        ]
        assert len({len(some) for some in blocks}) == 1
        assert not any(a & b for a, b in pairwise(blocks))


@pytest.mark.parametrize(
    "wrong",
    [
        {"forbid": 5}, {"forbid": [1]}, {"forbid": ["nothing"]}, {"fix": 5}, {"fix": ["tp=2"]}, {"fix": {"zero": 4}},
        {"fix": {"tp": True}}, {"time_limit": float("nan")}, {"time_limit": -1}, {"time_limit": "1"},
        {"time_limit": True}, {"solver": None}, {"solver": "scip"}, {"runtime_name": None}, {"runtime_name": []},
        {"fix": {"devices": 4}, "forbid": ["idle"]},
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused(wrong: dict[str, Any]) -> None:
    job = mw.Job(mw.Model.preset("gpt2"), mw.Cluster.preset("8xh100"), global_batch=64)
    with pytest.raises(InputError):
        plan(job, **wrong)


def test_what_is_consistent_is_not_refused() -> None:
    job = mw.Job(mw.Model.preset("gpt2"), mw.Cluster.preset("8xh100"), global_batch=64)
    assert plan(job, fix={"zero": 0}, forbid="zero, offload").estimate.fits
    assert plan(job, forbid=None).estimate.fits  # type: ignore[arg-type]


@pytest.mark.parametrize("cluster", ["8xh100", "1x8xh100+1x8xa100-80gb"])
def test_headroom_stays_free(cluster: str) -> None:
    """As if devices had less memory, in a document for the devices there are."""
    job = mw.Job(mw.Model.preset("llama3-8b"), mw.Cluster.preset(cluster), global_batch=64, seq_len=8192)
    free, kept = plan(job), plan(job, headroom=0.2)
    assert kept.plan.job == free.plan.job
    check(kept.plan, job)
    assert all(row.total <= 0.8 * row.capacity for row in kept.estimate.memory)
    assert any(row.total > 0.8 * row.capacity for row in free.estimate.memory)
    assert free.estimate.step_seconds <= kept.estimate.step_seconds
    groups = [replace(g, device=replace(g.device, memory=int(0.8 * g.device.memory))) for g in job.cluster.groups]
    less = plan(replace(job, cluster=replace(job.cluster, groups=tuple(groups))))
    assert kept.plan.pipelines == less.plan.pipelines
    assert kept.estimate.step_seconds == less.estimate.step_seconds
    assert kept.plan.search is not None
    assert kept.plan.search["headroom"] == 0.2


@pytest.mark.parametrize(
    ("model", "cluster", "batch"),
    [("llama3-70b", "128x8xh100", 1024), ("mixtral-8x7b", "8x8xh100", 512), ("gpt2", "8xh100", 64)],
)
def test_a_rule_of_thumb_gives_a_plan_at_once(model: str, cluster: str, batch: int) -> None:
    job = mw.Job(mw.Model.preset(model), mw.Cluster.preset(cluster), global_batch=batch)
    seen: list[tuple[float, float]] = []
    answer = plan(job, time_limit=0.0, progress=lambda best, bound: seen.append((best, bound)))
    check(answer.plan, job)
    assert answer.estimate.fits
    assert seen[0][0] == pytest.approx(answer.estimate.step_seconds, rel=1e-9)
    assert not answer.optimal


@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "deepspeed", "fsdp"])
def test_a_framework_gets_one_way_for_all_stages(framework: str) -> None:
    job = mw.Job(mw.Model.preset("llama3-70b"), mw.Cluster.preset("8x8xh100"), global_batch=128, seq_len=8192)
    limits = limits_for(framework, {}, [])
    found = plan(job, target(framework).runtime, forbid=limits.forbidden)
    (pipeline,) = found.plan.pipelines
    ways = {msgspec.structs.replace(span, layers="") for stage in pipeline.stages for span in stage.spans}
    assert len(ways) == 1
    (way,) = ways
    assert way.swap is None
    assert way.offload.activations == 0
    assert {way.offload.optimizer, way.offload.parameters} <= {0.0, 1.0}
    free = plan(job, target(framework).runtime)
    assert free.estimate.step_seconds <= found.estimate.step_seconds


@pytest.mark.parametrize("fixed", ["tp=3", "pp=1,schedule=zbv", "devices=7,tp=8"])
def test_a_limit_that_is_in_the_way_is_named(fixed: str) -> None:
    job = mw.Job(mw.Model.preset("llama3-8b"), mw.Cluster.preset("8xh100"), global_batch=64, seq_len=4096)
    with pytest.raises(NothingFits) as caught:
        plan(job, fix=fixed)
    names = [part.split("=")[0] for part in fixed.split(",")]
    assert any(f"without {name}=" in caught.value.suggestion for name in names)


@pytest.mark.parametrize("host", [0, 2**30])
def test_a_small_host_is_as_good_as_no_offload(host: int) -> None:
    """States that would not fit on the host are no reason to leave out a grid that keeps them on the devices."""
    job = mw.Job(mw.Model.preset("llama3-8b"), mw.Cluster.preset("8xh100"), global_batch=64, seq_len=8192)
    small = group_changed(job, host_memory=host)
    assert plan(small).estimate.step_seconds == plan(job, forbid=["offload"]).estimate.step_seconds


def test_what_is_short_is_said_even_where_the_host_is_too_small_as_well() -> None:
    job = mw.Job(mw.Model.preset("qwen3-235b-a22b"), mw.Cluster.preset("8xh100"), global_batch=512)
    with pytest.raises(NothingFits) as caught:
        plan(job)
    assert caught.value.closest is not None
    assert caught.value.short_by_bytes > 0
    assert "nodes" in caught.value.suggestion
