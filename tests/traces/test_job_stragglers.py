"""Exactly the planted stragglers are named, and nobody where all ranks are alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.traces.job.across import across
from meshwright.traces.job.stragglers.slow_ranks import FEW, excess, slow
from meshwright.traces.job.stragglers.stragglers import EVERYTHING, Stragglers, stragglers
from tests.traces.jobs import Collective, Compute, Op, Step, as_facts, data_parallel, pipelined, simulate

few = settings(deadline=None, max_examples=20)


def named(programs: list[list[Op]], **how: object) -> Stragglers:
    facts = as_facts(simulate(programs), **how)  # type: ignore[arg-type]
    return stragglers(facts, across(facts))


def noisy(rng: np.random.Generator, ranks: int, steps: int, spread: float) -> np.ndarray:
    return np.maximum(1_000_000 * (1 + spread * rng.standard_normal((ranks, steps))), 1000).astype(np.int64)


@few
@given(st.integers(0, 10_000), st.integers(2, 12), st.integers(1, 12), st.sampled_from([0.0, 0.003, 0.02, 0.08]))
def test_nobody_where_all_are_alike(seed: int, ranks: int, steps: int, spread: float) -> None:
    made = noisy(np.random.default_rng(seed), ranks, steps, spread)
    found = named(data_parallel(ranks, steps, lambda rank, step: int(made[rank, step])))
    assert found.found == ()


@pytest.mark.parametrize(
    ("ranks", "steps", "own", "each", "least"),
    [((2, 65), (1, 40), (0, 0.005, 0.01), (0.002, 0.01, 0.05), 1), ((2, 9), (1, 6), (0, 0.005), (0.02, 0.08), 2)],
    ids=["jobs of any size", "few ranks and steps"],
)
def test_how_often_noise_is_taken_for_slowness(
    ranks: tuple[int, int], steps: tuple[int, int], own: tuple[float, ...], each: tuple[float, ...], least: int
) -> None:
    """Of 4,000 jobs without stragglers, with noise from step to step and between devices: one or two in a thousand."""
    rng = np.random.default_rng(5)
    wrong = 0
    for _ in range(4000):
        many = int(rng.integers(*ranks))
        values = 1 + rng.choice(own) * rng.standard_normal((many, 1))
        values = values + rng.choice(each) * rng.standard_normal((many, int(rng.integers(*steps))))
        over = excess(values)
        wrong += bool(slow(over / (values - over), 0.04).sure.any())
    assert wrong <= 4 * least


@pytest.mark.parametrize(
    ("ranks", "steps", "slower", "noise"),
    [
        (8, 1, 1.15, 0.005), (4, 2, 1.2, 0.005), (3, 4, 1.15, 0.005), (2, 6, 1.15, 0.005),
        (2, 3, 1.15, 0.0005), (2, 2, 1.15, 1e-5), (3, 2, 1.15, 1e-5), (3, 1, 1.15, 1e-5),
    ],
)  # fmt: skip
def test_how_often_slowness_is_seen_in_few_steps(ranks: int, steps: int, slower: float, noise: float) -> None:
    rng = np.random.default_rng(5)
    seen = 0
    for _ in range(200):
        values = 1 + noise * rng.standard_normal((ranks, steps))
        values[1] *= slower
        over = excess(values)
        seen += slow(over / (values - over), 0.04).sure.tolist() == [rank == 1 for rank in range(ranks)]
    assert seen >= 190


@few
@given(
    st.integers(0, 10_000), st.integers(3, 10), st.integers(8, 16), st.sampled_from([0.003, 0.01]),
    st.sampled_from([1.12, 1.3]), st.integers(0, 9), st.one_of(st.just(0), st.integers(3, 12)),
)  # fmt: skip
def test_the_slow_rank_is_named_with_its_class_and_step(
    seed: int, ranks: int, steps: int, spread: float, slower: float, which: int, since: int
) -> None:
    which, since = which % ranks, min(since, steps - FEW)  # of fewer slow steps, more is asked
    made = noisy(np.random.default_rng(seed), ranks, steps, spread)
    made[which, since:] = (made[which, since:] * slower).astype(np.int64)
    found = named(data_parallel(ranks, steps, lambda rank, step: int(made[rank, step])))
    (one,) = found.found
    assert (one.ranks, one.cause, one.where) == ((which,), "compute", "product")
    assert one.since == (since or None)
    assert one.extra == pytest.approx(2_000_000 * (slower - 1), rel=0.25)
    assert 0.6 * one.extra <= one.costs <= 1.2 * one.extra


def test_slow_in_everything() -> None:
    programs: list[list[Op]] = []
    for rank in range(8):
        times = 1.15 if rank == 5 else 1.0
        program: list[Op] = []
        for step in range(5):
            program.append(Step(step))
            names = ("sm90_gemm", "layer_norm", "flash_fwd", "elementwise_kernel")
            program += [Compute(round(700_000 * times), name) for name in names]
            program.append(Collective(tuple(range(8)), 100_000))
        programs.append(program)
    (one,) = named(programs).found
    assert (one.ranks, one.where, one.since) == ((5,), EVERYTHING, None)
    assert one.slower == pytest.approx(0.15)
    assert one.costs == one.extra == 420_000


def test_slow_in_two_classes_of_three() -> None:
    programs = data_parallel(4, 6)
    for rank, program in enumerate(programs):
        times = 1.2 if rank == 3 else 1.0
        program[:] = [
            part
            for op in program
            for part in (
                [
                    Compute(round(op.ns * times), op.name),
                    Compute(round(800_000 * times), "flash_fwd"),
                    Compute(500_000, "relu"),
                ]
                if isinstance(op, Compute) and "gemm" in op.name
                else [op]
            )
        ]
    (one,) = named(programs).found
    assert (one.ranks, one.where) == ((3,), "product and attention")
    assert one.slower == pytest.approx(0.2)
    assert one.extra == 2 * (200_000 + 160_000)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("steps", "since"), [(6, 3), (8, 4), (12, 6), (20, 13)])
@pytest.mark.parametrize("slower", [1.2, 2.0])
def test_slow_from_the_middle_on(ranks: int, steps: int, since: int, slower: float) -> None:
    """Of two ranks, too, where the other one seems to become as much faster. All wait for it, every step from then on."""

    def compute(rank: int, step: int) -> int:
        return round(1_000_000 * (slower if rank == 1 and step >= since else 1))

    (one,) = named(data_parallel(ranks, steps, compute)).found
    assert (one.ranks, one.cause, one.since) == ((1,), "compute", since)
    assert one.costs == one.extra == round(2_000_000 * (slower - 1))


def test_one_of_two_that_recovers_does_not_make_the_other_slow() -> None:
    times = [1.5, 1.5, 1.5, 1.5, 1.0, 1.0, 1.0, 1.0]
    found = named(data_parallel(2, 8, lambda rank, step: round(1_000_000 * (times[step] if rank == 0 else 1))))
    assert 1 not in found.ranks


@pytest.mark.parametrize("late", [300_000, 500_000, 1_000_000])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_late_host_costs(late: int, overlap: bool) -> None:
    """As much as the same job takes longer, also where what is late was hidden behind computing."""

    def job(host: int) -> list[list[Op]]:
        return data_parallel(
            4, 6, host=lambda rank, step: host if rank == 2 else 0, overlap=overlap, layers=3, transfer=300_000
        )

    def seconds(programs: list[list[Op]]) -> float:
        facts = as_facts(simulate(programs))
        return float(np.median(across(facts).parts.length[:, :-1]))

    (one,) = named(job(late)).found
    assert (one.ranks, one.cause) == ((2,), "host")
    assert one.costs == pytest.approx(seconds(job(late)) - seconds(job(0)), rel=0.02)


def test_a_late_host_is_named_and_no_one_who_waits_for_it() -> None:
    found = named(data_parallel(6, 8, host=lambda rank, step: 400_000 if rank == 2 and step >= 4 else 10_000))
    (one,) = found.found
    assert (one.ranks, one.cause, one.since) == ((2,), "host", 4)
    assert one.extra == 390_000


@few
@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(1, 3), st.sampled_from([0.003, 0.02, 0.05]))
def test_nobody_in_even_pipelines(seed: int, stages: int, copies: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    programs = [
        [
            Compute(int(op.ns * (1 + spread * rng.standard_normal())), op.name) if isinstance(op, Compute) else op
            for op in one
        ]
        for one in pipelined(stages, 8, 5, flush=True, copies=copies)
    ]
    assert named(programs).found == ()


def test_half_of_the_ranks() -> None:
    """One of two machines is slow: its ranks are named, all of them."""
    made = noisy(np.random.default_rng(3), 16, 8, 0.01)
    made[8:] = (made[8:] * 1.1).astype(np.int64)
    found = named(data_parallel(16, 8, lambda rank, step: int(made[rank, step])))
    (one,) = found.found
    assert one.ranks == found.ranks == tuple(range(8, 16))
    assert (one.slower, one.host) == (pytest.approx(0.1, abs=0.02), "")


@pytest.mark.parametrize("since", [0, 4])
def test_a_slow_machine(since: int) -> None:
    """Its ranks are one finding, which costs what all others wait for them."""
    made = noisy(np.random.default_rng(4), 8, 10, 0.002)
    usual = made.copy()
    made[4:, since:] = (made[4:, since:] * 1.3).astype(np.int64)
    programs = data_parallel(8, 10, lambda rank, step: int(made[rank, step]))
    (one,) = named(programs, hosts=lambda rank: f"node{rank // 4}").found
    assert (one.ranks, one.cause, one.where, one.host) == ((4, 5, 6, 7), "compute", "product", "node1")
    assert one.since == (since or None)
    as_fast = 2 * (made.max(axis=0) - usual.max(axis=0))[since:].mean()  # two products in a step
    assert one.costs == pytest.approx(as_fast, rel=0.02)


def test_ranks_that_are_slow_for_themselves() -> None:
    """On other machines, or by something else: as many findings."""
    times = {1: 1.3, 5: 1.3, 6: 1.9}
    programs = data_parallel(12, 8, lambda rank, step: round(1_000_000 * times.get(rank, 1.0)))
    found = named(programs, hosts=lambda rank: f"node{rank // 4}").found
    assert sorted((one.ranks, one.host) for one in found) == [((1,), ""), ((5,), ""), ((6,), "")]


def test_costs_are_of_the_steps_that_were_compared() -> None:
    """Rank 2 was recorded from the second step on: the first tells nothing of waiting."""
    ranks = simulate(data_parallel(4, 5, lambda rank, step: 1_250_000 if rank == 1 else 1_000_000))
    begin = ranks[2].steps[1][1]
    ranks[2].steps = ranks[2].steps[1:]
    ranks[2].events = [event for event in ranks[2].events if event.start >= begin]
    facts = as_facts(ranks)
    (one,) = stragglers(facts, across(facts)).found
    assert (one.ranks, one.costs) == ((1,), 500_000)


def test_clocks_do_not_make_stragglers() -> None:
    found = named(
        data_parallel(8, 6),
        hosts=lambda rank: f"node{rank // 4}",
        clock=lambda rank, time: time + rank // 4 * 2_000_000_000,
    )
    assert found.found == ()


def test_a_stage_with_more_work_is_an_imbalance() -> None:
    """Not a slow device; and a slow device within a stage is not an imbalance."""
    programs = pipelined(4, 6, 5, forward=lambda stage: 1_300_000 if stage == 3 else 1_000_000, copies=3)
    (one,) = named(programs).found
    assert (one.cause, one.stage, one.ranks) == ("stage", 3, (9, 10, 11))
    assert one.slower == pytest.approx(0.1)
    assert named(pipelined(4, 6, 5, copies=3)).found == ()
    slow_rank = pipelined(4, 6, 5, copies=3)
    slow_rank[4] = [Compute(int(op.ns * 1.2), op.name) if isinstance(op, Compute) else op for op in slow_rank[4]]
    found = named(slow_rank)
    assert [(one.ranks, one.cause, one.stage) for one in found.found] == [((4,), "compute", 1)]
    assert found.ranks == (4,)


def test_a_slow_link() -> None:
    """Pairs reduce among themselves; between ranks 4 and 5 that takes twice as long."""
    programs: list[list[Op]] = []
    for rank in range(8):
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        call = Collective(pair, 400_000 if pair == (4, 5) else 200_000, description="tp")
        programs.append([op for step in range(5) for op in (Step(step), Compute(900_000), call)])
    (one,) = named(programs).found
    assert (one.cause, one.ranks, one.where) == ("link", (4, 5), "all_reduce of tp")
    assert one.slower == pytest.approx(1.0)
    assert one.extra == 200_000


def test_ranks_that_marked_no_steps_are_not_compared() -> None:
    ranks = simulate(data_parallel(6, 6, lambda rank, step: 1_300_000 if rank == 3 else 1_000_000))
    for rank in ranks[4:]:
        rank.steps = []
    facts = as_facts(ranks, seq=True)
    found = stragglers(facts, across(facts))
    assert found.compared == ((0, 1, 2, 3),)
    assert [(one.ranks, one.costs) for one in found.found] == [((3,), 600_000)]


def test_ranks_that_do_something_else_are_not_compared() -> None:
    """The last rank also runs a second product: more work, not slower."""
    programs = data_parallel(4, 6)
    programs[3] = [part for op in programs[3] for part in ([op, op] if isinstance(op, Compute) else [op])]
    found = named(programs)
    assert found.found == ()
    assert found.compared == ((0, 1, 2),)
