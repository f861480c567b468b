"""The decision: the simulated pipeline against one in small ticks, the choice against trying everything, the guard's bound
against what real sums lose."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.compression import codec
from meshwright.compression.auto import Auto, Facts, Link, Unit, Way, choose, decide
from meshwright.compression.auto.errors import Errors
from meshwright.compression.auto.inputs import Cost, units
from meshwright.compression.auto.microbenchmark import Rehearsal
from meshwright.compression.auto.simulation import Leg, Strand, simulate
from meshwright.compression.sync import Choice, Gradients, Options, Synchroniser, Traffic
from meshwright.errors import InputError
from tests.run.pool import pool

FREE = Cost(0.0)


def in_ticks(  # noqa: C901 - one loop, so that it shares nothing with what it is held against
    ready: Sequence[float], strands: Sequence[Sequence[Strand]], link: Link, cores: float, tick: float
) -> float:
    """The same step, a tick at a time: everything that is busy gets its share, messages leave one after the other."""
    now, computed, handed = 0.0, 0.0, 0
    waiting: list[list[Any]] = []  # urgency, serial, strand, leg, work left
    wire: list[list[Any]] = []  # seconds left, latency left, strand, leg, bucket, place
    system: list[list[Any]] = []
    current: Any = None
    serial = 0
    while handed < len(ready) or current or waiting or wire or system:
        if current is None and waiting:
            waiting.sort(key=lambda one: one[:2])
            current = waiting.pop(0)
        busy = (handed < len(ready)) + (current is not None) + any(one[0] > 0 for one in system)
        speed = min(1.0, cores / busy) if busy else 1.0
        now += tick
        if handed < len(ready):
            computed += tick * speed
            while handed < len(ready) and computed >= ready[handed] - tick / 2:
                for place, strand in enumerate(strands[handed]):
                    serial += 1
                    waiting.append([(False, handed, place), serial, strand, 0, strand[0].work])
                handed += 1
        if current is not None:
            current[4] -= tick * speed
            if current[4] <= tick / 2:
                urgency, _, strand, leg, _ = current
                current = None
                if leg < len(strand) - 1:
                    cost = link.reduce if strand[leg].plain else link.messages
                    moved = [cost.work + cost.work_byte * strand[leg].sent]
                    wire.append([cost.byte * strand[leg].sent, cost.latency, strand, leg, urgency, moved])
                    system.append(moved)
        for moved in system:
            if moved[0] > 0:
                moved[0] -= tick * speed
                break
        system = [one for one in system if one[0] > tick / 2]
        for one in wire:
            if one[0] > tick / 2:
                one[0] -= tick
                break
        for one in list(wire):
            if one[0] <= tick / 2:
                if one[1] > tick / 2:
                    one[1] -= tick
                elif one[5][0] <= tick / 2:
                    wire.remove(one)
                    serial += 1
                    _, _, strand, leg, (_, bucket, place), _ = one
                    waiting.append(
                        [(strand[leg].last, bucket, place + 1), serial, strand, leg + 1, strand[leg + 1].work]
                    )
    return now


@pytest.mark.parametrize("seed", range(25))
def test_the_pipeline_is_as_one_in_small_ticks(seed: int) -> None:
    rng = random.Random(seed)
    link = Link(*(Cost(1e-6 * rng.choice([0.2, 1, 3]), rng.choice([0, 0.3]), rng.choice([0, 0.2]), 1e-7) for _ in "ab"))

    def strand() -> Strand:
        legs = [Leg(rng.uniform(0, 1), rng.randrange(1, 10**6), rng.random() < 0.3) for _ in range(rng.randrange(1, 3))]
        return (*legs[:-1], Leg(legs[-1].work, legs[-1].sent, legs[-1].plain, last=True), Leg(rng.uniform(0, 0.5)))

    ready, at = [], 0.0
    for _ in range(rng.randrange(1, 4)):
        at += rng.uniform(0.1, 2)
        ready.append(at)
    strands = [[strand() for _ in range(rng.randrange(1, 3))] for _ in ready]
    cores = rng.choice([0.5, 1.0, 2.0, 8.0])
    found = simulate(ready, strands, link, cores)
    assert found.step == pytest.approx(in_ticks(ready, strands, link, cores, 1e-3), rel=0.02, abs=0.05)
    assert found.step >= max(found.computing, found.wire, found.worker / min(1.0, cores)) - 1e-9


def some_costs(rng: random.Random, ways: Sequence[Way]) -> Any:
    """Costs of ways by chance: bytes and work per number."""
    each = {id(way): (rng.uniform(0, 2e-6), rng.uniform(0.05, 4), rng.randrange(1, 4)) for way in ways}

    def costs(way: Way, shapes: tuple[tuple[int, ...], ...]) -> list[Strand]:
        work, sent, parts = each[id(way)]
        numbers = sum(torch.Size(shape).numel() for shape in shapes)
        leg = Leg(1e-3 + work * numbers / parts, int(sent * numbers / parts), last=True)
        return [(leg, Leg(leg.work / 2))] * parts

    return costs


def test_the_choice_comes_close_to_trying_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = []
    for seed in range(40):
        rng = random.Random(seed)
        ways = [Way(Choice(piece=32 + i), steps=1 + rng.random() / 2) for i in range(4)]  # told apart by their pieces
        shapes = [[(rng.choice([1 << 16, 1 << 18, 1 << 20]),)] for _ in range(4)]
        ready = tuple(0.2 * (i + 1) * rng.random() + 0.2 * i for i in range(4))
        facts = Facts(
            ready, units(shapes), 4, Link(Cost(rng.choice([1e-7, 1e-6]), 1e-3), FREE), rng.choice([0.5, 1, 4])
        )
        costs = some_costs(rng, ways)
        best = min(choose.priced(facts, chosen, costs).price for chosen in product(ways, repeat=4))
        assert decide(facts, ways[1:], costs).price >= best - 1e-12  # a smaller space has nothing better
        monkeypatch.setattr(choose, "EVERYTHING", 0)
        monkeypatch.setattr(choose, "PAYS_LOSSY", 0.0)
        gaps.append(decide(facts, ways, costs).price / best - 1)
        monkeypatch.undo()
    assert max(gaps) < 0.02
    assert sorted(gaps)[len(gaps) // 2] < 1e-9


def fixed_costs(way: Way, shapes: tuple[tuple[int, ...], ...]) -> list[Strand]:
    """A codec that takes a nanosecond for each number and an eighth of the bytes, between four processes."""
    numbers = sum(torch.Size(shape).numel() for shape in shapes)
    if way.choice.codec is None:
        return [(Leg(0.0, 6 * numbers, plain=True, last=True), Leg(0.0))]
    return [(Leg(1e-4 + 1e-9 * numbers, numbers * 6 // 8, last=True), Leg(1e-9 * numbers))]


def test_compression_pays_on_slow_links_only_and_only_for_large_gradients() -> None:
    ways = (Way(Choice()), Way(Choice(codec("int4"), "scatter"), 1.02))
    chosen = {}
    for mbit in (10, 100, 1000, 10_000, 100_000):
        for numbers in (1 << 10, 1 << 16, 1 << 22):
            cost = Cost(8e-6 / mbit, 1e-4)
            facts = Facts((0.0,), units([[(numbers,)]]), 4, Link(cost, cost), 4)
            found = decide(facts, ways, fixed_costs)
            chosen[mbit, numbers] = found.ways[0] is ways[1]
            plain, coded = (choose.priced(facts, [way], fixed_costs).price for way in ways)
            assert chosen[mbit, numbers] == (coded < 2 / 3 * plain)  # less than a third is not worth it
    assert chosen[10, 1 << 22]
    assert not any(chosen[100_000, numbers] for numbers in (1 << 10, 1 << 16, 1 << 22))
    assert not chosen[10_000, 1 << 10]
    for numbers in (1 << 10, 1 << 16, 1 << 22):  # once it does not pay, it does not on any faster link
        along = [chosen[mbit, numbers] for mbit in (10, 100, 1000, 10_000, 100_000)]
        assert along == sorted(along, reverse=True)


def test_sixteen_bits_are_kept_where_fewer_save_little() -> None:
    """A link on which 16 bits are worth it and 4 bits save a little more: the first; on a slower one, 4 bits."""
    ways = (Way(Choice()), Way(Choice(codec("fp16"), "scatter")), Way(Choice(codec("int4"), "scatter")))
    sent = {"": 6.0, "fp16": 3.0, "int4": 0.8}

    def costs(way: Way, shapes: tuple[tuple[int, ...], ...]) -> list[Strand]:
        numbers = sum(torch.Size(shape).numel() for shape in shapes)
        name = way.choice.codec.name if way.choice.codec else ""
        return [(Leg(0.0, int(sent[name] * numbers), plain=not name, last=True), Leg(0.0))]

    found = []
    for mbit in (2500, 500, 50):
        cost = Cost(8e-6 / mbit)
        facts = Facts((0.05,), units([[(1 << 20,)]]), 4, Link(cost, cost), 4)
        found.append(decide(facts, ways, costs).ways[0])
    assert found == [ways[1], ways[2], ways[2]]  # 70, 60, 53 ms; 151, 100, 63; 1057, 553, 184
    facts = Facts((0.5,), units([[(1 << 20,)]]), 4, Link(Cost(1.6e-9), Cost(1.6e-9)), 4)
    assert decide(facts, ways, costs).ways == (ways[0],)


def test_what_hides_under_computing_need_not_shrink() -> None:
    ways = (Way(Choice()), Way(Choice(codec("int4"), "scatter"), 1.02))
    cost = Cost(8e-9)
    early, late = ((1 << 20,), (1 << 10,))
    facts = Facts((0.01, 0.5), units([[early], [late]]), 4, Link(cost, cost), 4)
    assert decide(facts, ways, fixed_costs).ways == (ways[0], ways[0])
    facts = Facts((0.01, 0.02), units([[early], [late]]), 4, Link(cost, cost), 4)
    assert decide(facts, ways, fixed_costs).ways[0] == ways[1]


@pytest.mark.parametrize("name", ["gather", "scatter", "ring", "tree"])
def test_rehearsals_send_what_is_sent(name: str) -> None:
    """Legs of a rehearsal have the bytes of the real thing: of the first of four processes, summed over its strands."""
    shapes = ((300, 400), (7,), (50000,))
    choice = Choice(codec("int8"), name, 65536)
    strands = Rehearsal(4).strands(choice, shapes)
    sent = pool(4).run(sent_once, choice, shapes)
    assert sum(leg.sent for strand in strands for leg in strand) == pytest.approx(sent[0], rel=0.03)


def sent_once(choice: Choice, shapes: Any) -> int:
    traffic = Traffic()
    sync = Synchroniser(choice, Options(limit=20.0), traffic=traffic)
    gradients = Gradients(tuple(range(len(shapes))), shapes)
    sync.submit(torch.ones(sum(gradients.counts)), gradients).wait()
    sync.close()
    return traffic.sent


SHAPES = ((256, 160), (160,))
GRADIENTS = Gradients(("w", "b"), SHAPES)


def noisy(rank: int, step: int = 0) -> torch.Tensor:
    """What processes share, and what each has alone."""
    shared = torch.randn(sum(GRADIENTS.counts), generator=torch.Generator().manual_seed(step))
    return shared + 0.5 * torch.randn(len(shared), generator=torch.Generator().manual_seed(1000 + 10 * step + rank))


def lost(choice: Choice, steps: int, feedback: bool) -> float:
    """How much of the exact mean is lost at most in some steps, relatively; gradients are those of one step again and again,
    or of one after the other."""
    sync = Synchroniser(choice, Options(limit=20.0, error_feedback=feedback))
    worst = 0.0
    for step in range(steps):
        flat = noisy(dist.get_rank(), step)
        sync.submit(flat, GRADIENTS).wait()
        exact = torch.stack([noisy(rank, step).double() for rank in range(4)]).mean(0)
        worst = max(worst, float((flat - exact).norm() / exact.norm()))
    sync.close()
    return worst


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("topology", ["gather", "scatter"])
@pytest.mark.parametrize("name", ["fp16", "int8", "int4", "int2", "onebit", "topk", "terngrad", "powersgd"])
def test_the_guard_knows_how_much_is_lost_at_most(name: str, topology: str, feedback: bool) -> None:
    """Of one step, and of twelve in which what was left of earlier ones is said; all have gradients of equal size."""
    way = Way(Choice(codec(name), topology))
    members = [Errors(Auto((Way(Choice()), way), guard=0.1), feedback=feedback) for _ in range(4)]
    every = units([SHAPES])
    exact = torch.stack([noisy(rank) for rank in range(4)]).mean(0)
    for rank, errors in enumerate(members):
        errors.look(0, GRADIENTS, noisy(rank))
        errors.mean(0, GRADIENTS, exact)
    votes = torch.tensor([errors.told(every) for errors in members]).amax(0).tolist()
    members[0].take(every, votes)
    bound = members[0].bound(every[0], way)
    real = max(pool(4).run(lost, way.choice, 12 if feedback else 1, feedback))
    assert real <= bound * 1.02
    assert real >= bound / (60 if feedback else 12) or bound > 3  # a bound that says nothing would be of no use
    assert (way in members[0].allowed(every, [way])[every[0]]) == (bound <= 0.1)


def piloted(auto: Auto, rates: Sequence[float], steps: int, until: Sequence[str] = ()) -> Any:
    """Some steps over an imitated link of given bits a second, one after the other; what was decided and summed. Each link
    lasts so many steps, or until what is decided is what it is to be `until`: all processes know that at the same step."""
    from benchmarks.network_bed import Pace

    pace = Pace(rates[0])
    shapes = ((1024, 512), (512,), (512, 512))
    gradients = Gradients(("a", "b", "c"), shapes)
    sync = Synchroniser(auto, Options(limit=60.0), traffic=Traffic(pace=pace))
    sums: list[float] = []
    for place, rate in enumerate(rates):
        pace.change(rate)
        for step in range(steps):
            seed = 10 * len(sums) + dist.get_rank()
            flat = torch.randn(sum(gradients.counts), generator=torch.Generator().manual_seed(seed))
            sync.submit(flat, gradients).wait()
            sums.append(flat.double().sum().item())
            decided = {way.name for one in sync.pilot.history[-1:] for way in one.decision.ways}
            if until and step > 5 and decided == {until[place]}:
                break
    history = [
        (one.step, [way.name for way in one.decision.ways], one.expected, one.seen) for one in sync.pilot.history
    ]
    sync.close()
    return history, sums


def test_another_link_is_another_decision() -> None:
    """A link that becomes a thousand times slower: gradients begin to travel compressed; and the other way around. How many
    steps that takes depends on what else the machine does."""
    ways = (Way(Choice()), Way(Choice(codec("int4"), "scatter"), 2.0))
    wanted = ("none", "int4 scatter", "none")
    found = pool(2).run(piloted, Auto(ways, every=3), (2e10, 2e7, 2e10), 60, wanted)
    assert found[0][0] == found[1][0]  # all decide alike
    assert found[0][1] == found[1][1]  # and sum alike
    along = [set(ways) for _, ways, _, _ in found[0][0]]
    assert [one for one, before in zip(along, [None, *along], strict=False) if one != before] == [
        {one} for one in wanted
    ]


def aside(steps: int) -> tuple[list[float], int]:
    """Means of some steps where nothing pays, and how many of them the backend has made."""
    asked, whole = [0], dist.all_reduce

    def counted(tensor: Any, *others: Any, **named: Any) -> Any:
        asked[0] += tensor.numel() == 1300
        return whole(tensor, *others, **named)

    sync, means = Synchroniser(Auto((Way(Choice()),))), []
    dist.all_reduce = counted
    for step in range(steps):
        flat = torch.randn(1300, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        means.append(sync.wait(sync.submit(flat, Gradients(("a", "b"), ((32, 40), (20,))))).double().sum().item())
    dist.all_reduce = whole
    sync.close()
    return means, asked[0]


def test_where_nothing_pays_the_backend_sums() -> None:
    for means, asked in pool(4).run(aside, 6):
        assert asked == 5  # after one step of ours, which says what residuals may have kept
        for step, mean in enumerate(means):
            parts = [torch.randn(1300, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(4)]
            assert mean == pytest.approx(torch.stack(parts).double().mean(0).sum().item(), abs=1e-3)


def test_a_guard_that_allows_nothing_leaves_sums_exact() -> None:
    ways = (Way(Choice()), Way(Choice(codec("int4"), "scatter"), 1.02))
    found = pool(2).run(piloted, Auto(ways, guard=1e-6, every=3), (2e8,), 6)
    assert all(set(ways) == {"none"} for _, ways, _, _ in found[0][0])
    loose = pool(2).run(piloted, Auto(ways, guard=0.9, every=3), (5e7,), 6)
    assert set(loose[0][0][-1][1]) == {"int4 scatter"}
    shapes = ((1024, 512), (512,), (512, 512))
    count = sum(torch.Size(shape).numel() for shape in shapes)
    for step, total in enumerate(found[0][1]):
        parts = [torch.randn(count, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(2)]
        assert total == pytest.approx(float((parts[0] + parts[1]).double().sum() / 2), abs=1e-2)


def test_input_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InputError, match="ways: is empty"):
        Auto(())
    with pytest.raises(InputError, match="no way is exact"):
        Auto((Way(Choice(codec("int8"))),), guard=0.1)
    with pytest.raises(InputError, match=r"steps: is 0\.5"):
        Way(Choice(), 0.5)
    assert [unit.bucket for unit in units([[(9,)], [(9,)]])] == [0, 1]
    assert Unit(0, ((3, 4), (5,))).counts == (12, 5)
