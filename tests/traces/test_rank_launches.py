"""Stretches in which a device waits for its host, counted nanosecond by nanosecond on generated traces."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.traces.rank.device_activity import work_of
from meshwright.traces.rank.issued import issued
from meshwright.traces.rank.timeline.host_bound import Launches, launches_of
from tests.traces.test_breakdown import event, trace_of


def found_in(events: list[dict[str, Any]]) -> Launches:
    trace = trace_of(events)
    return launches_of(trace, work_of(trace)[0], issued(trace))


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8), st.integers(1, 30)), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60)), max_size=3),
)
def test_gaps_of_generated_work(made: list[tuple[int, int, int]], waits: list[tuple[int, int]]) -> None:
    """Kernels in order on one stream: each begins when it is issued and the one before it is done."""
    events, kernels, host, device = [], [], 0, 0
    for number, (pause, call, run) in enumerate(made):
        host += pause
        events.append(event("cuda_runtime", "cudaLaunchKernel", host, call, 1, 1, correlation=number))
        start = max(host + call, device)
        kernels.append((host, host + call, start, run))
        events.append(event("kernel", "k", start, run, correlation=number))
        host, device = host + call, start + run
    events += [event("cuda_runtime", "cudaStreamSynchronize", at, dur, 1, 2, correlation=900 + at) for at, dur in waits]
    late = np.zeros(kernels[-1][2] + 1, np.bool_)
    for (_, _, begun, run), (called, returned, start, _) in pairwise(kernels):
        if called > begun + run:  # the host had not even called when the device ran dry
            late[begun + run : min(returned, start)] = True
    synced = 0
    edges = np.flatnonzero(np.diff(np.append(np.append(False, late), False).astype(int)))
    for start, end in edges.reshape(-1, 2):
        synced += (end - start) * any(at <= start <= at + dur for at, dur in waits)
    found = found_in(events)
    assert found.idle == late.sum()
    assert found.synchronised == synced
    assert found.count == len(found.stretches)
    assert sum(stretch.idle for stretch in found.stretches) == found.idle
    for stretch in found.stretches:
        assert stretch.idle == late[stretch.start : stretch.end].sum()
        assert stretch.kernels == sum(stretch.start <= start < stretch.end for _, _, start, _ in kernels)
        assert stretch.idle_share > 1 / 3
    for one, other in pairwise(found.stretches):
        assert not late[one.end : other.start].any()


def slowly(count: int, pause: int, start: int = 0, first: int = 0) -> list[dict[str, Any]]:
    """Kernels of 10 ns, each launched after a pause, inside operators that take the pause."""
    events = []
    for number in range(first, first + count):
        at = start + (number - first) * pause
        events += [
            event("cpu_op", "aten::slow", at, pause, 1, 1),
            event("cpu_op", "aten::inner", at + 10, pause // 2, 1, 1),
            event("cuda_runtime", "cudaLaunchKernel", at + pause - 5, 5, 1, 1, correlation=number),
            event("kernel", "k", at + pause, 10, correlation=number),
        ]
    return events


def test_slow_launching_names_its_operators() -> None:
    found = found_in(slowly(11, 100))
    (stretch,) = found.stretches
    assert (stretch.start, stretch.end) == (110, 1100)
    assert (stretch.idle, stretch.kernels, stretch.is_wait) == (900, 9, False)
    assert stretch.filled_by == (("aten::slow", 490), ("aten::inner", 500))[::-1]
    assert stretch.kernels_per_ms == pytest.approx(9 / 990 * 1e6)
    assert (stretch.median, stretch.waits_in) == (10, "")


def test_a_wait_for_the_device_is_told_apart() -> None:
    """The host reads a value of the device, then goes on: the device idles since it had waited."""
    events = [
        event("cuda_runtime", "cudaLaunchKernel", 0, 5, 1, 1, correlation=1),
        event("kernel", "k", 10, 1000, correlation=1),
        event("cpu_op", "aten::item", 20, 1200, 1, 1),
        event("cuda_runtime", "cudaStreamSynchronize", 30, 1000, 1, 1, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 1900, 100, 1, 1, correlation=3),
        event("kernel", "k", 2000, 1000, correlation=3),
    ]
    (stretch,) = found_in(events).stretches
    assert (stretch.start, stretch.end, stretch.is_wait, stretch.waits_in) == (1010, 2000, True, "aten::item")
    assert stretch.filled_by == (("outside operators", 780), ("aten::item", 210))


def test_busy_devices_have_no_stretches() -> None:
    events = [event("cuda_runtime", "cudaLaunchKernel", i, 1, 1, 1, correlation=i) for i in range(5)]
    events += [event("kernel", "k", 100 + 50 * i, 40, correlation=i) for i in range(5)]
    assert found_in(events) == Launches(0, 0, (), 0)


def test_the_longest_are_kept_and_all_are_counted() -> None:
    events = []
    for i in range(30):
        events += slowly(2, 100 + i, start=i * 100_000, first=2 * i)
        events.append(event("kernel", "long", i * 100_000 + 2 * (100 + i) + 10, 50_000, correlation=1000 + i))
    found = found_in(events)
    assert found.count > len(found.stretches) == 20
    assert found.idle > sum(stretch.idle for stretch in found.stretches)
