"""Fit the curves of `cost/layers/operators.py` to timings.

Every fit minimises the mean distance of logarithms, so that one outlier moves it little. It steps along one parameter
at a time: curves are smooth and have at most four.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshwright.clusters.measurements import Attention, Products
from meshwright.measurement.samples import Sample

Array = Any
Curve = Callable[[Sequence[float]], Array]
_ROUNDS = 60
_BEYOND = 4.0  # times the best rate that was measured: no device is faster beyond its samples
_LARGE = 1 / 3  # share of a kind's samples, the largest ones, from which rates are read


def fitted(
    curve: Curve, seen: Sequence[float], start: Sequence[float], weights: Sequence[float], rates: int = 0
) -> list[float]:
    """Return the positive parameters with which a curve fits the measured values best.

    The first `rates` of them start at the best measured rate and end near it: noise must not make a device infinitely
    fast.

    >>> x = np.array([1.0, 10.0, 100.0])
    >>> found = fitted(lambda p: p[0] + x / p[1], [3.0, 12.0, 102.0], [1.0, 2.0], [1, 1, 1])
    >>> [round(value, 2) for value in found]
    [2.0, 1.0]
    """
    logs, weight = np.log(np.asarray(seen)), np.asarray(weights, dtype=float)

    def distance(parameters: Sequence[float]) -> float:
        return float((weight * np.abs(np.log(curve(parameters)) - logs)).sum())

    best, least, steps = list(start), distance(start), [math.log(2.0)] * len(start)
    for _ in range(_ROUNDS * len(start)):
        moved = False
        for i, step in enumerate(steps):
            for factor in (math.exp(step), math.exp(-step)):
                tried = [value * factor if i == j else value for j, value in enumerate(best)]
                if i < rates and tried[i] > _BEYOND * start[i]:
                    continue
                if (found := distance(tried)) < least:
                    best, least, moved = tried, found, True
                    break
        if not moved:
            steps = [step / 2 for step in steps]
        if max(steps) < 1e-4:
            break
    return best


def products(samples: Sequence[Sample], memory: float, size: float) -> Products:
    """Return the matmul curve of one precision. `memory` is in bytes/s, `size` is bytes per number."""
    m, k, n = (np.array([sample.facts[name] for sample in samples]) for name in "mkn")
    seen = [sample.timing.seconds for sample in samples]

    def curve(p: Sequence[float]) -> Array:
        computing = 2 * (m + p[2]) * (k + p[1]) * (n + p[2]) / p[0]
        loading = size * (m * k + k * n + m * n) / memory
        return np.sqrt(computing**2 + loading**2) + p[3]

    fastest = max(2 * m * k * n / seen)
    return Products(*map(float, fitted(curve, seen, [fastest, 30.0, 10.0, min(seen) / 2], _heavy(seen), rates=1)))


def attention(forward: Sequence[Sample], backward: Sequence[Sample], floor: float) -> Attention:
    """Return the attention curve of one precision; both passes have the same shapes."""
    found = [_attention(samples, passes, floor) for samples, passes in ((forward, 1.0), (backward, 2.5))]
    rate, keys, rows, power = zip(*found, strict=True)
    return Attention((rate[0], rate[1]), (keys[0], keys[1]), (rows[0], rows[1]), sum(power) / 2)


def _attention(samples: Sequence[Sample], passes: float, floor: float) -> list[float]:
    length, heads, size, batch = (
        np.array([sample.facts[name] for sample in samples]) for name in ("length", "heads", "size", "batch")
    )
    flops = passes * 4 * batch * heads * size * length * (length + 1) / 2
    rows = batch * heads * length
    seen = [sample.timing.seconds for sample in samples]

    def curve(p: Sequence[float]) -> Array:
        rate = p[0] * length / (length + p[1]) * rows / (rows + p[2]) * np.minimum(size / 128, 1.0) ** p[3]
        return flops / rate + (2 if passes > 1 else 1) * floor

    return fitted(curve, seen, [max(flops / seen), 100.0, 1000.0, 0.3], _heavy(seen), rates=1)


def rate_of_passes(samples: Sequence[Sample]) -> float:
    """Return bytes/s of the largest sample."""
    by_size = sorted(samples, key=lambda sample: -sample.facts["bytes"])
    large = by_size[: max(1, round(len(by_size) * _LARGE))]
    return float(np.median([sample.facts["bytes"] / sample.timing.seconds for sample in large]))


def cached_passes(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Return bytes/s inside the cache, bytes/s beyond it, and the size of the cache in bytes.

    >>> from meshwright.measurement.timing import Timing
    >>> moved = [2.0**n for n in range(14, 30)]
    >>> seconds = [1e-6 + min(b, 2**24) / 80e9 + max(b - 2**24, 0) / 10e9 for b in moved]
    >>> samples = [Sample("addition", {"bytes": b}, Timing(s, 0.0)) for b, s in zip(moved, seconds)]
    >>> [f"{value:.0e}" for value in cached_passes(samples)]
    ['8e+10', '1e+10', '2e+07']
    """
    moved = np.array([sample.facts["bytes"] for sample in samples])
    seen = [sample.timing.seconds for sample in samples]

    def curve(p: Sequence[float]) -> Array:
        beyond = np.maximum(moved - p[2], 0.0)
        return p[3] + (moved - beyond) / p[0] + beyond / p[1]

    start = [max(moved / seen), moved[-1] / seen[-1], float(np.median(moved)), min(seen) / 2]
    cached, memory, cache, _ = fitted(curve, seen, start, [1.0] * len(seen), rates=2)
    if cache >= max(moved):  # no sample was larger than the cache
        memory = cached
    return float(cached), float(min(memory, cached)), float(cache)


def _heavy(seen: Sequence[float]) -> list[float]:
    """Return weights of samples: longer ones count more, because a step is made of them."""
    return [second**0.25 for second in seen]
