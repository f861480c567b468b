"""Steps beyond the proven space: fractions of offload against every fraction, swaps against none, compression against
every set of layers."""

from __future__ import annotations

from dataclasses import replace as replace_runtime
from itertools import combinations
from typing import Any

import pytest
from msgspec.structs import replace

import meshwright as mw
from meshwright.cost.compression import Codec
from meshwright.cost.constants import DEFAULT
from meshwright.cost.estimate import estimate
from meshwright.cost.runtime import RUNTIMES
from meshwright.plans import Compression, Plan, Span
from meshwright.plans.rules import check
from meshwright.search.planner import plan
from meshwright.search.refine.offload import trimmed, with_spans
from meshwright.search.refine.refine import compressed
from meshwright.search.refine.swap import swapped

OURS = RUNTIMES["meshwright"]


def job(model: str, cluster: str, batch: int, **more: Any) -> mw.Job:
    return mw.Job(mw.Model.preset(model), mw.Cluster.preset(cluster), global_batch=batch, **more)


def with_fraction(plan: Plan, name: str, fraction: float) -> Plan:
    def change(_: object, __: int, span: Span) -> Span:
        return replace(span, offload=replace(span.offload, **{name: fraction}))

    return with_spans(plan, change)


@pytest.mark.parametrize("name", ["optimizer", "activations"])
def test_no_fraction_that_fits_is_faster(name: str) -> None:
    one = job("llama3-8b", "8xrtx4090", 64, seq_len=4096)
    zero, recompute = (3, "full") if name == "optimizer" else (3, "selective")
    away = {"optimizer": 1.0} if name == "optimizer" else {"activations": 1.0, "optimizer": 1.0}
    start = mw.Plan.of({"zero": zero, "recompute": recompute, "offload": away, "micro_batch": 1}, one)
    assert estimate(one, start).fits
    seconds, found = trimmed(one, start, estimate(one, start).step_seconds, OURS, DEFAULT)
    check(found, one)
    assert estimate(one, found).fits
    assert estimate(one, found).step_seconds == seconds
    for part in range(129):
        other = estimate(one, with_fraction(found, name, part / 128))
        assert not other.fits or other.step_seconds >= seconds


def test_what_needs_no_host_is_left_alone() -> None:
    one = job("gpt2", "8xh100", 64)
    start = mw.Plan.of({"zero": 1}, one)
    seconds = estimate(one, start).step_seconds
    assert trimmed(one, start, seconds, OURS, DEFAULT) == (seconds, start)


def swapping_job() -> tuple[mw.Job, Plan]:
    """Eight stages of equal length; early ones hold more micro-batches, and park them on the host."""
    one = job("gpt2-xl", "8xv100-32gb", 512, seq_len=1024, precision="fp16")
    start = mw.Plan.of({"pp": 8, "schedule": "1f1b", "micro_batch": 16, "recompute": "selective"}, one)
    stages = start.pipelines[0].stages

    def change(group: tuple[int, int], _: int, span: Span) -> Span:
        return replace(span, offload=replace(span.offload, activations=1.0)) if group[1] < 2 else span

    assert len(stages) == 8
    return one, with_spans(start, change)


def test_devices_with_room_take_what_others_would_park_on_the_host() -> None:
    one, start = swapping_job()
    before = estimate(one, start)
    assert before.fits
    seconds, found = swapped(one, start, OURS, DEFAULT)
    check(found, one)
    after = estimate(one, found)
    assert after.fits
    assert after.step_seconds == seconds < before.step_seconds
    assert any(span.swap for stage in found.pipelines[0].stages for span in stage.spans)


def test_a_plan_may_not_swap_where_that_is_forbidden() -> None:
    one = job("gpt2-xl", "8xv100-32gb", 512, seq_len=1024, precision="fp16")
    fixed = {"pp": 8, "schedule": "1f1b", "micro_batch": 16, "recompute": "none"}
    free, kept = plan(one, fix=fixed, forbid=["uneven"]), plan(one, fix=fixed, forbid=["uneven", "swap"])
    assert free.estimate.step_seconds <= kept.estimate.step_seconds
    assert not any(span.swap for stage in kept.plan.pipelines[0].stages for span in stage.spans)


def slow_network() -> mw.Job:
    return job("gpt2-large", "4x4xtitan-xp", 16, seq_len=1024, precision="fp32")


def test_gradients_are_compressed_where_the_network_is_slow() -> None:
    one = slow_network()
    codec = Codec("quarter", part=0.25, seconds_per_byte=1e-12)
    offered = replace_runtime(OURS, codecs=(codec,))
    plain, found = plan(one), plan(one, offered)
    check(found.plan, one)
    assert {rule.algorithm for rule in found.plan.compression} == {"quarter"}
    assert found.estimate.step_seconds < plain.estimate.step_seconds
    assert estimate(one, found.plan, offered).step_seconds == found.estimate.step_seconds
    same = plan(one, offered, forbid=["compression"])
    assert not same.plan.compression
    assert same.estimate.step_seconds == plain.estimate.step_seconds


def test_no_choice_of_kinds_is_faster() -> None:
    """The step by step choice, against every set of kinds of layers."""
    one = slow_network()
    start = mw.Plan.of({"micro_batch": 1, "recompute": "full"}, one)
    codec = Codec("dear", part=0.5, seconds_per_byte=4e-10)
    offered = replace_runtime(OURS, codecs=(codec,), overlap_gradients=False)
    seconds, found = compressed(one, start, estimate(one, start, offered).step_seconds, offered, DEFAULT)
    kinds = sorted({layer.kind for layer in one.model.layers if layer.parameters})
    every = []
    for count in range(len(kinds) + 1):
        for some in combinations(kinds, count):
            rules = tuple(
                Compression(layers=layer.name, algorithm="dear") for layer in one.model.layers if layer.kind in some
            )
            every.append(estimate(one, replace(start, compression=rules), offered).step_seconds)
    assert seconds == pytest.approx(min(every), rel=1e-12)
    assert estimate(one, found, offered).step_seconds == seconds


def test_a_codec_that_takes_too_long_is_not_used() -> None:
    one = slow_network()
    offered = replace_runtime(OURS, codecs=(Codec("slow", part=0.25, seconds_per_byte=1e-6),))
    assert not plan(one, offered).plan.compression
