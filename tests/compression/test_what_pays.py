"""Decisions by size and bandwidth, for plans, and in words: against formulas, the cost model and the real thing."""

from __future__ import annotations

import random
from math import prod

import pytest

import meshwright as mw
from meshwright.compression import codec
from meshwright.compression.auto import Way, usual
from meshwright.compression.auto.microbenchmark import Rehearsal
from meshwright.compression.auto.rules import rules
from meshwright.compression.auto.simulation import Leg, Strand
from meshwright.compression.benchmark import Bench, Speed, measured
from meshwright.compression.planning.grid import MBITS, SIZES, Cell, Grid, explained, link_of, short
from meshwright.compression.planning.plan_gradients import gradients
from meshwright.compression.planning.planned import Accelerated, _link, planned
from meshwright.compression.planning.scaled_costs import MOST, Scaled
from meshwright.compression.sync import Choice
from meshwright.cost.estimate import estimate
from meshwright.cost.layers.collectives import reduce_seconds
from meshwright.cost.step.update import gradient_seconds
from meshwright.errors import InputError
from meshwright.run.parallel.refusals import refuse

Shapes = tuple[tuple[int, ...], ...]
NAMES = ("fp16", "int8", "int4", "onebit")


class Fake:
    """Costs that are given: plain sums take no work, other ways some for each number and send fewer bytes for it."""

    def __init__(self, work: list[float], part: list[float]) -> None:
        self.ways = (Way(Choice()), *(Way(Choice(codec(name))) for name in NAMES))
        self.work = dict(zip(self.ways, (0.0, *work), strict=True))
        self.part = dict(zip(self.ways, (1.0, *part), strict=True))

    def __call__(self, way: Way, shapes: Shapes) -> list[Strand]:
        numbers = sum(map(prod, shapes))
        sent, work = int(6 * numbers * self.part[way]), 1e-5 + self.work[way] * numbers
        return [(Leg(0.0 if way.choice.codec is None else work, sent, way.choice.codec is None, last=True), Leg(0.0))]


@pytest.mark.parametrize("seed", range(20))
def test_a_faster_link_never_needs_fewer_bytes(seed: int) -> None:
    draw = random.Random(seed)
    fake = Fake(
        [draw.uniform(0.1, 10) * 1e-9 for _ in NAMES], sorted((draw.uniform(0.02, 0.6) for _ in NAMES), reverse=True)
    )
    grid = Grid(4, latency=1e-4, cores=2.0, ways=fake.ways, costs=fake)
    kinds = set()
    for size in SIZES:
        row = grid.row(size, MBITS)
        sent = [cell.sent for cell in row]
        assert sent == sorted(sent)
        kinds |= {short(cell.way) for cell in row}
    assert len(kinds) > 1  # it decides indeed


def test_seconds_are_those_of_one_message_after_the_other() -> None:
    """One piece: it is encoded, sent, and is there a latency later. Plain sums take the latency of a tree."""
    fake = Fake([2e-9] * 4, [0.5, 0.25, 0.125, 0.03])
    (cell,) = Grid(4, latency=1e-3, cores=2.0, ways=fake.ways, costs=fake).row(1 << 20, [100.0])
    numbers = (1 << 20) // 4
    assert cell.plain == pytest.approx(6 * numbers * 8 / 100e6 + 4e-3)
    assert short(cell.way) == "onebit"
    assert cell.seconds == pytest.approx(1e-5 + 2e-9 * numbers + int(0.18 * numbers) * 8 / 100e6 + 1e-3)
    assert cell.speed_up == cell.plain / cell.seconds


def test_steps_count_in_the_speed_up() -> None:
    cell = Cell(4096, 100.0, Way(Choice(codec("int4")), 1.25), 1, 10, seconds=0.5, plain=2.0, steps=1.25)
    assert cell.speed_up == 2.0 / (0.5 * 1.25)
    assert cell.to_table()["speed_up"] == cell.speed_up


def test_the_grid_of_this_machine() -> None:
    told: list[str] = []
    found = explained(4, 50.0, 1e-4, lambda name, done, of: told.append(name))
    assert len(told) == len(SIZES)
    for size, cells, detail in zip(SIZES, found["grid"], found["table"], strict=True):
        assert [cell["mbit"] for cell in cells] == list(MBITS)
        assert {cell["bytes"] for cell in (*cells, detail)} == {size}
        for cell in (*cells, detail):
            assert cell["speed_up"] == cell["plain_seconds"] / (cell["seconds"] * cell["steps"])
            plain = 1.5 * size * 8e-6 / cell["mbit"] + 4e-4  # and the work of a mean
            assert plain <= cell["plain_seconds"] < 1.5 * plain + 0.1
            if cell["way"] == "none":
                assert (cell["topology"], cell["speed_up"], cell["sent_bytes"]) == ("all-reduce", 1.0, 1.5 * size)
            else:
                assert cell["speed_up"] > 1 / 0.9
    assert found["grid"][-1][0]["way"] != "none"  # 64 MiB at 10 Mbit/s: 80 seconds as they are


