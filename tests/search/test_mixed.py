"""Clusters of different devices: against the best a single kind can do, and the best that treats all devices alike."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import pytest

import meshwright as mw
from meshwright.cost.estimate import estimate
from meshwright.errors import MeshwrightError
from meshwright.plans import Pipeline, Stage
from meshwright.plans.rules import check
from meshwright.plans.spans import device_text, layers_of
from meshwright.search.explanation.runners_up import runners_up
from meshwright.search.planner import NothingFits, plan

CASES = [
    ("llama3-8b", "2x8xa100-80gb+2x8xh100", 256, "bf16"),
    ("gpt3-6.7b", "1x8xa100-40gb+2x8xv100-32gb", 128, "fp16"),
    ("gpt3-13b", "2x8xascend-910a+2x8xascend-910b", 128, "fp16"),
]


def alike(job: mw.Job) -> float:
    """The best of uniform plans over all devices, as if they were equal: what a planner for one kind would run."""
    best = float("inf")
    for tp, pp, zero, recompute in product((1, 2, 4, 8), (1, 2, 4), (0, 1, 3), ("none", "selective", "full")):
        for micro_batch in (1, 2, 4):
            short = {"tp": tp, "pp": pp, "zero": zero, "recompute": recompute, "micro_batch": micro_batch}
            try:
                found = estimate(job, mw.Plan.of(short, job))
            except MeshwrightError:
                continue
            if found.fits:
                best = min(best, found.step_seconds)
    return best


@pytest.mark.parametrize(("model", "cluster", "batch", "precision"), CASES)
def test_faster_than_treating_all_alike(model: str, cluster: str, batch: int, precision: str) -> None:
    job = mw.Job(
        mw.Model.preset(model), mw.Cluster.preset(cluster), global_batch=batch, seq_len=2048, precision=precision
    )
    answer = plan(job)
    check(answer.plan, job)
    assert answer.estimate.fits
    assert answer.plan.search is not None
    assert answer.plan.search["gap"] == 0
    assert alike(job) > 1.2 * answer.estimate.step_seconds
    for group in job.cluster.groups:  # never worse than one kind alone
        one = replace(job, cluster=mw.Cluster(group.device.name, (group,)))
        try:
            alone = plan(one).estimate.step_seconds
        except MeshwrightError:
            continue
        assert answer.estimate.step_seconds <= alone * (1 + 1e-9)


def test_faster_devices_get_more_samples() -> None:
    job = mw.Job(
        mw.Model.preset("llama3-8b"), mw.Cluster.preset("2x8xa100-80gb+2x8xh100"), global_batch=256, seq_len=4096
    )
    batches = {job.cluster.group_index(p.stages[0].ranks[0]): p.batch for p in plan(job).plan.pipelines}
    assert batches[1] > batches[0] > 0
    assert sum(batches.values()) == 256


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "forbid"),
    [
        ("gpt2-large", "1x6xh100+1x8xa100-80gb", 16, ["pp"]),
        ("llama3.2-1b", "1x3xh100+1x4xa100-80gb", 16, ["pp", "tp", "ring", "ulysses"]),
    ],
)
def test_no_other_shares_are_faster(model: str, cluster: str, batch: int, forbid: list[str]) -> None:
    """Every share of the batch, each kind planned on its own; a share may have divisors that the batch has not."""
    job = mw.Job(mw.Model.preset(model), mw.Cluster.preset(cluster), global_batch=batch, seq_len=1024)
    found = plan(job, forbid=forbid).estimate.step_seconds
    alone: dict[tuple[int, int], tuple[Pipeline, ...]] = {(0, 0): (), (1, 0): ()}
    for i, group in enumerate(job.cluster.groups):
        for share in range(1, batch + 1):
            one = replace(job, cluster=mw.Cluster(group.device.name, (group,)), global_batch=share)
            alone[i, share] = shifted(plan(one, forbid=forbid).plan, job.cluster.first_rank(i))
    for share in range(batch + 1):
        together = mw.Plan(job=job.written(), pipelines=alone[0, share] + alone[1, batch - share])
        check(together, job)
        assert found <= estimate(job, together).step_seconds * (1 + 1e-9)


def shifted(found: mw.Plan, first: int) -> tuple[Pipeline, ...]:
    """The pipelines of a plan on devices that begin at another number."""

    def moved(stage: Stage) -> Stage:
        return msgspec.structs.replace(stage, devices=device_text([rank + first for rank in stage.ranks]))

    return tuple(msgspec.structs.replace(p, stages=tuple(map(moved, p.stages))) for p in found.pipelines)


def test_a_pipeline_across_kinds_where_no_kind_can_hold_the_model() -> None:
    job = mw.Job(
        mw.Model.preset("llama2-13b"), mw.Cluster.preset("1x2xa100-40gb+1x2xh100"), global_batch=32, seq_len=2048
    )
    for group in job.cluster.groups:
        with pytest.raises(MeshwrightError, match="does not fit"):
            plan(replace(job, cluster=mw.Cluster(group.device.name, (group,))), forbid=["offload"])
    answer = plan(job, forbid=["offload"])
    check(answer.plan, job)
    assert answer.estimate.fits
    (pipeline,) = answer.plan.pipelines
    kinds = [{job.cluster.group_index(rank) for rank in stage.ranks} for stage in pipeline.stages]
    assert {0} in kinds
    assert {1} in kinds
    layers = [sum(len(layers_of(job.model, span.layers)) for span in stage.spans) for stage in pipeline.stages]
    held = [sum(n for n, kind in zip(layers, kinds, strict=True) if kind == {i}) for i in (0, 1)]
    assert held[1] > 1.5 * held[0]  # twice the memory and three times the speed
    assert answer.plan.search is not None
    assert not answer.optimal
    assert 0 < answer.plan.search["bound"] < answer.estimate.step_seconds


def test_a_pipeline_across_kinds_beats_one_that_treats_them_alike() -> None:
    """The same kinds and stages with as many blocks in each, every uniform grid."""
    job = mw.Job(
        mw.Model.preset("llama2-13b"), mw.Cluster.preset("1x2xa100-40gb+1x2xh100"), global_batch=32, seq_len=2048
    )
    assert alike(job) > 1.2 * plan(job, forbid=["offload"]).estimate.step_seconds


def test_runners_up_where_a_kind_has_no_plan_of_that_sort() -> None:
    job = mw.Job(
        mw.Model.preset("llama2-13b"), mw.Cluster.preset("1x4xa100-80gb+1x2xh100"), global_batch=64, seq_len=2048
    )
    answer = plan(job)
    for other in runners_up(answer, seconds=3):
        check(other.plan, job)
        assert other.estimate.fits


def test_what_comes_closest_stands_on_its_own_devices() -> None:
    job = mw.Job(
        mw.Model.preset("llama2-13b"), mw.Cluster.preset("1x2xa100-40gb+1x2xh100"), global_batch=64, seq_len=4096
    )
    with pytest.raises(NothingFits) as caught:
        plan(job, forbid=["offload"])
    closest = caught.value.closest
    assert closest is not None
    check(closest, job)
    short = [row for row in estimate(job, closest).memory if row.short_by]
    assert max(row.short_by for row in short) == caught.value.short_by_bytes
    assert {row.capacity for row in short} == {job.cluster.groups[1].device.memory}


@pytest.mark.parametrize(
    "limits", [{"fix": {"pp": 1}}, {"fix": {"pp": 2}}, {"forbid": ["stagewise"]}, {"forbid": ["idle"]}]
)
def test_pipelines_across_kinds_keep_the_limits(limits: dict[str, Any]) -> None:
    """Without limits the best plan of this job is a pipeline of three stages across both kinds."""
    job = mw.Job(
        mw.Model.preset("llama2-13b"), mw.Cluster.preset("1x2xa100-40gb+1x2xh100"), global_batch=64, seq_len=4096
    )
    found = plan(job, **limits).plan
    groups = [len(pipeline.stages) // pipeline.schedule.virtual for pipeline in found.pipelines]
    if "fix" in limits:
        assert set(groups) == {limits["fix"]["pp"]}
    elif "stagewise" in limits["forbid"]:
        for pipeline in found.pipelines:
            assert len({span.recompute for stage in pipeline.stages for span in stage.spans}) <= 2
            assert len({job.cluster.group_index(rank) for stage in pipeline.stages for rank in stage.ranks}) == 1
    else:
        assert found.devices == job.cluster.devices
