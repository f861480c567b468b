"""Clusters of different devices: against the best a single kind can do, and the best that treats all devices alike."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

import meshwright as mw
from meshwright.cost.estimate import estimate
from meshwright.errors import MeshwrightError
from meshwright.plan.rules import check
from meshwright.search.planner import plan

CASES = [
    ("llama3-8b", "2x8xa100-80gb+2x8xh100", 256, "bf16"),
    ("gpt3-6.7b", "1x8xa100-40gb+2x8xv100-32gb", 128, "fp16"),
    ("gpt3-6.7b", "2x8xascend-910a+2x8xascend-910b", 128, "fp16"),
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
