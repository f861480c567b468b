"""The critical path of jobs whose path is known from how they were made."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.traces.job.across import across
from meshwright.traces.job.critical_path import OWN, CriticalPath, critical_paths
from meshwright.traces.rank.facts import RankFacts, digest
from meshwright.traces.reading import read_trace
from tests.traces.jobs import (
    Collective,
    Compute,
    Host,
    Join,
    Op,
    Recv,
    Send,
    Step,
    as_facts,
    data_parallel,
    pipelined,
    simulate,
)

few = settings(deadline=None, max_examples=15)


def paths(programs: list[list[Op]], skew: int = 0) -> tuple[CriticalPath, ...]:
    facts = as_facts(simulate(programs), hosts=lambda rank: f"node{rank}", clock=lambda rank, time: time + rank * skew)
    found = critical_paths(facts, across(facts))
    for path in found:
        whole(path)
    return found


def whole(path: CriticalPath) -> None:
    """Without gaps, and everything adds up."""
    for one, following in zip(path.segments[:-1], path.segments[1:], strict=True):
        assert one.end == following.start
    assert sum(one.end - one.start for one in path.segments) == path.length
    assert sum(ns for _, ns in path.by_what) == pytest.approx(path.length, abs=len(path.by_what))
    assert all(0 <= one.computing <= one.end - one.start for one in path.segments)


@few
@given(st.lists(st.integers(100_000, 3_000_000), min_size=12, max_size=12, unique=True), st.sampled_from([0, 10**9]))
def test_each_stretch_is_held_by_the_rank_that_came_last(made: list[int], skew: int) -> None:
    """Between two collectives that block, the slowest rank is the path."""
    found = paths(data_parallel(4, 3, lambda rank, step: made[rank * 3 + step], transfer=200_000), skew)
    for step, path in enumerate(found):
        slowest = max(range(4), key=lambda rank: made[rank * 3 + step])
        longest = made[slowest * 3 + step] + 100_000
        own = [one for one in path.segments if one.what == OWN]
        assert [(one.rank, one.end - one.start, one.computing) for one in own] == [(slowest, longest, longest)] * 2
        assert path.length == 2 * (longest + 200_000)
        assert path.by_rank == ((slowest, 2 * longest),)
        assert dict(path.by_what)["all_reduce of mesh_dp"] == 400_000
        assert dict(path.by_what)["normalisation"] == pytest.approx(200_000, abs=2)


def test_what_is_hidden_is_not_on_the_path() -> None:
    """Only the last collective outlasts computing; the others run beside it."""
    (path,) = paths(data_parallel(3, 1, lambda rank, step: 1_000_000 + rank * 1000, overlap=True, layers=4))
    assert [one.what for one in path.segments] == [OWN, "all_reduce of mesh_dp"]
    assert path.segments[0].rank == 2
    assert path.length == 4 * (1_002_000 + 100_000) + 200_000


def test_a_host_that_is_late_is_idle_time_of_the_path() -> None:
    (path,) = paths(data_parallel(3, 1, host=lambda rank, step: 700_000 if rank == 1 else 0))
    assert path.by_rank[0][0] == 1
    assert dict(path.by_what)["idle"] == 700_000


@few
@given(st.integers(2, 4), st.integers(1, 5), st.sampled_from(["gpipe", "1f1b"]))
def test_through_a_pipeline(stages: int, batches: int, schedule: str) -> None:
    """With a flush at the end every step's path is as long as the step, and goes through computing alone."""
    found = paths(pipelined(stages, batches, 2, schedule, flush=True))
    for path in found:
        assert path.length == (batches + stages - 1) * 3_000_000
        assert dict(path.by_what).get("idle", 0) == 0
        assert dict(path.by_what)["product"] == path.length


def test_times_that_are_coarse() -> None:
    """What follows a collective begins 250 ns before it ends, as times of microseconds since the epoch may tell."""
    ranks = simulate(data_parallel(4, 3, lambda rank, step: 1_200_000 if rank == 1 else 1_000_000))
    for rank in ranks:
        for event in rank.events:
            if "Group size" in event.args:
                event.end += 250
    facts = as_facts(ranks)
    for path in critical_paths(facts, across(facts)):
        whole(path)
        assert {rank for rank, _ in path.by_rank} == {1}
        assert dict(path.by_what)["all_reduce of mesh_dp"] == pytest.approx(400_000, abs=1000)
        assert path.length == pytest.approx(2 * (1_300_000 + 200_000), abs=1000)


def test_a_step_that_is_begun_late() -> None:
    """All wait for the host of rank 1, which loads data before each step but the first."""
    programs = data_parallel(3, 4)
    programs[1] = [part for op in programs[1] for part in ([Host(700_000), op] if isinstance(op, Step) else [op])]
    programs[1] = programs[1][1:]
    first, *others = paths(programs)
    assert first.length == 2 * (1_100_000 + 200_000)
    for path in others:
        assert path.by_rank[0] == (1, 700_000 + 1_100_000)  # after the first collective all are alike
        assert dict(path.by_what)["idle"] == 700_000
        assert path.length == first.length + 700_000


def test_from_the_last_end_of_the_step() -> None:
    """The first stage is ready long before the second, and begins the next step when that one does."""
    programs: list[list[Op]] = []
    for rank in range(4):
        pair, program = (rank // 2 * 2, rank // 2 * 2 + 1), list[Op]()
        for step in range(3):
            reduce = Collective(pair, 1_000_000, description="dp")
            if rank < 2:
                program += [Step(step), Compute(4_000_000), Send(rank + 2, 100_000), Join(), reduce, Join()]
                program += [Host(6_000_000)]
            else:
                program += [Step(step), Recv(rank - 2, 100_000), Compute(6_000_000), reduce, Join()]
        programs.append(program)
    facts = as_facts(simulate(programs), hosts=lambda rank: "node")
    for path in critical_paths(facts, across(facts)):
        whole(path)
        first, message, second, reduced = path.segments
        assert (first.rank, first.end - first.start, first.what) == (second.rank - 2, 4_000_000, OWN)
        assert (message.end - message.start, second.end - second.start, second.what) == (100_000, 6_000_000, OWN)
        assert (reduced.what, reduced.end - reduced.start) == ("all_reduce of dp", 1_000_000)


@pytest.fixture(scope="module")
def dlrm() -> list[RankFacts]:
    folder = Path("tests/data/traces/param/dlrm_8rank")
    return sorted((digest(read_trace(file)) for file in folder.iterdir()), key=lambda one: one.rank or 0)


def test_real_ranks(dlrm: list[RankFacts]) -> None:
    (path,) = critical_paths(dlrm, across(dlrm))
    whole(path)
    ends = [one.devices[0].windows.edges[1] + one.base_ns for one in dlrm]
    begins = [one.devices[0].windows.edges[0] + one.base_ns for one in dlrm]
    assert max(ends) - max(begins) <= path.length <= max(ends) - min(begins)
    assert {rank for rank, _ in path.by_rank} <= set(range(8))
