"""Steps that are left out, beside a plain reading of the rule."""

from __future__ import annotations

import math
import random

import pytest

import meshwright as mw
from meshwright.run.optimizers.loss_spike import LossSpikeGuard


def curve(steps: int, noise: float, seed: int) -> list[float]:
    """A loss as it falls."""
    stream = random.Random(seed)
    return [2.0 + 8.0 * math.exp(-step / 60) + stream.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.3])
def test_a_falling_loss_is_taken_as_it_is(noise: float) -> None:
    for seed in range(20):
        guard = LossSpikeGuard()
        assert all(guard.judge(loss) for loss in curve(1000, noise, seed))


def test_the_mean_and_deviation_are_those_of_the_last_steps() -> None:
    stream = random.Random(1)
    guard, losses = LossSpikeGuard(), [3.0 + stream.gauss(0, 0.2) for _ in range(2000)]
    assert all(guard.judge(loss) for loss in losses)
    assert guard.mean == pytest.approx(3.0, abs=0.1)
    assert guard.deviation == pytest.approx(0.2, rel=0.3)


@pytest.mark.parametrize("at", [20, 50, 400])
def test_a_spike_is_left_out_and_forgotten(at: int) -> None:
    for seed in range(20):
        guard, losses = LossSpikeGuard(), curve(500, 0.1, seed)
        losses[at] += 15.0  # while a loss falls fast its deviation is large
        assert [guard.judge(loss) for loss in losses] == [step != at for step in range(500)]


def test_nothing_is_judged_before_twenty_good_steps() -> None:
    guard = LossSpikeGuard()
    assert all(guard.judge(loss) for loss in [1.0] * 10 + [50.0] + [1.0] * 9)


def test_another_level_is_accepted_after_five() -> None:
    guard = LossSpikeGuard()
    found = [guard.judge(loss) for loss in [2.0, 2.1] * 20 + [6.0, 6.1] * 20]
    assert found == [True] * 40 + [False] * 5 + [True] * 35
    assert guard.mean == pytest.approx(6.05, abs=0.05)


def test_what_is_no_number_is_never_taken() -> None:
    guard = LossSpikeGuard()
    assert not any(guard.judge(loss) for loss in [math.nan, math.inf, -math.inf] * 10)
    assert guard == LossSpikeGuard()


def test_a_run_leaves_a_spike_out(monkeypatch: pytest.MonkeyPatch) -> None:
    job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("1xcpu"), 4, seq_len=32, precision="fp32")
    plan = mw.Plan.of({"micro_batches": 2}, job)
    calls = iter([True, False, True, True])
    monkeypatch.setattr(LossSpikeGuard, "judge", lambda self, loss: next(calls))
    found = [event.get("skipped") for event in mw.train(plan, steps=4) if event["event"] == "step"]
    assert found == [None, "spike", None, None]
    events = mw.train(plan, steps=4, guard=False)  # nobody is asked: there is no answer left
    assert not any("skipped" in event for event in events)
