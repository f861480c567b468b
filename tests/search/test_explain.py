"""Explanations against the estimate they explain, and what would help against jobs changed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import meshwright as mw
from meshwright.cost.estimate import Estimate, estimate
from meshwright.errors import InputError, UnknownName
from meshwright.plans import Offload
from meshwright.search.explanation.bottleneck import limit_of, small_products, stage_limits
from meshwright.search.explanation.explain import explain, losses, runners_up
from meshwright.search.explanation.features import choices, spans_of
from meshwright.search.explanation.improvements import helps, on_batch, variations
from meshwright.search.explanation.time_breakdown import GROUPS, Spending, differences
from meshwright.search.planner import Answer, plan
from meshwright.search.space.headroom import with_memory
from meshwright.search.space.targets import TARGETS, limits_for, target

PLANS: list[dict[str, Any]] = [
    {"zero": 3, "recompute": "full"},
    {"tp": 2, "pp": 2},
    {"pp": 4, "virtual": 2, "recompute": "selective"},
    {"tp": 2, "ring": 2, "zero": 1},
    {"ulysses": 4, "zero": 3, "offload": {"activations": 0.5}},
]


def job_of(model: str = "llama3-8b", cluster: str = "8xh100", batch: int = 64, seq: int = 8192) -> mw.Job:
    return mw.Job(mw.Model.preset(model), mw.Cluster.preset(cluster), batch, seq)


def priced(degrees: dict[str, Any], job: mw.Job | None = None) -> Estimate:
    job = job or job_of()
    return estimate(job, mw.Plan.of(degrees, job))


@pytest.fixture(scope="module")
def answer() -> Answer:
    return plan(job_of())


@pytest.mark.parametrize("degrees", PLANS, ids=str)
def test_groups_add_up_to_the_step(degrees: dict[str, Any]) -> None:
    found = priced(degrees)
    spent = Spending.of(found)
    assert set(spent.groups) == set(GROUPS)
    assert sum(spent.groups.values()) == pytest.approx(found.step_seconds, rel=1e-6)
    assert sum(spent.parts.values()) == pytest.approx(found.step_seconds, rel=1e-6)
    assert sum(spent.exposed.values()) == pytest.approx(spent.groups["communication"])
    computing = found.breakdown["forward compute"] + found.breakdown["backward compute"]
    assert spent.groups["compute"] == pytest.approx(computing)
    assert spent.groups["bubble"] == found.breakdown.get("pipeline bubble", 0.0)


def test_the_bubble_of_equal_stages_is_the_closed_form() -> None:
    """1F1B of p groups and m micro-batches waits (p - 1) / (m + p - 1) of its time."""
    job = mw.Job(mw.Model.preset("gpt3-175b"), mw.Cluster.preset("16x8xh100"), 16, 2048)
    found = priced({"tp": 8, "pp": 16, "sp": True}, job)
    assert Spending.of(found).part("bubble") == pytest.approx(15 / 31, rel=0.1)


def test_no_bubble_by_hand() -> None:
    found = priced({"pp": 4, "zero": 1})
    gain = {h.change: h.gain for h in helps(found, 0.3)}["no bubble"]
    bubble = found.breakdown["pipeline bubble"]
    assert gain == pytest.approx(bubble / (found.step_seconds - bubble))


@pytest.mark.parametrize(
    ("degrees", "job", "name", "words"),
    [
        ({"pp": 8}, job_of(batch=8), "bubble", "wait"),
        ({"zero": 3, "recompute": "full"}, job_of(), "memory", "repeats"),
        ({"tp": 8}, job_of("llama3-70b"), "memory", "short by"),
        ({"tp": 8, "ring": 2}, job_of(cluster="2x8xh100"), "links inside a node", "tensor parallel"),
        ({"tp": 1, "zero": 3}, job_of("llama3-8b", "16x1xh100", 16, 1024), "links between nodes", "ZeRO"),
    ],
    ids=["bubble", "recompute", "short", "inside", "between"],
)
def test_what_limits_a_plan(degrees: dict[str, Any], job: mw.Job, name: str, words: str) -> None:
    found = limit_of(priced(degrees, job))
    assert (found.name, words in found.text) == (name, True), found.text


def test_products_cut_small_lose_more() -> None:
    job = job_of("gpt2-medium", "4xh100", 16, 1024)
    whole, cut = (priced(degrees, job) for degrees in ({"dp": 4, "micro_batch": 4}, {"tp": 4}))
    lost = [small_products(found) / Spending.of(found).groups["compute"] for found in (whole, cut)]
    assert 0 < lost[0] < lost[1] < 1


def test_what_binds_each_device_group() -> None:
    found = priced({"pp": 4, "zero": 1})
    limits = stage_limits(found)
    assert [limit.devices for limit in limits] == [row.devices for row in found.memory]
    for limit, row, group in zip(limits, found.memory, range(4), strict=True):
        assert limit.free_bytes == row.capacity - row.total
        assert limit.largest_bytes == max(row.parameters, row.gradients, row.optimizer, row.activations)
        assert limit.busy == pytest.approx(1 - found.pipelines[0].timeline.bubble(group))
    assert any(limit.binding != "nothing" for limit in limits)


def test_a_plan_by_hand_is_priced_again_and_held_against_the_best(answer: Answer) -> None:
    found = priced({"pp": 2, "tp": 2})
    gains = {h.change: h for h in helps(found, 5.0)}
    assert gains["the best plan"].gain == pytest.approx(found.step_seconds / answer.estimate.step_seconds - 1)
    faster = next(v for v in variations(found.job) if "twice as fast" in v.change)
    again = estimate(faster.job, found.plan)
    assert gains[faster.change].gain == pytest.approx(found.step_seconds / again.step_seconds - 1)
    twice = replace(found.job, global_batch=128)
    doubled = estimate(twice, mw.Plan.of({"pp": 2, "tp": 2}, twice))
    assert gains["batch 128"].gain == pytest.approx(2 * found.step_seconds / doubled.step_seconds - 1)


def test_a_found_plan_is_searched_again(answer: Answer) -> None:
    found = explain(answer.estimate.job, answer.plan, seconds=5.0)
    more = with_memory(answer.estimate.job, lambda memory: memory + 8 * 2**30)
    best = plan(more).estimate.step_seconds
    gains = {h.change: h.gain for h in found.helps}
    assert gains["8 GiB more per device"] == pytest.approx(answer.estimate.step_seconds / best - 1)
    assert "the best plan" not in gains
    assert [h.gain for h in found.helps] == sorted((h.gain for h in found.helps), reverse=True)
    assert found.to_table()["seconds"] == found.spending.groups


def test_what_does_not_fit_is_told_what_would() -> None:
    found = explain(
        job_of("llama3-70b", "8x8xh100", 128), priced({"tp": 2}, job_of("llama3-70b", "8x8xh100", 128)).plan
    )
    assert "short by" in found.limit.text
    assert found.helps[0].text.startswith("the best plan: fits")


def test_no_seconds_no_search(answer: Answer) -> None:
    assert explain(answer.estimate.job, answer.plan, seconds=0).helps == ()


def test_a_doubled_batch_is_a_valid_plan() -> None:
    found = priced({"pp": 4, "virtual": 2})
    twice = on_batch(found.plan, 128)
    assert twice is not None
    assert mw.Plan.of(twice.to_table()) == twice
    assert on_batch(found.plan, 96) is None


def test_losses_name_what_is_lost() -> None:
    best, piped = priced({"zero": 3}), priced({"pp": 8})
    assert losses(best, piped).startswith("pipeline bubble +")
    assert losses(best, best) == "nothing"
    assert sum(part for _, part in differences(best, piped)) == pytest.approx(
        piped.step_seconds / best.step_seconds - 1, abs=1e-6
    )


def test_runners_up_are_of_another_kind(answer: Answer) -> None:
    found = runners_up(answer, seconds=5.0)
    assert 2 <= len(found) <= 3
    assert len({runner.plan.pipelines for runner in found} | {answer.plan.pipelines}) == len(found) + 1
    assert all(runner.slower > 0 and runner.loses != "nothing" for runner in found)
    assert [r.slower for r in found] == sorted(r.slower for r in found)
    for runner in found:
        if runner.kind == "no pipeline":
            assert choices(runner.plan)["pp"] == "1"
        if runner.kind == "ZeRO-3":
            assert {span.zero for span in spans_of(runner.plan)} == {3}


def test_runners_up_keep_the_users_limits() -> None:
    found = plan(job_of(), fix={"tp": 2}, forbid=["pp"])
    for runner in runners_up(found, seconds=3.0):
        assert {span.tp for span in spans_of(runner.plan)} == {2}
        assert choices(runner.plan)["pp"] == "1"
    assert runners_up(found, most=0) == ()


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_gets_what_it_can_run(name: str) -> None:
    limits = limits_for(name, {}, ["idle"])
    found = plan(job_of(), target(name).runtime, fix=limits.fixed, forbid=limits.forbidden)
    spans, pipeline = list(spans_of(found.plan)), found.plan.pipelines[0]
    if name != "meshwright":
        assert all(isinstance(span.recompute, str) for span in spans)
    if name == "megatron":
        assert all(span.zero <= 1 and span.offload == Offload() for span in spans)
        assert pipeline.schedule.name in {"1f1b", "interleaved"}
    if name in {"fsdp", "deepspeed"}:
        assert len(pipeline.stages) == 1
        assert all(span.tp == span.ring == 1 and span.zero != (1 if name == "fsdp" else -1) for span in spans)


def test_targets_refuse_what_they_cannot_run() -> None:
    with pytest.raises(UnknownName, match="megatron"):
        target("megatronn")
    with pytest.raises(InputError, match="zero3"):
        limits_for("megatron", {"zero": 3}, [])
    with pytest.raises(InputError, match="zbv"):
        limits_for("megatron", {"schedule": "zbv"}, [])
    assert limits_for("fsdp", {"tp": 1}, []).fixed == {"tp": 1}
