"""Compressed gradients, against the collectives priced by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

import meshwright as mw
from meshwright.cost.collectives import reduce_parts
from meshwright.cost.compression import Codec
from meshwright.cost.constants import DEFAULT
from meshwright.cost.estimate import estimate
from meshwright.cost.runtime import RUNTIMES
from meshwright.cost.site import Site
from meshwright.plan import Compression
from meshwright.plan.rules import check

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
    site = Site.of(one, tuple(range(32)), 0, SLOW, DEFAULT)
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
