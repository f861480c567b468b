"""Layers with ways of their own: real chain problems, solved twice, and plans that are faster for it."""

from __future__ import annotations

import pytest

import meshwright as mw
from meshwright.cost.estimate import estimate
from meshwright.cost.runtime import RUNTIMES
from meshwright.plans.rules import check
from meshwright.search.exact.solve import Search
from meshwright.search.planner import plan
from meshwright.search.refine.chain import solve
from meshwright.search.refine.layers import best_layered, instance_of, layered, ways_of
from meshwright.search.refine.milp import solve_milp
from meshwright.search.space.limits import Limits


def searched(model: str, cluster: str, batch: int, precision: str, fix: dict[str, object], forbid: list[str]) -> Search:
    job = mw.Job(mw.Model.preset(model), mw.Cluster.preset(cluster), global_batch=batch, precision=precision)
    search = Search(job, RUNTIMES["meshwright"], Limits.of(fix, forbid))
    search.run()
    return search


@pytest.mark.parametrize(
    ("model", "cluster", "precision", "stages"),
    [("gpt2-medium", "4xrtx4090", "bf16", 2), ("vit-huge", "2x4xtitan-xp", "fp32", 2)],
)
def test_highs_proves_the_same_optimum_of_real_jobs(model: str, cluster: str, precision: str, stages: int) -> None:
    search = searched(model, cluster, 32, precision, {"pp": stages, "schedule": "gpipe"}, ["offload"])
    instance = instance_of(search, search.best[0], ways_of(search, search.best[0], 4))
    ours = solve(instance)
    assert ours is not None
    theirs = solve_milp(instance, time_limit=120)
    assert theirs.gap <= 1e-6
    assert ours.value == pytest.approx(theirs.value, rel=1e-6)


def test_layers_choose_for_themselves_where_memory_is_tight() -> None:
    search = searched("llama3-8b", "8xa100-40gb", 64, "bf16", {"pp": 1}, ["offload"])
    found = layered(search, search.best[0])
    assert found is not None
    check(found, search.job)
    priced = estimate(search.job, found)
    assert priced.fits
    better = best_layered(search)
    assert (better is not None) == (priced.step_seconds < search.limit * (1 - 1e-5))
    assert priced.step_seconds < 1.05 * search.limit
    best = plan(search.job, fix={"pp": 1}, forbid=["offload"]).estimate.step_seconds
    assert best <= min(search.limit, priced.step_seconds * (1 + 2e-5))


def test_the_open_solver_plans_too() -> None:
    job = mw.Job(mw.Model.preset("gpt2-medium"), mw.Cluster.preset("4xrtx4090"), global_batch=32)
    ours, theirs = (plan(job, solver=solver, time_limit=60, fix={"pp": 2}) for solver in ("exact", "milp"))
    assert theirs.plan.search is not None
    assert theirs.plan.search["solver"] == "milp"
    assert theirs.estimate.step_seconds == pytest.approx(ours.estimate.step_seconds, rel=1e-6)
