"""Ranks side by side: waits, clocks and bubbles that are known because the job was made with them."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.traces.job.across import Across, across
from meshwright.traces.job.steps import PARTS
from meshwright.traces.rank.collectives import KINDS
from meshwright.traces.rank.facts import RankFacts, digest
from meshwright.traces.reading import read_trace
from tests.traces.jobs import (
    Collective,
    Compute,
    Join,
    Op,
    Rank,
    Recv,
    Send,
    Step,
    as_facts,
    data_parallel,
    pipelined,
    simulate,
)

DLRM = Path("tests/data/traces/param/dlrm_8rank")
few = settings(deadline=None, max_examples=15)


def sums(found: Across) -> None:
    """Every nanosecond of every step is one part, and exposed in no more than one row of the table."""
    parts = found.parts
    for name in ("transfer", "waiting", "bubble"):
        told = sum(getattr(row, f"exposed_{name}") for row in found.table)
        assert told == pytest.approx(getattr(parts, name).sum(), abs=max(len(found.table), 1))
    assert (sum(getattr(parts, name) for name in PARTS) == parts.length).all()
    assert all((getattr(parts, name) >= 0).all() for name in PARTS)


def planted_waits(ranks: list[Rank]) -> list[list[int]]:
    """Of each rank, by start: how long before the last of its call it came."""
    last: dict[Any, int] = {}
    for rank in ranks:
        for event in rank.events:
            if "Group size" in event.args:
                key = (event.args["Process Group Name"], event.args["Collective name"], event.args["turn"])
                last[key] = max(last.get(key, 0), event.start)
    return [
        [
            last[event.args["Process Group Name"], event.args["Collective name"], event.args["turn"]] - event.start
            for event in sorted(rank.events, key=lambda event: event.start)
            if "Group size" in event.args
        ]
        for rank in ranks
    ]


def waits(found: Across) -> list[list[int]]:
    firsts = found.aligned.matched.firsts
    return [found.aligned.waiting[firsts[place] : firsts[place + 1]].tolist() for place in range(len(found.ranks))]


lengths = st.lists(st.integers(100_000, 3_000_000), min_size=12, max_size=12)


@few
@given(lengths, st.booleans(), st.booleans(), st.sampled_from(["told", "no seq", "nothing told"]))
def test_waits_are_those_planted(made: list[int], overlap: bool, skew: bool, told: str) -> None:
    programs = data_parallel(4, 3, lambda rank, step: made[rank * 3 + step], overlap=overlap)
    ranks = simulate(programs)
    nothing = ("correlation",)
    facts = as_facts(
        ranks,
        hosts=lambda rank: f"node{rank // 2}",
        clock=lambda rank, time: time + (3_000_000_000 if skew and rank >= 2 else 0),
        keep=lambda key: told != "nothing told" or key in nothing,
        seq=told == "told",
    )
    found = across(facts)
    sums(found)
    assert waits(found) == planted_waits(ranks)
    assert found.clocks.offset.tolist() == ([0, 0, 3_000_000_000, 3_000_000_000] if skew else [0] * 4)
    (row,) = found.table
    assert row.calls == 6
    assert row.transfer == 200_000 * 4 * 6
    assert row.waiting == sum(map(sum, planted_waits(ranks)))
    assert row.unsplit == row.partial == 0
    assert row.crosses_nodes is True
    if told != "nothing told":
        assert row.group == "mesh_dp"
        assert row.algbw == pytest.approx(2 * (1 << 20) / 200_000)
        assert row.busbw == row.best_busbw == pytest.approx(2 * 3 / 4 * 2 * (1 << 20) / 200_000)


def brute_exposed(rank: Rank, waiting: list[int], steps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Exposed transfer and waiting of each step, counted microsecond by microsecond."""
    end = max(event.end for event in rank.events) // 1000
    computes, moves, calls = (np.zeros(end + 1, bool) for _ in range(3))
    left = iter(waiting)
    for event in sorted(rank.events, key=lambda event: event.start):
        begin, stop = event.start // 1000, event.end // 1000
        if event.stream == "compute":
            computes[begin:stop] = True
        else:
            calls[begin:stop] = True
            moves[begin + next(left) // 1000 : stop] = True
    return [
        (int((moves & ~computes)[a:b].sum()), int((calls & ~moves & ~computes)[a:b].sum())) for a, b in steps
    ]  # fmt: skip


@few
@given(lengths, st.integers(0, 900))
def test_what_of_waiting_and_transfer_is_exposed(made: list[int], transfer: int) -> None:
    """Two groups on one stream and calls that run beside computing."""
    whole = [value // 1000 * 1000 for value in made]
    programs: list[list[Op]] = []
    for rank in range(4):
        program: list[Op] = []
        for step in range(3):
            pair = (0, 1) if rank < 2 else (2, 3)
            program += [Step(step), Compute(whole[rank * 3 + step])]
            program += [Collective((0, 1, 2, 3), transfer * 1000, "allgather", blocks=False)]
            program += [Compute(400_000), Collective(pair, 50_000, "reduce_scatter", blocks=False)]
            program += [Compute(whole[(rank * 5 + step) % 12]), Join()]
        programs.append(program)
    ranks = simulate(programs)
    found = across(as_facts(ranks))
    sums(found)
    expected = planted_waits(ranks)
    assert waits(found) == expected
    for place, rank in enumerate(ranks):
        edges = [min(e.start for e in rank.events if e.launch >= start) // 1000 for _, start in rank.steps]
        edges.append(max(event.end for event in rank.events) // 1000)
        counted = brute_exposed(rank, expected[place], list(itertools.pairwise(edges)))
        seen = zip(found.parts.transfer[place].tolist(), found.parts.waiting[place].tolist(), strict=True)
        assert [(a // 1000, b // 1000) for a, b in seen] == counted
    exposed = sum(row.exposed_waiting + row.exposed_bubble + row.exposed_transfer for row in found.table)
    whole_time = sum(row.total for row in found.table)
    hidden = sum(int(calls.hidden.sum()) for calls in (one.devices[0].calls for one in as_facts(ranks)))
    assert exposed == whole_time - hidden


def test_a_group_of_which_not_all_were_recorded() -> None:
    ranks = simulate(data_parallel(4, 2, lambda rank, step: 1_000_000 * (rank + 1)))
    found = across(as_facts(ranks)[:3])
    sums(found)
    assert not found.aligned.waiting.any()
    (row,) = found.table
    assert row.partial == row.calls == 4
    assert row.unsplit == row.total
    assert row.busbw is None
    assert any("not all who take part" in note.what for note in found.aligned.notes)


def test_a_rank_that_marked_no_steps() -> None:
    """Its recording is no step; what others say of their steps stays as it is."""
    ranks = simulate(data_parallel(4, 3, lambda rank, step: 1_000_000 + rank * 100_000))
    before = across(as_facts(ranks, seq=True))
    ranks[2].steps = []
    found = across(as_facts(ranks, seq=True))
    sums(found)
    assert found.parts.numbers.tolist() == [0, 1, 2]
    assert found.parts.present.any(axis=1).tolist() == [True, True, False, True]
    for name in PARTS:
        assert (getattr(found.parts, name)[[0, 1, 3]] == getattr(before.parts, name)[[0, 1, 3]]).all()
    assert [note.what for note in found.aligned.notes if note.what.endswith("though others did: 2")]
    assert not before.aligned.notes


@pytest.mark.parametrize("lost", [0, 1])
def test_calls_of_a_rank_that_marked_no_steps(lost: int) -> None:
    """Matched by their order in the whole recording, also where it began a step later."""
    made = np.random.default_rng(8).integers(500_000, 2_000_000, (4, 5))
    ranks = simulate(data_parallel(4, 5, lambda rank, step: int(made[rank, step])))
    expected = planted_waits(ranks)
    begin = ranks[2].steps[lost][1]
    ranks[2].steps, ranks[2].events = [], [event for event in ranks[2].events if event.start >= begin]
    seen = waits(across(as_facts(ranks)))
    missed = 2 * lost  # calls of a step: not all have recorded them
    assert seen[2] == expected[2][missed:]
    for rank in (0, 1, 3):
        assert seen[rank] == [0] * missed + expected[rank][missed:]


def test_a_recording_that_begins_later() -> None:
    """Rank 1 lost the first two of eight calls and no step tells: sizes and ends tell which are missing."""
    rng = np.random.default_rng(1)
    every = (0, 1, 2)
    programs: list[list[Op]] = [
        [op for call in range(8) for op in (Compute(int(rng.integers(100_000, 900_000))), Collective(every, 90_000))]
        for _ in every
    ]
    ranks = simulate(programs)
    expected = planted_waits(ranks)
    ranks[1].events = ranks[1].events[4:]
    found = across(as_facts(ranks, clock=lambda rank, time: time + rank * 777_000_000))
    assert found.clocks.offset.tolist() == [0, 777_000_000, 2 * 777_000_000]
    assert waits(found)[0] == [0, 0, *expected[0][2:]]
    assert waits(found)[1] == expected[1][2:]
    assert any("different numbers" in note.what for note in found.aligned.notes)


def test_calls_of_other_groups_are_not_taken_for_one() -> None:
    """Nothing tells the groups, and pairs reduce at different times: no wait is made up."""
    programs: list[list[Op]] = []
    for rank in range(4):
        pair = (0, 1) if rank < 2 else (2, 3)
        programs.append(
            [op for _ in range(5) for op in (Compute(1_000_000 + 4_000_000 * (rank // 2)), Collective(pair, 300_000))]
        )
    found = across(as_facts(simulate(programs), keep=lambda key: key == "correlation"))
    sums(found)
    assert not found.aligned.waiting.any()
    assert any("never in them together" in note.what for note in found.aligned.notes)


@few
@given(st.integers(-50, 50), st.integers(-4_000_000_000, 4_000_000_000))
def test_clocks_that_drift(parts_per_million: int, offset: int) -> None:
    rng = np.random.default_rng(abs(offset))
    made = rng.integers(20_000_000, 60_000_000, (4, 40))
    ranks = simulate(data_parallel(4, 40, lambda rank, step: int(made[rank, step])))

    def clock(rank: int, time: int) -> int:
        return time + offset + time * parts_per_million // 1_000_000 if rank >= 2 else time

    found = across(as_facts(ranks, hosts=lambda rank: f"node{rank // 2}", clock=clock))
    apart = np.abs(
        np.concatenate([np.array(a) - np.array(b) for a, b in zip(waits(found), planted_waits(ranks), strict=True)])
    )
    assert apart.max() < 10_000  # of waits of up to 40 ms
    assert found.clocks.part.tolist() == [0] * 4


def test_machines_that_share_nothing_are_parts() -> None:
    programs = [
        [op for _ in range(5) for op in (Compute(1_000_000), Collective((0, 1) if rank < 2 else (2, 3), 9_000))]
        for rank in range(4)
    ]
    found = across(as_facts(simulate(programs)))
    assert found.clocks.part.tolist() == [0, 0, 2, 2]


def test_clocks_that_nothing_connects_are_told() -> None:
    """A pipeline that only goes one way, on machines without names: five messages, each from one clock to another."""
    programs: list[list[Op]] = [
        [op for step in range(5) for op in (Step(step), Compute(4_000_000), Send(1, 100_000), Join())],
        [op for step in range(5) for op in (Step(step), Recv(0, 100_000), Compute(6_000_000))],
    ]
    ranks = simulate(programs)
    found = across(as_facts(ranks))
    assert not found.aligned.split.any()
    (note,) = found.aligned.notes
    assert "whose clocks nothing connects" in note.what
    assert note.count == 5
    named = across(as_facts(ranks, hosts=lambda rank: "node"))
    assert named.aligned.split.all()
    assert not named.aligned.notes


@few
@given(
    st.integers(2, 5), st.integers(1, 8), st.sampled_from(["gpipe", "1f1b"]), st.integers(100_000, 2_000_000),
    st.integers(100_000, 2_000_000), st.booleans(), st.booleans(),
)  # fmt: skip
def test_the_bubble_of_equal_stages(
    p: int, m: int, schedule: str, forward: int, backward: int, flush: bool, skew: bool
) -> None:
    """(p - 1) / (m + p - 1) of the step, exactly: whether stages wait for messages or in a collective at the end."""
    ranks = simulate(pipelined(p, m, 4, schedule, lambda _: forward, lambda _: backward, flush=flush))
    found = across(
        as_facts(
            ranks,
            hosts=lambda rank: f"node{rank}",
            clock=lambda rank, time: time + (rank * 5_000_000_000 if skew else 0),
        )
    )
    sums(found)
    assert found.pipeline.stage == tuple(range(p))
    parts = found.parts
    inner = slice(None) if flush else slice(1, 3)  # without a flush the first step has no step before to wait for
    bubble, length = parts.bubble[:, inner].sum(axis=1), parts.length[:, inner].sum(axis=1)
    assert (bubble * (m + p - 1) == length * (p - 1)).all()
    assert not parts.waiting.any()


def test_late_ranks_of_a_stage_are_no_bubble() -> None:
    """Two pipelines side by side and a collective of all at the end; in it the slow copy's ranks are waited for."""
    found = across(as_facts(simulate(pipelined(2, 3, 2, flush=True, copies=2))))
    assert found.pipeline.stage == (0, 0, 1, 1)
    assert not found.parts.waiting.any()
    programs = pipelined(2, 3, 2, flush=True, copies=2)
    for step, where in enumerate(
        place for place, op in reversed(list(enumerate(programs[0]))) if isinstance(op, Collective)
    ):
        assert step < 2
        programs[0].insert(where, Compute(500_000, "optimizer_adam"))  # between the last message and the flush
    late = across(as_facts(simulate(programs)))
    sums(late)
    assert late.parts.waiting[1].tolist() == [500_000, 500_000]  # its own stage's other rank is late
    assert not late.parts.waiting[[0, 2, 3]].any()
    assert (late.parts.bubble[2:] == found.parts.bubble[2:] + 500_000).all()


def test_rings_are_no_pipelines() -> None:
    programs: list[list[Op]] = [
        [op for _ in range(6) for op in (Compute(900_000), Send((rank + 1) % 4, 10_000), Recv((rank - 1) % 4, 10_000))]
        for rank in range(4)
    ]
    found = across(as_facts(simulate(programs)))
    assert found.pipeline.stage == (None,) * 4
    assert not found.parts.bubble.any()


@pytest.fixture(scope="module")
def dlrm() -> list[RankFacts]:
    return sorted((digest(read_trace(file)) for file in DLRM.iterdir()), key=lambda one: one.rank or 0)


def kernels_of(file: Path) -> list[tuple[str, int, int]]:
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    found = [
        (e["name"], e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "kernel" and e["name"].startswith("nccl")
    ]
    return sorted(found, key=lambda kernel: kernel[1])


def test_real_ranks_wait_as_counted_by_hand(dlrm: list[RankFacts]) -> None:
    found = across(dlrm)
    sums(found)
    files = sorted(DLRM.iterdir(), key=lambda file: int(file.name[6]))
    by_hand = [kernels_of(file) for file in files]
    for call in range(8):
        begins = [rank[call][1] for rank in by_hand]
        expected = [max(begins) - begin for begin in begins]
        seen = [waits(found)[rank][call] / 1000 for rank in range(8)]
        assert seen == expected
    assert found.aligned.notes == ()
    assert {row.kind: row.calls for row in found.table} == {"all_to_all": 5, "all_reduce": 3}


def test_a_skewed_copy_of_real_ranks_waits_the_same(dlrm: list[RankFacts]) -> None:
    def later(one: RankFacts, ns: int) -> RankFacts:
        (device,) = one.devices
        calls = dataclasses.replace(
            device.calls,
            **{name: getattr(device.calls, name) + ns for name in ("start", "end", "busy_starts", "busy_ends")},
        )
        return dataclasses.replace(one, base_ns=one.base_ns + ns, devices=(dataclasses.replace(device, calls=calls),))

    plain = across(dlrm)
    skewed = across([later(one, 2_500_000_000 if (one.rank or 0) >= 4 else 0) for one in dlrm])
    sums(skewed)
    apart = np.abs(plain.aligned.waiting - skewed.aligned.waiting)
    assert apart.max() <= 5_000  # what ends of a collective differ by within one machine
    assert abs(plain.parts.waiting.sum() - skewed.parts.waiting.sum()) <= 0.01 * plain.parts.waiting.sum()


def test_findings_travel(dlrm: list[RankFacts]) -> None:
    found = across(dlrm)
    again = pickle.loads(pickle.dumps(found))
    assert again.table == found.table
    assert (again.parts.waiting == found.parts.waiting).all()
    assert {KINDS[kind] for kind in again.aligned.matched.kind} == {"all_to_all", "all_reduce"}
