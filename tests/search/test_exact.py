"""The search equals brute force: every plan of a small job's space, built as a document and priced by `estimate`."""

from __future__ import annotations

from dataclasses import replace
from math import isinf
from random import Random

import pytest

import meshwright as mw
from meshwright.cost.estimate import estimate
from meshwright.cost.memory.device_memory import plan_memory
from meshwright.cost.runtime import RUNTIMES
from meshwright.plans.rules import check
from meshwright.search.exact.plan_builder import plan_of
from meshwright.search.exact.solve import Search
from meshwright.search.space.limits import Limits
from tests.search.brute import best

OURS = RUNTIMES["meshwright"]


def small_model(random: Random, blocks: int) -> mw.Model:
    hidden = random.choice([512, 1024, 2048])
    config = {
        "model_type": "llama", "vocab_size": random.choice([4000, 32000]), "hidden_size": hidden,
        "num_hidden_layers": blocks, "num_attention_heads": 8, "num_key_value_heads": random.choice([2, 8]),
        "intermediate_size": 4 * hidden, "max_position_embeddings": 8192,
        "tie_word_embeddings": random.random() < 0.3,
    }  # fmt: skip
    return mw.Model.from_config(config, name="small")


def with_memory(job: mw.Job, memory: float) -> mw.Job:
    group = job.cluster.groups[0]
    groups = (replace(group, device=replace(group.device, memory=int(memory))),)
    return replace(job, cluster=replace(job.cluster, groups=groups))


def small_case(seed: int) -> tuple[mw.Job, Limits]:
    """A job with tight or ample memory, and restrictions that leave tens to hundreds of plans."""
    random = Random(seed)
    pipelined = random.random() < 0.6
    cluster = mw.Cluster.preset(random.choice(["2xa100-80gb", "2x1xh100", "2xrtx4090", "4xa100-80gb", "2x2xh100"]))
    model = small_model(random, random.choice([1, 1, 2]) if pipelined else random.choice([1, 2, 3]))
    job = mw.Job(model, cluster, global_batch=random.choice([2, 4]), seq_len=random.choice([1024, 4096]))
    fixed: dict[str, object] = {"pp": 2 if pipelined else 1, "ulysses": 1, "micro_batch": 1}
    fixed["zero"] = random.choice([0, 1, 2, 3])
    if pipelined:
        fixed["schedule"] = random.choice(["gpipe", "1f1b", "zero-bubble", "zbv", "interleaved", "dualpipev"])
        fixed["ring"] = 1
        fixed["tp"] = random.choice([1, cluster.devices // 2])
    forbidden = ["adaptive", "hybrid", "offload"]
    if pipelined and (random.random() < 0.4 or len(model.blocks) > 1):
        forbidden.append("mixed")
    # From less than anything needs to more than enough.
    usual = mw.Plan.of({"dp": 1, "micro_batch": 1}, replace(job, cluster=mw.Cluster.preset("1xh100")))
    need = (plan_memory(usual)[0].total - 1e9) / (2 if pipelined else 1)
    return with_memory(job, 1e9 + random.choice([0.4, 0.6, 0.8, 0.9, 1.001, 1.2, 2.0]) * need), Limits.of(
        fixed, forbidden
    )


@pytest.mark.parametrize("seed", range(200))
def test_equals_brute_force(seed: int) -> None:
    job, limits = small_case(seed)
    search = Search(job, OURS, limits)
    search.run()
    expected, priced = best(job, search.modes, limits) if limits.allows("mixed") else _unmixed(job, search, limits)
    assert priced > 0 or isinf(search.limit)
    if isinf(expected):
        assert not search.best
        return
    assert search.limit == pytest.approx(expected, rel=1e-12)
    plan = plan_of(job, search.best[0], search.modes)
    check(plan, job)
    priced_plan = estimate(job, plan)
    assert priced_plan.fits
    assert priced_plan.step_seconds == pytest.approx(search.limit, rel=1e-14)


def _unmixed(job: mw.Job, search: Search, limits: Limits) -> tuple[float, int]:
    """Brute force over one mode at a time; groups may still differ, so all of them are tried together."""
    from tests.search import brute

    ways = brute.stage_ways
    try:
        brute.stage_ways = lambda model, span, ranges, modes: (  # type: ignore[assignment]
            found for found, _ in zip(ways(model, span, ranges, modes), modes, strict=False)
        )
        return brute.best(job, search.modes, limits)
    finally:
        brute.stage_ways = ways


def test_small_cases_are_worth_solving() -> None:
    """Some do not fit, some fit only with recomputation, some use pipelines."""
    kinds = {"none": 0, "tight": 0, "ample": 0}
    for seed in range(60):
        job, limits = small_case(seed)
        search = Search(job, OURS, limits)
        search.run()
        if not search.best:
            kinds["none"] += 1
            continue
        free = Search(with_memory(job, 1e13), OURS, limits)
        free.run()
        kinds["tight" if search.limit > free.limit * (1 + 1e-9) else "ample"] += 1
    assert min(kinds.values()) >= 3, kinds