@pytest.mark.parametrize(("way", "near"), [("none", 0.0), ("int8 scatter", 0.01), ("powersgd rank=8 gather", 0.05)])
def test_large_gradients_are_scaled_from_smaller_ones(way: str, near: float) -> None:
    """Bytes against those of the gradient itself, at its full size."""
    used = next(one for one in usual() if one.name == way)
    rehearsal = Rehearsal(3)
    shapes = ((4096, 2500), (2048, 4096), (300,))
    assert sum(map(prod, shapes)) > 4 * MOST
    whole = sum(leg.sent for strand in rehearsal.strands(used.choice, shapes) for leg in strand)
    scaled = sum(leg.sent for strand in Scaled(rehearsal)(used, shapes) for leg in strand)
    assert scaled == pytest.approx(whole, rel=near + 1e-5)
    rehearsed = max(prod(key[2]) for key in rehearsal._known if key[2] not in shapes)
    assert rehearsed < 1.01 * MOST


def test_small_matrices_and_vectors_are_rehearsed_together() -> None:
    """Vectors travel with the first message of PowerSGD, and have no part in the second."""
    used = next(one for one in usual() if one.name == "powersgd rank=8 gather")
    rehearsal = Rehearsal(3)
    matrix, vector, both = (
        rehearsal.strands(used.choice, shapes)[0] for shapes in ([(90, 90)], [(90,)], [(90, 90), (90,)])
    )
    assert len(both) == len(matrix) > len(vector)
    assert sum(leg.sent for leg in both) == sum(leg.sent for leg in (*matrix, *vector))


def job(cluster: str = "4xcpu", model: str = "tiny-llama") -> mw.Job:
    precision = "fp32" if "cpu" in cluster else "bf16"
    return mw.Job(mw.Model.preset(model), mw.Cluster.preset(cluster), 64, precision=precision)


def test_gradients_of_a_plan_are_its_parameters_in_reverse() -> None:
    work = job()
    plan = mw.Plan.of({"zero": 0}, work)
    (pool,) = gradients(work, plan)
    assert [one.layer for one in pool] == [layer.name for layer in reversed(work.model.layers) if layer.parameters]
    assert sum(one.numbers for one in pool) == work.model.parameters
    assert all(sum(map(prod, one.shapes)) == one.numbers for one in pool)
    ready = [one.ready for one in pool]
    assert ready == sorted(ready)
    assert ready[-1] == pytest.approx(estimate(work, plan).pipelines[0].stages[0].backward)


def test_the_link_of_a_cluster_takes_as_long_as_the_cost_model_says() -> None:
    work = job("2x8xh100", "llama3-8b")
    plan = mw.Plan.of({"tp": 2, "zero": 0}, work)
    (pool,) = gradients(work, plan)
    for one in pool:
        moved = one.numbers * one.width
        cost = _link(one).reduce
        ours = cost.byte * 2 * (one.replicas - 1) / one.replicas * moved + cost.latency
        assert ours == pytest.approx(float(reduce_seconds(one.fabric, moved, one.replicas, one.joined)))
    from meshwright.cost.constants import DEFAULT
    from meshwright.cost.runtime import runtime
    from meshwright.cost.step.step import _sites

    pipeline = plan.pipelines[0]
    whole, _ = gradient_seconds(work, pipeline, 0, _sites(work, pipeline, runtime("meshwright"), DEFAULT))
    cost = _link(pool[0]).reduce
    sent = sum(one.numbers * one.width * 2 * (one.replicas - 1) / one.replicas for one in pool)
    assert cost.byte * sent + cost.latency == pytest.approx(whole)


def test_experts_have_replicas_of_their_own() -> None:
    work = job("2x8xh100", "mixtral-8x7b")
    pools = gradients(work, mw.Plan.of({"ep": 8, "zero": 0}, work))
    found = {(one.part, one.replicas) for pool in pools for one in pool}
    assert found == {("dense", 16), ("experts", 2)}
    experts = next(one for pool in pools for one in pool if one.part == "experts")
    assert experts.numbers == 3 * 4096 * 14336  # one expert of Mixtral: gate, up and down


