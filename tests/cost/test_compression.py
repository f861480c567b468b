"""Compressed gradients, against the collectives priced by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

import meshwright as mw
from meshwright.compression import codec
from meshwright.cost.compression import Codec, catalogue, offering
from meshwright.cost.constants import DEFAULT
from meshwright.cost.estimate import estimate
from meshwright.cost.layers.collectives import reduce_parts
from meshwright.cost.layers.placement import StagePlacement
from meshwright.cost.memory.device_memory import plan_memory
from meshwright.cost.runtime import RUNTIMES
from meshwright.plans import Compression
from meshwright.plans.rules import check

SLOW = replace(RUNTIMES["meshwright"], overlap_gradients=False)  # nothing hides the gradients


def job() -> mw.Job:
    return mw.Job(
        mw.Model.preset("gpt2"), mw.Cluster.preset("4x8xv100-32gb"), global_batch=128, seq_len=1024, precision="fp16"
    )


def seconds(codec: Codec, layers: str) -> tuple[float, float]:
    """That gradients delay the step, without and with the codec."""
    one = job()
    plan = mw.Plan.of({"micro_batch": 4, "zero": 0}, one)
    plans = [plan, changed(plan, compression=(Compression(layers=layers, algorithm=codec.name),))]
    for some in plans:
        check(some, one)
    runtime = replace(SLOW, codecs=(codec,))
    found = [estimate(one, some, runtime).pipelines[0] for some in plans]
    return found[0].exposed[0], found[1].exposed[0]


@pytest.mark.parametrize(("part", "per_byte"), [(1.0, 0.0), (0.25, 0.0), (0.01, 2e-11), (0.5, 1e-9)])
@pytest.mark.parametrize("layers", ["embed..head", "block.0..block.5", "block.3.mlp"])
def test_less_travels_and_the_codec_takes_its_time(part: float, per_byte: float, layers: str) -> None:
    plain, shrunk = seconds(Codec("test", part, per_byte), layers)
    one = job()
    model = one.model
    first, _, last = layers.partition("..")
    held = model.layers[model.index(first) : model.index(last or first, last=True) + 1]
    site = StagePlacement.of(one, tuple(range(32)), 0, SLOW, DEFAULT)
    moved = sum(layer.parameters for layer in held) * site.gradient_bytes
    per, _ = reduce_parts(site.fabric, 32, tuple(min(tier.span, 32) for tier in site.fabric.tiers))
    saved = moved * float(per) * (1 - part) - moved * per_byte
    assert plain - shrunk == pytest.approx(saved, rel=1e-9, abs=1e-15)


def test_a_codec_that_the_runtime_lacks_changes_nothing() -> None:
    one = job()
    plan = changed(mw.Plan.of({}, one), compression=(Compression(layers="embed..head", algorithm="other"),))
    assert estimate(one, plan, SLOW).step_seconds == estimate(one, mw.Plan.of({}, one), SLOW).step_seconds


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_that_are_scattered_all_along_are_left_alone(zero: int) -> None:
    one = job()
    plan = mw.Plan.of({"zero": zero}, one)
    other = changed(plan, compression=(Compression(layers="embed..head", algorithm="test"),))
    runtime = replace(SLOW, codecs=(Codec("test", 0.1, 1e-9),))
    assert estimate(one, other, runtime).step_seconds == estimate(one, plan, runtime).step_seconds


@pytest.mark.parametrize("cluster", ["2x8xh100", "2xcpu"])
def test_the_catalogue_knows_the_codecs_bytes(cluster: str) -> None:
    one = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset(cluster), 16)
    for offered in catalogue(one):
        assert offered.part == pytest.approx(codec(offered.name).bytes([1 << 22]) / (4 << 22), rel=0.01)
        assert offered.seconds_per_byte > 0


def test_plans_that_name_a_codec_are_priced_and_no_search_chooses_one_unasked() -> None:
    """It pays between servers of gaming cards, and not between those with fast networks."""
    for cluster, precision, pays in (("4x4xtitan-xp", "fp32", True), ("4x8xv100-32gb", "fp16", False)):
        one = mw.Job(mw.Model.preset("gpt2"), mw.Cluster.preset(cluster), 128, seq_len=1024, precision=precision)
        plan = mw.Plan.of({"micro_batch": 1, "zero": 0}, one)
        named = changed(plan, compression=(Compression(layers="embed..head", algorithm="int8"),))
        assert (estimate(one, named, SLOW).step_seconds < estimate(one, plan, SLOW).step_seconds) == pays
    assert not any(runtime.codecs for runtime in RUNTIMES.values())
    assert {each.name for each in offering(one, SLOW).codecs} == {"bf16", "fp16", "int8", "int4"}


@pytest.mark.parametrize(("table", "part"), [({"zero": 0}, 1), ({"zero": 1}, 1), ({"zero": 1, "zero_group": 8}, 1 / 8)])
def test_residuals_take_memory(table: dict[str, int], part: float) -> None:
    """Four bytes for every number that a process encodes; between sets of shards those of its own."""
    one = job()
    plan = mw.Plan.of({"micro_batch": 4, **table}, one)
    named = changed(plan, compression=(Compression(layers="block.0..block.11", algorithm="int8"),))
    counted = sum(layer.parameters for layer in one.model.layers if layer.name.startswith("block."))
    more = plan_memory(named, one)[0].total - plan_memory(plan, one)[0].total
    assert more == pytest.approx(4 * counted * part, rel=1e-6)
