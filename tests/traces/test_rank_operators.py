"""Operators against plain loops over json.loads, on generated and on real traces."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.native import BuildError
from meshwright.traces.rank import nesting
from meshwright.traces.rank.issued import issued
from meshwright.traces.rank.nesting import nest, threads_of
from meshwright.traces.rank.operators.operators import operators_of
from meshwright.traces.rank.operators.roofline import roofline
from meshwright.traces.reading import Category, read_trace
from tests.conftest import ROOT
from tests.traces.test_breakdown import event, trace_of

TRACES = ROOT / "tests/data/traces"
REAL = ["tracelens/h100_bert_small", "tracelens/mi300_bert_small", "hta/a100_ddp_resnet_2rank_rank0",
        "hta/amd_mi250_minitoy", "kineto/resnet50_2021_oldschema_memory"]  # fmt: skip


def plainly(spans: list[tuple[int, int, int]]) -> list[int]:
    """The place of each span's parent: a stack per thread. Spans are (thread, start, end), in order."""
    parents, open_, ends = [], [], {}
    for place, (thread, start, end) in enumerate(spans):
        open_ = [other for other in open_ if spans[other][0] == thread and ends[other] > start]
        parents.append(open_[-1] if open_ else -1)
        ends[place] = min([max(end, start + 1), *(ends[other] for other in open_[-1:])])
        open_.append(place)
    return parents


@pytest.mark.parametrize("portable", [False, True])
@settings(deadline=None, max_examples=200)
@given(made=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 60), st.integers(0, 30)), max_size=25))
def test_nesting_of_any_spans(portable: bool, made: list[tuple[int, int, int]]) -> None:
    """Also of spans that cross, which are cut at the end of the one around them; and where nothing can be compiled."""
    trace = trace_of([event("cpu_op", "op", start, long, 1, thread) for thread, start, long in made])
    missing = patch.object(nesting, "packaged", side_effect=BuildError("was not built"))
    with missing if portable else nullcontext():
        nesting._library.cache_clear()
        found = nest(trace, trace.complete(Category.OPERATOR))
    nesting._library.cache_clear()
    spans = list(
        zip(
            found.thread.tolist(),
            found.starts.tolist(),
            (found.starts + trace.events.dur[found.rows]).tolist(),
            strict=True,
        )
    )
    assert spans == sorted(spans, key=lambda span: (span[0], span[1], -max(span[2], span[1] + 1)))
    twice = [(span, row) for span, row in zip(spans, found.rows.tolist(), strict=True) if spans.count(span) > 1]
    assert twice == sorted(twice, key=lambda pair: (pair[0][0], pair[0][1], -pair[0][2], pair[1]))
    assert found.parent.tolist() == plainly(spans)
    values = np.arange(1, len(spans) + 1)
    below: dict[int, set[int]] = defaultdict(set)
    for place in range(len(spans)):
        at = place
        while at >= 0:
            below[at].add(place)
            at = int(found.parent[at])
    assert found.within(values).tolist() == [
        sum(int(values[other]) for other in below[place]) for place in range(len(spans))
    ]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 60), st.integers(1, 30)), max_size=15),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 90)), min_size=1, max_size=10),
)
def test_the_innermost_span_at_a_time(made: list[tuple[int, int, int]], asked: list[tuple[int, int]]) -> None:
    trace = trace_of([event("cpu_op", "op", start, long, 1, thread) for thread, start, long in made])
    found = nest(trace, trace.complete(Category.OPERATOR))
    number = {track.tid: int(number) for track, number in zip(trace.tracks, threads_of(trace), strict=True)}
    threads = np.array([number.get(thread, 99) for thread, _ in asked])
    times = np.array([time for _, time in asked])
    open_ = [
        [
            place
            for place in range(len(found))
            if found.thread[place] == thread and found.starts[place] <= time < found.ends[place]
        ]
        for thread, time in zip(threads, times, strict=True)
    ]
    assert found.innermost(threads, times).tolist() == [places[-1] if places else -1 for places in open_]


def by_hand(path: Any) -> tuple[dict[str, list[int]], dict[str, float], dict[str, float]]:
    """Durations on the host, time alone and device time inclusive of each operator, in nanoseconds."""
    loaded = json.loads(gzip.decompress(path.read_bytes()))
    events = loaded["traceEvents"] if isinstance(loaded, dict) else loaded
    whole = [e for e in events if e.get("ph") == "X"]
    operators = [e for e in whole if e.get("cat") in ("cpu_op", "Operator")]
    ops = sorted(operators, key=lambda e: (str(e["tid"]), e["ts"], -e["dur"]))
    calls = {e["args"]["correlation"]: e for e in whole if e.get("cat") in ("cuda_runtime", "cuda_driver", "Runtime")}
    parents = plainly([(int(e["tid"]), round(1000 * e["ts"]), round(1000 * (e["ts"] + e["dur"]))) for e in ops])
    spent: dict[int, float] = defaultdict(float)
    for work in (
        e for e in whole if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset")
    ):
        call = calls.get(work["args"]["correlation"])
        if call is None:
            continue
        around = [
            i
            for i, e in enumerate(ops)
            if str(e["tid"]) == str(call["tid"]) and e["ts"] <= call["ts"] < e["ts"] + e["dur"]
        ]
        if around:
            at = around[-1]
            while at >= 0:
                spent[at] += 1000 * work["dur"]
                at = parents[at]
    host, alone, device = defaultdict(list), defaultdict(float), defaultdict(float)
    for place, e in enumerate(ops):
        host[e["name"]].append(round(1000 * e["dur"]))
        alone[e["name"]] += 1000 * e["dur"]
        device[e["name"]] += spent[place]
        if parents[place] >= 0:
            alone[ops[parents[place]]["name"]] -= 1000 * e["dur"]
    return host, alone, device


