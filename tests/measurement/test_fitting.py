"""Curves fitted to timings that a known curve made: the curve must come back."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.clusters.measurements import MeasuredLink
from meshwright.measurement import fitting, links
from meshwright.measurement.samples import Sample
from meshwright.measurement.timing import Timing

SHAPES = [(m, k, n) for m in (512, 2048, 8192) for k in (512, 2048, 8192) for n in (512, 2048, 8192)]


def noisy(seconds: float, stream: random.Random, noise: float) -> Timing:
    return Timing(seconds * math.exp(stream.gauss(0, noise)), noise)


@settings(max_examples=15, deadline=None)
@given(st.floats(1e12, 1e15), st.floats(1, 200), st.floats(1e-6, 1e-5), st.integers(0, 100))
def test_products(rate: float, half_k: float, floor: float, seed: int) -> None:
    """Rates within 2 % where timings are off by 1 %: what large products take is what matters."""
    stream, memory = random.Random(seed), 4e12
    samples = []
    for m, k, n in SHAPES:
        computing = 2.0 * m * (k + half_k) * n / rate
        loading = 2.0 * (m * k + k * n + m * n) / memory
        seconds = math.hypot(computing, loading) + floor
        samples.append(Sample("product bf16", {"m": m, "k": k, "n": n}, noisy(seconds, stream, 0.01)))
    found = fitting.products(samples, memory, 2.0)
    m, k, n = 4096, 4096, 14336
    ours = math.hypot(
        2.0 * (m + found.half) * (k + found.half_k) * (n + found.half) / found.rate,
        2.0 * (m * k + k * n + m * n) / memory,
    )
    theirs = math.hypot(2.0 * m * (k + half_k) * n / rate, 2.0 * (m * k + k * n + m * n) / memory)
    assert ours + found.floor == pytest.approx(theirs + floor, rel=0.03)


def test_attention() -> None:
    stream = random.Random(1)
    known = ((600e12, 400.0), (500e12, 1200.0))
    both = []
    for (rate, half), passes in zip(known, (1.0, 2.5), strict=True):
        samples = []
        for heads, size in ((32, 64), (32, 128), (8, 128)):
            for length in (1024, 4096, 16384):
                flops = passes * 4 * heads * size * length * (length + 1) / 2
                reached = rate * length / (length + half) * min(size / 128, 1.0) ** 0.4
                timing = noisy(flops / reached + (2 if passes > 1 else 1) * 3e-6, stream, 0.005)
                facts = {"length": length, "heads": heads, "size": size, "batch": 1}
                samples.append(Sample("attention", facts, timing))
        both.append(samples)
    found = fitting.attention(both[0], both[1], 3e-6)
    for seen, (rate, _) in zip(found.rate, known, strict=True):
        assert seen == pytest.approx(rate, rel=0.03)
    assert found.head_power == pytest.approx(0.4, abs=0.03)


def test_links() -> None:
    """All kinds of collectives over two and eight members, by the formulas of rings."""
    stream = random.Random(2)
    known = MeasuredLink(reduce=100e9, gather=80e9, exchange=60e9, send=120e9, step=3e-6, start=15e-6)
    samples = []
    for members in (2, 8):
        part = (members - 1) / members
        for size in (2**12, 2**18, 2**24, 2**28):
            seconds = {
                "reduce": 2 * part * size / known.reduce + 2 * (members - 1) * known.step + known.start,
                "gather": part * size / known.gather + (members - 1) * known.step + known.start,
                "scatter": part * size / known.gather + (members - 1) * known.step + known.start,
                "exchange": part * size / known.exchange + known.step + known.start,
                "send": size / known.send + known.step,
            }
            for kind, value in seconds.items():
                facts = {"bytes": float(size), "members": float(members)}
                samples.append(Sample(f"inside nodes: {kind}", facts, noisy(value, stream, 0.005)))
    found = links.link(samples)
    for name in ("reduce", "gather", "exchange", "send", "step", "start"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=0.05), name


@pytest.mark.parametrize(
    ("nodes", "groups"),
    [
        ([0], []),
        ([0, 0, 0, 0], [((0, 1), (2, 3)), ((0, 1, 2, 3),)]),
        ([0, 1, 2], [((0, 1, 2),)]),
        ([0, 0, 1, 1], [((0, 1), (2, 3)), ((0, 2), (1, 3))]),
    ],
)
def test_every_tier_of_links_is_measured(nodes: list[int], groups: list[object]) -> None:
    assert [tier.groups for tier in links.tiers(nodes)] == groups


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(1e-6, 1e-1), min_size=9, max_size=9))
def test_noise_makes_no_device_infinite(seconds: list[float]) -> None:
    """Timings that have nothing to do with the work: a rate stays near the best that was seen."""
    shapes = SHAPES[:9]
    samples = [
        Sample("product", {"m": m, "k": k, "n": n}, Timing(s, 0.0))
        for (m, k, n), s in zip(shapes, seconds, strict=True)
    ]
    best = max(2.0 * m * k * n / s for (m, k, n), s in zip(shapes, seconds, strict=True))
    assert fitting.products(samples, 1e12, 4.0).rate <= 4 * best
