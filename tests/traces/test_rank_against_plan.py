"""Runs that are exactly what the cost model promised, and runs with one known distortion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meshwright.cost.estimate import Estimate
from meshwright.plans import Plan
from meshwright.traces.job.plan.against_plan import Against, compare
from meshwright.traces.job.plan.predicted import REST, Promise, promised
from tests.traces.jobs import Collective, Compute, Host, Op, Recv, Send, Step, as_facts, simulate

KERNELS = {
    "products": "sm90_gemm_bf16", "attention": "flash_fwd_kernel", "norms": "rms_norm_kernel",
    REST: "elementwise_kernel", "optimizer": "multi_tensor_apply_kernel",
}  # fmt: skip
JOB = {"model": "llama3-8b", "cluster": "2xh100", "global_batch": 16, "seq_len": 4096}
STEPS = 4
Stretch = Callable[[int, str], float]  # (group, class of operators or part) -> by how much it takes longer


def as_planned(group: int, name: str) -> float:
    return 1.0


def run(found: Estimate, promises: tuple[Promise, ...], stretch: Stretch) -> list[list[Op]]:
    """The first pipeline of a plan with one rank per device, action by action."""
    (time,) = found.pipelines
    every = tuple(rank for promise in promises for rank in promise.devices)
    last = len(promises) - 1
    programs: list[list[Op]] = []
    for promise in promises:
        group, mine = promise.group, [event for event in time.timeline.events if event.group == promise.group]
        total = sum(seconds for name, seconds in promise.classes.items() if name != "optimizer")
        whole = sum(event.end - event.start for event in mine)
        program: list[Op] = []
        for number in range(STEPS):
            program += [Step(number), Host(round(1e9 * promise.parts["host"] * stretch(group, "host")))]
            for event in mine:
                ahead = event.kind == "F"
                source, to = (group - 1, group + 1) if ahead else (group + 1, group - 1)
                program += [Recv(source)] if 0 <= source <= last else []
                for name, seconds in promise.classes.items():
                    if name != "optimizer":
                        part = seconds * (event.end - event.start) / whole * stretch(group, name)
                        program.append(Compute(round(1e9 * part), KERNELS[name]))
                program += [Send(to)] if 0 <= to <= last else []
            moved = promise.parts["exposed"] * stretch(group, "exposed")
            program.append(Collective(every, round(1e9 * moved), elements=1 << 28))
            program.append(
                Compute(round(1e9 * promise.classes["optimizer"] * stretch(group, "optimizer")), KERNELS["optimizer"])
            )
        assert total > 0
        programs += [program] * len(promise.devices)
    return programs


def seen(how: dict[str, Any], stretch: Stretch = as_planned) -> tuple[Against, tuple[Promise, ...]]:
    plan = Plan.of({**JOB, **how})
    found, promises = promised(plan)
    return compare(as_facts(simulate(run(found, promises, stretch))), plan), promises


PLANS = [{"pp": 2, "recompute": "full", "micro_batches": 8}, {"dp": 2, "zero": 2, "recompute": "full"}]


@pytest.mark.parametrize("how", PLANS)
def test_a_run_as_promised(how: dict[str, Any]) -> None:
    found, promises = seen(how)
    assert found.step.measured == pytest.approx(found.step.predicted, rel=0.02)
    assert found.suggestions == ()
    assert found.notes == ()
    assert [group.ranks for group in found.groups] == [promise.devices for promise in promises]
    for group in found.groups:
        assert sum(pair.predicted for pair in group.parts) == pytest.approx(found.step.predicted)
        assert sum(pair.measured for pair in group.parts) == pytest.approx(found.step.measured, rel=0.02)
        for pair in (*group.parts, *group.classes):
            assert pair.measured == pytest.approx(pair.predicted, abs=0.02 * found.step.predicted)
        assert sum(pair.predicted for pair in group.classes) == pytest.approx(group.parts[0].predicted)


@pytest.mark.parametrize("how", PLANS)
def test_slow_products(how: dict[str, Any]) -> None:
    found, _ = seen(how, lambda group, name: 1 / 0.71 if name == "products" else 1.0)
    assert found.suggestions[0].startswith("products run at 71 % of the speed".replace(" %", "%"))
    assert "meshwright measure" in found.suggestions[0]
    assert not any("attention" in text for text in found.suggestions)
    assert found.step.ratio > 1.15


def test_a_slow_stage() -> None:
    """The last stage, with the head, takes longer by plan; then it takes another 20 %."""
    found, promises = seen(PLANS[0], lambda group, name: 1.2 if group == 1 and name not in ("host", "exposed") else 1.0)
    first, second = (promise.parts["compute"] for promise in promises)
    over, meant = 1.2 * second / first - 1, second / first - 1
    assert found.suggestions[0] == (
        f"stage 1 computes {over:.0%} longer than the others (planned: {meant:+.0%}): move a layer away from it"
    )
    assert not any("products" in text for text in found.suggestions)


def test_slow_links_and_hosts() -> None:
    found, promises = seen(PLANS[1], lambda group, name: 12.0 if name == "exposed" else 1.0)
    assert found.suggestions[0].startswith("exposed communication takes")
    found, promises = seen(PLANS[1], lambda group, name: 0.3 * 5 / promises[0].parts["host"] if name == "host" else 1.0)
    assert found.suggestions[0].startswith("devices wait for their hosts")


def test_missing_ranks_and_other_plans() -> None:
    plan = Plan.of({**JOB, **PLANS[0]})
    found, promises = promised(plan)
    facts = as_facts(simulate(run(found, promises, as_planned)))
    told = compare(facts[:1], plan)
    assert told.notes == ("no trace of the stage 1",)
    assert [group.group for group in told.groups] == [0]
    assert compare([], plan).step.measured == 0


@pytest.mark.parametrize("world", [2, None])
def test_a_plan_of_another_job_is_not_compared(world: int | None) -> None:
    """Neither ratios nor advice: they would mean nothing. Without a recorded size the ranks tell."""
    plan = Plan.of({**JOB, **PLANS[0]})
    facts = [replace(one, world_size=world) for one in as_facts(simulate(run(*promised(plan), as_planned)))]
    small = Plan.of({**JOB, "cluster": "1xh100", "recompute": "full"})
    large = Plan.of({**JOB, "cluster": "4x8xh100", "global_batch": 64, "dp": 32, "zero": 2, "recompute": "full"})
    seen = "a job of 2 ranks" if world else "rank 1"
    told = compare(facts, small)
    assert told.notes == (
        f"the traces tell of {seen}, the plan of 1 device: is it this run's plan? They are not compared",
    )
    assert (told.groups, told.suggestions) == ((), ())
    if world:
        told = compare(facts, large)
        assert (told.groups, told.suggestions) == ((), ())
        assert "a job of 2 ranks, the plan of 32 devices" in told.notes[0]