def test_a_slow_link_compresses_a_plan_and_a_fast_one_does_not() -> None:
    work = job()
    plan = mw.Plan.of({"zero": 0}, work)
    slow = planned(work, plan, usual(), "meshwright", (20.0, 1e-4), lambda *_: None)
    assert slow.speed_up > 3
    assert slow.speed_up == slow.plain / (slow.seconds * slow.steps)
    named = mw.Plan.of({**plan.to_table(), "compression": slow.to_table()["compression"]})
    refuse(named)  # raises what could not be run
    covered = {layer for rule in named.compression for layer in layers(work, rule.layers)}
    chosen = {name for row in slow.rows if row.way and row.way.choice.codec for name in row.layers}
    assert covered == chosen
    assert {"embed", "block.2.mlp"} <= covered

    fast = planned(work, plan, usual(), "meshwright", (1e7, 0.0), lambda *_: None)
    assert fast.compression == ()
    assert fast.speed_up == 1.0
    assert all(row.way is not None and row.way.choice.codec is None and row.why for row in fast.rows)


def layers(work: mw.Job, text: str) -> list[str]:
    from meshwright.plans.spans import layers_of

    return [layer.name for layer in layers_of(work.model, text) if layer.parameters]


@pytest.mark.parametrize(
    ("short_plan", "why"),
    [
        ({"tp": 4}, "one replica"),
        ({"zero": 3, "micro_batches": 4}, "ZeRO-3"),
        ({"zero": 2, "micro_batches": 2}, "ZeRO-2"),
    ],
)
def test_what_is_not_summed_once_a_step_says_why(short_plan: dict[str, int], why: str) -> None:
    work = job()
    found = planned(work, mw.Plan.of(short_plan, work), usual(), "meshwright", (1.0, 1e-3), lambda *_: None)
    assert found.compression == ()
    assert all(why in row.why for row in found.rows)
    assert sum(len(row.layers) for row in found.rows) == sum(1 for layer in work.model.layers if layer.parameters)


@pytest.mark.parametrize("short_plan", [{"zero": 1}, {"zero": 3, "micro_batches": 1}])
def test_shards_go_to_their_owners_once(short_plan: dict[str, int]) -> None:
    """Half the bytes of a sum, and no codec that needs whole gradients."""
    work = job()
    plan = mw.Plan.of(short_plan, work)
    found = planned(work, plan, usual(), "meshwright", (20.0, 1e-4), lambda *_: None)
    assert {rule.options.get("topology") for rule in found.compression} == {"scatter"}
    refuse(mw.Plan.of({**plan.to_table(), "compression": found.to_table()["compression"]}))
    fast = planned(work, plan, usual(), "meshwright", (1e7, 0.0), lambda *_: None)
    whole = planned(work, mw.Plan.of({"zero": 0}, work), usual(), "meshwright", (1e7, 0.0), lambda *_: None)
    for one, other in zip(fast.rows, whole.rows, strict=True):
        assert (one.layers, one.sent) == (other.layers, pytest.approx(other.sent / 2, abs=1))


def test_what_a_run_refuses_is_not_chosen() -> None:
    work = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("4xh100"), 64, precision="fp16")
    found = planned(work, mw.Plan.of({"zero": 0}, work), usual(), "meshwright", (1.0, 1e-3), lambda *_: None)
    assert found.compression == ()
    assert all("fp16" in row.why for row in found.rows)


def test_a_layer_goes_one_way_as_its_rule_says() -> None:
    """Experts have other replicas than the rest of their layer, and a plan names layers."""
    work = mw.Job(mw.Model.preset("tiny-moe"), mw.Cluster.preset("4x1xcpu"), 64, precision="fp32")
    plan = mw.Plan.of({"ep": 2, "zero": 0}, work)
    found = planned(work, plan, usual(), "meshwright", (20.0, 1e-4), lambda *_: None)
    told: dict[str, set[str]] = {}
    for row in found.rows:
        for name in row.layers:
            told.setdefault(name, set()).add(short(row.way) if row.way else "alone")
    assert {"dense", "experts"} == {row.part for row in found.rows}
    ruled = {name: rule.algorithm for rule in found.compression for name in layers(work, rule.layers)}
    for name, ways in told.items():
        (way,) = ways
        assert way.split()[0] == ruled.get(name, "none")