@pytest.mark.parametrize("name", REAL[:2] + REAL[3:4])
def test_operators_of_real_traces(name: str) -> None:
    path = TRACES / f"{name}.json.gz"
    trace = read_trace(path)
    found = operators_of(trace, issued(trace), None)
    host, alone, device = by_hand(path)
    assert {row.name for row in found.table} == set(host)
    for row in found.table:
        assert (row.host.count, row.host.total) == (len(host[row.name]), sum(host[row.name]))
        assert [row.host.median, row.host.p99] == pytest.approx(np.percentile(host[row.name], [50, 99]))
        assert row.alone == pytest.approx(alone[row.name], abs=50 * row.host.count)
        assert row.device == pytest.approx(device[row.name], abs=2)


@pytest.mark.parametrize("name", REAL)
def test_all_device_time_is_somebodys(name: str) -> None:
    trace = read_trace(TRACES / f"{name}.json.gz")
    work = issued(trace)
    found = operators_of(trace, work, None)
    assert sum(row.device_alone for row in found.table) + found.unattributed == work.time.sum()
    assert found.unattributed < 0.01 * work.time.sum()
    assert sum(row.alone for row in found.table) == pytest.approx(
        sum(
            int(end - start)
            for start, end, parent in zip(
                work.operators.starts, work.operators.ends, work.operators.parent, strict=True
            )
            if parent < 0
        )
    )


def test_external_ids_and_times_agree_where_both_are() -> None:
    path = TRACES / "tracelens/h100_qwen1.5_0.5b.json.gz"
    loaded = json.loads(gzip.decompress(path.read_bytes()))
    with_ids = operators_of(read_trace(path), issued(read_trace(path)), None)
    for e in loaded["traceEvents"]:
        e.get("args", {}).pop("External id", None)
    without = trace_of(loaded["traceEvents"])
    assert {row.name: row.device for row in operators_of(without, issued(without), None).table} == {
        row.name: row.device for row in with_ids.table
    }


def test_rates_and_the_roofline() -> None:
    """One product of 2 * 4096 ** 3 FLOPs in 200 microseconds: 687 TFLOP/s, 69 % of an H100."""
    args = {"Input Dims": [[4096, 4096]] * 2, "Input type": ["c10::BFloat16"] * 2, "External id": 5}
    events = [
        event("cpu_op", "aten::matmul", 0, 900_000, 1, 1, **args | {"External id": 4}),
        event("cpu_op", "aten::mm", 100, 800_000, 1, 1, **args),
        event("cuda_runtime", "cudaLaunchKernel", 200, 100, 1, 1, correlation=9),
        event("kernel", "gemm", 500_000, 200_000, correlation=9),
    ]
    trace = trace_of(events)
    found = operators_of(trace, issued(trace), roofline({"name": "NVIDIA H100 80GB HBM3"}))
    (row,) = found.shaped
    assert (row.name, row.count, row.time, row.bound) == ("aten::mm", 1, 200_000, "compute")
    assert row.flops_per_second == pytest.approx(2 * 4096**3 / 200e-6)
    assert row.bytes_per_second == pytest.approx(3 * 2 * 4096**2 / 200e-6)
    assert row.share == pytest.approx(2 * 4096**3 / 200e-6 / 989.4e12)
    assert (found.flops, found.flops_time) == (2 * 4096**3, 200_000)
    assert [(o.name, o.device, o.device_alone, o.kernels) for o in found.table] == [
        ("aten::matmul", 200_000, 0, ()), ("aten::mm", 200_000, 200_000, (("gemm", 1, 200_000),)),
    ]  # fmt: skip


def test_copies_to_the_host_are_not_held_against_the_devices_memory() -> None:
    trace = read_trace(TRACES / "kineto/resnet50_2021_oldschema_memory.json.gz")
    found = operators_of(trace, issued(trace), roofline({"name": "Tesla V100-DGXS-32GB"}))
    copies = [
        row for row in found.shaped if row.name == "aten::copy_" and row.dims == "[[32,3,224,224],[32,3,224,224],[]]"
    ]
    assert {(row.bound, row.share) for row in copies} == {("link", 0.0)}
    assert {row.bound for row in found.shaped} == {"link", "memory"}  # even addmm: 131 MFLOP and 8.5 MB on this device


@pytest.mark.parametrize(
    ("name", "gib", "device"),
    [("NVIDIA H100 80GB HBM3", 79, "h100"), ("AMD Instinct MI300X VF", 191, "mi300x"),
     ("Tesla V100-SXM2-32GB", 31, "v100-32gb"),
     ("NVIDIA A100-PG509-200", 39, "a100-40gb"),
     ("NVIDIA A100-SXM4-80GB", 79, "a100-80gb"), ("Tesla V100-DGXS-32GB", 31, "v100-32gb")],
)  # fmt: skip
def test_devices_by_the_names_that_drivers_print(name: str, gib: int, device: str) -> None:
    found = roofline({"name": name, "totalGlobalMem": gib * 2**30})
    assert found is not None
    assert found.device == device


def test_devices_that_nobody_knows() -> None:
    assert roofline({}) is None
    assert roofline({"name": "Abacus 3"}) is None
