"""The table of collectives: what each is exposed for adds up to the steps, and messages count as what they are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.traces.job.across import across
from tests.traces.jobs import Collective, Compute, Join, Op, Rank, Step, as_facts, pipelined, simulate
from tests.traces.test_job_across import sums, waits

few = settings(deadline=None, max_examples=15)


def shares_by_hand(rank: Rank, waits: list[int]) -> dict[str, list[float]]:
    """Exposed transfer and waiting by name of collective, microsecond by microsecond, in equal shares."""
    calls = sorted((event for event in rank.events if event.stream != "compute"), key=lambda event: event.start)
    computes = [event for event in rank.events if event.stream == "compute"]
    out: dict[str, list[float]] = {event.args["Collective name"]: [0.0, 0.0] for event in calls}
    for now in range(0, max(event.end for event in rank.events), 1000):
        if any(event.start <= now < event.end for event in computes):
            continue
        here = [(event, wait) for event, wait in zip(calls, waits, strict=True) if event.start <= now < event.end]
        moving = [event for event, wait in here if now >= event.start + wait]
        for event in moving or [event for event, _ in here]:
            out[event.args["Collective name"]][0 if moving else 1] += 1000 / len(moving or here)
    return out


@few
@given(st.lists(st.integers(1, 40), min_size=12, max_size=12))
def test_calls_at_the_same_moment_share_it(made: list[int]) -> None:
    """Two groups on two streams: together they are exposed no longer than there is time."""
    programs: list[list[Op]] = []
    for rank in range(4):
        pair = (0, 1) if rank < 2 else (2, 3)
        one = Collective((0, 1, 2, 3), 60_000, "allgather", blocks=False)
        other = Collective(pair, made[rank // 2 + 4] * 3000, "reduce_scatter", blocks=False, stream="other")
        end = [Compute(made[rank + 6] * 1000), Join()]
        program = [op for step in range(2) for op in (Step(step), Compute(made[rank] * 1000), one, other, *end)]
        programs.append(program)
    ranks = simulate(programs)
    found = across(as_facts(ranks))
    sums(found)
    expected: dict[str, list[float]] = {"allgather": [0.0, 0.0], "reduce_scatter": [0.0, 0.0]}
    for rank, waited in zip(ranks, waits(found), strict=True):
        for name, (moving, waiting) in shares_by_hand(rank, waited).items():
            expected[name][0] += moving
            expected[name][1] += waiting
    seen = {row.kind.replace("all_gather", "allgather"): row for row in found.table}
    for name, (moving, waiting) in expected.items():
        assert seen[name].exposed_transfer == pytest.approx(moving, abs=1)
        assert seen[name].exposed_waiting == pytest.approx(waiting, abs=1)


def test_messages_count_under_what_their_rank_did() -> None:
    """Two stages that send each other: half of the calls of each rank are sends, whichever rank it is."""
    ranks = simulate(pipelined(2, 3, 2, transfer=70_000, flush=True))
    found = across(as_facts(ranks, hosts=lambda rank: "node"))
    sums(found)
    seen = {row.kind: row for row in found.table}
    for kind in ("send", "recv"):
        mine = [event for rank in ranks for event in rank.events if event.stream == kind]
        assert seen[kind].calls == len(mine) == 12
        assert seen[kind].total == sum(event.end - event.start for event in mine)
    assert seen["recv"].exposed_waiting == 0
    assert seen["recv"].exposed_bubble > 0
