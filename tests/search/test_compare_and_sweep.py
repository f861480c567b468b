"""Two plans side by side, and many jobs at once."""

from __future__ import annotations

import pytest

import meshwright as mw
from meshwright.cost.estimate import estimate
from meshwright.errors import InputError
from meshwright.search.explanation.compare import compare
from meshwright.search.explanation.sweep import on_nodes, sweep
from meshwright.search.planner import plan

JOB = mw.Job(mw.Model.preset("llama3-8b"), mw.Cluster.preset("8xh100"), 64, 8192)


def test_what_differs_is_shown_and_adds_up() -> None:
    first, second = (estimate(JOB, mw.Plan.of(d, JOB)) for d in ({"zero": 3}, {"tp": 2, "pp": 2}))
    found = compare(first, second)
    assert found.job == ()
    assert {"pp", "tp", "dp", "zero"} <= {row.name for row in found.choices}
    assert sum(row.second - row.first for row in found.time) == pytest.approx(second.step_seconds - first.step_seconds)
    assert found.gain == pytest.approx(first.step_seconds / second.step_seconds - 1)
    assert compare(first, first).choices == ()
    assert "equally fast" in compare(first, first).verdict


def test_jobs_of_other_batches_are_compared_by_tokens() -> None:
    twice = mw.Job(JOB.model, JOB.cluster, 128, 8192)
    first, second = (estimate(job, mw.Plan.of({"zero": 3}, job)) for job in (JOB, twice))
    found = compare(first, second)
    assert [(row.name, row.first, row.second) for row in found.job] == [("global_batch", "64", "128")]
    assert abs(found.gain) < 0.1


def test_a_sweep_plans_every_combination() -> None:
    points = sweep(JOB.model, JOB.cluster, [32, 64], [4096, 8192], [1, 2])
    assert [(p.nodes, p.job.seq_len, p.job.global_batch) for p in points] == [
        (n, s, b) for n in (1, 2) for s in (4096, 8192) for b in (32, 64)
    ]
    for point in points:
        assert point.best
        assert point.best.step_seconds == pytest.approx(plan(point.job).estimate.step_seconds)
        hours = point.devices * point.best.step_seconds / 3600 * 1e9 / point.job.tokens_per_step
        assert point.device_hours == pytest.approx(hours)
        assert point.to_table(2.0)["dollars_per_billion_tokens"] == pytest.approx(2 * hours)
    worth = [p for p in points if p.worth_it]
    assert max(points, key=lambda p: p.tokens_per_second) in worth
    assert min(points, key=lambda p: p.device_hours) in worth
    for a in worth:
        assert not any(
            b.tokens_per_second > a.tokens_per_second and b.device_hours < a.device_hours for b in points if b is not a
        )


def test_what_does_not_fit_is_a_row() -> None:
    points = sweep(mw.Model.preset("llama3-70b"), mw.Cluster.preset("1xh100"), [8], [8192])
    assert [(p.best, p.problem, p.worth_it) for p in points] == [(None, "no plan fits", False)]
    assert points[0].to_table()["fits"] is False


def test_nodes_of_any_cluster_with_one_group() -> None:
    assert on_nodes(JOB.cluster, 1) is JOB.cluster
    assert on_nodes(JOB.cluster, 4) == mw.Cluster.preset("4x8xh100")
    own = mw.Cluster.from_table({"group": [{"device": "a100-80gb", "nodes": 2, "memory_gib": 76}]})
    more = on_nodes(own, 3)
    assert more.devices == 24
    assert mw.Cluster.load(more.reference) == more
    with pytest.raises(InputError, match="several groups"):
        on_nodes(mw.Cluster.preset("8xh100+8xa100-80gb"), 2)
