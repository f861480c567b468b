"""Bounds and batch simulation against the event simulation of `cost/`, which is held against closed forms."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from meshwright.cost.step.pipeline import StageTimes, durations, ends, simulate
from meshwright.plans.action_table import _walked, action_table, in_flight
from meshwright.plans.schedule import Schedule
from meshwright.search.bounds.step_time import alive, least_ends, most_alive, warm_up

SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero-bubble", 1),
    ("zbv", 2),
    ("dualpipev", 2),
]


def pipelines(name: str) -> Iterator[tuple[int, int]]:
    """Groups and micro-batches that a schedule allows."""
    for p in range(2, 8):
        for m in range(1, 24):
            if not (name == "dualpipev" and m < 2 * p) and not (name == "interleaved" and m % max(1, m // p)):
                yield p, m


def random_times(stages: int, seed: int) -> StageTimes:
    rng = np.random.default_rng(seed)
    count = 12
    forward = rng.uniform(0.5, 1.5, (count, stages))
    backward = forward * rng.uniform(1.0, 3.0, (count, stages))
    weight = backward * rng.uniform(0, 0.6, (count, stages))
    send = rng.uniform(0, 0.2, (count, stages - 1))
    return StageTimes(forward, backward, weight, send, send * (rng.random((count, 1)) < 0.5))


@pytest.mark.parametrize(("name", "virtual"), SCHEDULES)
@pytest.mark.parametrize(("groups", "micro_batches"), [(2, 4), (3, 9), (4, 8), (4, 20), (6, 12)])
def test_batch_simulation_and_bounds(name: str, virtual: int, groups: int, micro_batches: int) -> None:
    schedule = Schedule(name=name, virtual=virtual)  # type: ignore[arg-type]
    times = random_times(groups * virtual, groups * micro_batches)
    found = ends(schedule, groups, micro_batches, times)
    seconds, delay = durations(times)
    table = action_table(schedule, groups, micro_batches)
    for i in range(len(found)):
        timeline = simulate(
            table, lambda a, i=i: float(seconds[a[1]][i, a[0]]), lambda a, b, i=i: float(delay[i, min(a, b)])
        )
        assert tuple(found[i]) == timeline.ends
    bound = least_ends(schedule, groups, micro_batches, times)
    assert (bound <= found * (1 + 1e-12)).all()
    assert (bound.max(axis=1) > 0.7 * found.max(axis=1)).all()  # a bound that says something


def test_gpipe_bound_is_exact() -> None:
    """Sum of all stages and links, and m - 1 times the slowest forward and backward (UniAP's objective, both passes)."""
    times = random_times(5, 3)
    schedule = Schedule(name="gpipe")
    found = ends(schedule, 5, 7, times).max(axis=1)
    seconds, delay = durations(times)
    by_hand = (seconds["F"] + seconds["B"]).sum(axis=1) + 2 * delay.sum(axis=1)
    by_hand += 6 * (seconds["F"].max(axis=1) + seconds["B"].max(axis=1))
    assert found == pytest.approx(by_hand)
    assert least_ends(schedule, 5, 7, times).max(axis=1) == pytest.approx(found)


@pytest.mark.parametrize(("name", "virtual"), [*SCHEDULES, ("interleaved", 4)])
def test_warm_up_in_closed_form(name: str, virtual: int) -> None:
    schedule = Schedule(name=name, virtual=virtual)  # type: ignore[arg-type]
    for p, m in pipelines(name):
        first, counts = warm_up(schedule, p, m)
        for g, row in enumerate(action_table(schedule, p, m)):
            before = list(row[: next(i for i, a in enumerate(row) if a[1] != "F")])
            assert first[g] == row[len(before)][0]
            assert counts[:, g].tolist() == [sum(a[0] == s for a in before) for s in range(p * virtual)]


@pytest.mark.parametrize(("name", "virtual"), [("zero-bubble", 1), ("zbv", 2), ("1f1b", 1), ("dualpipev", 2)])
def test_what_is_in_flight(name: str, virtual: int) -> None:
    schedule = Schedule(name=name, virtual=virtual)  # type: ignore[arg-type]
    for p in range(2, 7):
        for m in range(2 * p, 20):
            per_stage = alive(schedule, p, m)
            for g in range(p):
                mixes = in_flight(schedule, p, m, g)
                assert set(mixes) == set(_walked(schedule, p, m, g))
                mine = [s for s in range(p * virtual) if s in ({g, 2 * p - 1 - g} if virtual == 2 else {g})]
                assert any(all(n >= per_stage[s] for n, s in zip(mix, mine, strict=True)) for mix in mixes)


@pytest.mark.parametrize("virtual", [2, 3, 5])
def test_what_is_in_flight_of_virtual_stages(virtual: int) -> None:
    schedule = Schedule(name="interleaved", virtual=virtual)
    for p in range(2, 7):
        for m in (m for m in range(1, 30) if m % max(1, m // p) == 0):
            for g in range(p):
                assert set(in_flight(schedule, p, m, g)) == set(_walked(schedule, p, m, g))


@pytest.mark.parametrize(("name", "virtual"), [*SCHEDULES, ("interleaved", 7)])
def test_no_group_ever_holds_more(name: str, virtual: int) -> None:
    schedule = Schedule(name=name, virtual=virtual)  # type: ignore[arg-type]
    for p, m in pipelines(name):
        held = [max(map(sum, in_flight(schedule, p, m, group))) for group in range(p)]
        assert (np.array(held) <= most_alive(schedule, p, m)).all()
