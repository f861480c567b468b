"""Parts of the optimizer states on the host, inside the search: against every part, and as memory grows."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import msgspec
import pytest

import meshwright as mw
from meshwright.cost.estimate import estimate
from meshwright.cost.memory.device_memory import plan_memory
from meshwright.cost.runtime import RUNTIMES
from meshwright.plans.strategy import Offload
from meshwright.search.exact.plan_builder import plan_of
from meshwright.search.exact.solve import Search
from meshwright.search.space.headroom import with_memory
from meshwright.search.space.limits import Limits

OURS = RUNTIMES["meshwright"]
CONFIG = {
    "model_type": "llama", "vocab_size": 8000, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 4096, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


def tight(cluster: str, part: float, host: float, tied: bool = False) -> mw.Job:
    """A job whose devices hold this part of what training needs without the host."""
    model = mw.Model.from_config({**CONFIG, "tie_word_embeddings": tied}, name="small")
    job = mw.Job(model, mw.Cluster.preset(cluster), global_batch=8, seq_len=512)
    need = plan_memory(mw.Plan.of({"dp": 1, "micro_batch": 1}, replace(job, cluster=mw.Cluster.preset("1xh100"))))[
        0
    ].total
    (group,) = job.cluster.groups
    device = replace(group.device, memory=int(1e9 + part * (need - 1e9) / job.cluster.devices))
    group = replace(group, device=device, host_memory=int(host))
    return replace(job, cluster=replace(job.cluster, groups=(group,)))


def searched(job: mw.Job, fixed: dict[str, object]) -> Search:
    limits = Limits.of(fixed, ["adaptive", "hybrid", "park", "mixed"])
    search = Search(job, OURS, limits)
    search.run()
    return search


@pytest.mark.parametrize("host", [64e9, 1.2e9])
@pytest.mark.parametrize("part", [0.45, 0.6, 0.75, 0.9])
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_equals_every_part_on_one_group(part: float, micro_batch: int, host: float) -> None:
    job = tight("1xh100", part, host)
    search = searched(job, {"micro_batch": micro_batch, "zero": 0})
    best = float("inf")
    for k, parameters, recompute in product(range(129), (0.0, 1.0), ("none", "selective", "full")):
        if k == 0 and parameters:
            continue
        plan = mw.Plan.of({"dp": 1, "micro_batch": micro_batch, "recompute": recompute}, job)
        away = Offload(optimizer=k / 128, parameters=parameters)
        found = estimate(job, _with_offload(plan, [away]))
        best = min(best, found.step_seconds if found.fits else best)
    assert search.limit == pytest.approx(best, rel=1e-12)


def _with_offload(plan: mw.Plan, away: list[Offload]) -> mw.Plan:
    (pipeline,) = plan.pipelines
    stages = tuple(
        msgspec.structs.replace(stage, spans=tuple(msgspec.structs.replace(span, offload=one) for span in stage.spans))
        for stage, one in zip(pipeline.stages, away, strict=True)
    )
    return msgspec.structs.replace(plan, pipelines=(msgspec.structs.replace(pipeline, stages=stages),))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("part", [0.5, 0.7, 0.85])
def test_two_groups_have_what_is_best_for_both(part: float, tied: bool) -> None:
    """Against the same plan with other parts on the host: none that fits is faster; and the figure is the estimate's."""
    job = tight("2xh100", part, 64e9, tied)
    search = searched(job, {"pp": 2, "schedule": "1f1b", "micro_batch": 1, "zero": 0})
    plan = plan_of(job, search.best[0], search.modes)
    assert estimate(job, plan).step_seconds == pytest.approx(search.limit, rel=1e-14)
    parameters = plan.pipelines[0].stages[0].spans[0].offload.parameters
    for first, second in product(range(0, 129, 8), repeat=2):
        away = [Offload(optimizer=k / 128, parameters=parameters) for k in (first, second)]
        found = estimate(job, _with_offload(plan, away))
        assert not found.fits or found.step_seconds >= search.limit * (1 - 1e-12)


def test_more_memory_is_never_slower() -> None:
    """In small steps, from where nothing fits to where nothing is on the host."""
    found = [
        searched(tight("2xh100", 0.02 * step, 64e9), {"pp": 2, "micro_batch": 1, "zero": 0, "schedule": "1f1b"}).limit
        for step in range(18, 62)
    ]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) > 20


@pytest.mark.parametrize("batch", [16, 32])
def test_a_mixture_that_hardly_fits(batch: int) -> None:
    """Parameters on the host leave room for optimizer states: bounds must not take those to be away."""
    job = mw.Job(mw.Model.preset("mixtral-8x7b"), mw.Cluster.preset("8xa100-40gb"), global_batch=batch, seq_len=1024)
    found = []
    for factor in (1.0, 1.1, 1.3):
        search = Search(with_memory(job, lambda memory, f=factor: int(f * memory)), OURS)
        search.run()
        found.append(search.limit)
    assert found == sorted(found, reverse=True)