def test_on_an_accelerator_kernels_go_at_the_speed_of_its_memory() -> None:
    """The legs and bytes of a processor, and the time that a sheet of paper gives for one encoding, two decodings and the
    copies of what leaves and arrives."""
    h100 = mw.Cluster.preset("1xh100").device(0)
    way = Way(Choice(codec("int8"), "scatter", 1 << 20))
    rehearsed = Rehearsal(4).strands(way.choice, ((1 << 22,),))
    found = Accelerated(lambda *_: rehearsed, h100)(way, ((1 << 22,),))
    assert [leg.sent for strand in found for leg in strand] == [leg.sent for strand in rehearsed for leg in strand]
    message = codec("int8").bytes([1 << 22])
    sent = 2 * 3 / 4 * message
    seconds = 5.5 * (4 << 22) / h100.memory_bandwidth + 2 * sent / h100.host_bandwidth
    assert sum(leg.work for strand in found for leg in strand) == pytest.approx(seconds, rel=0.02)
    plain = Accelerated(lambda *_: rehearsed, h100)(Way(Choice()), ((1 << 22,),))
    assert not any(leg.work for strand in plain for leg in strand)


def test_a_plan_for_accelerators_is_not_judged_by_this_processor() -> None:
    """At 25 Gbit/s a core of a server is too slow to compress for an H100, whose kernels are not."""
    work = mw.Job(mw.Model.preset("gpt2-large"), mw.Cluster.preset("4x1xh100"), 16, seq_len=1024, precision="bf16")
    plan = mw.Plan.of({"zero": 0}, work)
    found = planned(work, plan, usual(), "meshwright", (25e3, 2e-5), lambda *_: None)
    assert "H100" in found.codecs
    assert found.speed_up > 1.3
    on_processors = mw.Job(work.model, mw.Cluster.preset("4x1xcpu"), 16, seq_len=1024, precision="bf16")
    other = mw.Plan.of({"zero": 0}, on_processors)
    timed = planned(on_processors, other, usual(), "meshwright", (25e3, 2e-5), lambda *_: None)
    assert "this machine" in timed.codecs
    assert timed.speed_up < 1.1  # computing takes a thousand times as long


def test_rules_name_what_differs_from_the_usual() -> None:
    way = next(way for way in usual() if way.name == "powersgd rank=8 gather")
    (rule,) = rules({"embed": way})
    assert (rule.algorithm, rule.options) == ("powersgd", {"rank": 8, "topology": "gather"})


def test_bytes_of_a_benchmark() -> None:
    """Against what the algorithms must read and write, counted by hand for 2^18 numbers."""
    bench = Bench(1 << 20)
    size = 1 << 20
    half = bench.speed("fp16")
    assert (half.encode_bytes, half.decode_bytes) == (size + size // 2 + 16, size + size // 2 + 16)
    assert half.ratio == pytest.approx(2, rel=1e-3)
    onebit = bench.speed("onebit")  # a pass for the scale, and one that packs
    assert onebit.encode_bytes == pytest.approx(2 * size + size // 32, rel=1e-3)
    low = bench.speed("powersgd")  # two products read a matrix of 512 x 512; thin factors of rank 4 are written
    assert low.encode_bytes == 2 * size + 4 * 2 * 512 * 4
    assert low.decode_bytes == size + 4 * 2 * 512 * 4
    kept = Bench(1 << 20, feedback=True).speed("fp16")  # the residual is read and written besides
    assert kept.encode_bytes == half.encode_bytes + 2 * size
    assert bench.copy() > 1e8


def test_a_benchmark_as_facts() -> None:
    told: list[tuple[str, int, int]] = []
    found = measured(["int8", "fp16", "int8"], 1, lambda *now: told.append(now))
    assert [one["codec"] for one in found["codecs"]] == ["int8", "fp16"]
    assert told == [("copying", 0, 3), ("int8", 1, 3), ("fp16", 2, 3)]
    for one in found["codecs"]:
        for what in ("encode", "decode"):
            assert one[f"{what}_bytes_per_second"] == one[f"{what}_bytes"] / one[what]
    with pytest.raises(InputError, match="unknown codec 'fp17'"):
        measured(["fp17"], 1, lambda *_: None)
    assert Speed("a", 2.0, 0.5, 0.25, 10, 20).decode_rate == 80.0


def test_a_link_of_a_given_bandwidth() -> None:
    link = link_of(5, 8000.0, 2e-4)
    assert link.messages.byte == pytest.approx(1e-9)
    assert link.reduce.latency == pytest.approx(6 * 2e-4)  # up and down a tree of three levels
