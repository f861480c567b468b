"""Shares of modules against plain loops over json.loads, and backward work by two independent records."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.traces.rank.issued import issued
from meshwright.traces.rank.modules.modules import Modules, modules_of
from meshwright.traces.reading import read_trace
from tests.conftest import ROOT
from tests.traces.test_breakdown import event, trace_of

TRACES = ROOT / "tests/data/traces"
HOST, ENGINE = 100, 101


def found_in(events: list[dict[str, Any]]) -> Modules:
    trace = trace_of(events)
    return modules_of(trace, issued(trace))


@pytest.mark.parametrize("name", ["tracelens/h100_bert_small", "tracelens/mi300_bert_small"])
def test_modules_of_real_traces(name: str) -> None:
    """The parts of a path are the modules that are open at the time of the launch, from the longest to the shortest."""
    path = TRACES / f"{name}.json.gz"
    events = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    modules = [e for e in events if e["name"].startswith("nn.Module: ")]
    calls = {e["args"]["correlation"]: e for e in events if e["cat"] in ("cuda_runtime", "cuda_driver")}
    wanted: dict[tuple[str, ...], float] = defaultdict(float)
    for work in (e for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")):
        at = calls[work["args"]["correlation"]]["ts"]
        open_ = sorted((e for e in modules if e["ts"] <= at < e["ts"] + e["dur"]), key=lambda e: -e["dur"])
        for depth in range(len(open_)):
            wanted[tuple(e["name"][len("nn.Module: ") :] for e in open_[: depth + 1])] += 1000 * work["dur"]
    trace = read_trace(path)
    found = modules_of(trace, issued(trace))
    assert found.source == "modules"
    assert {part.path: part.forward for part in found.parts} == pytest.approx(wanted, abs=1)
    assert all(part.backward == 0 for part in found.parts)
    assert found.parts[0].share == pytest.approx(
        1 - found.outside / sum(e["dur"] * 1000 for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"))
    )


def test_sequence_numbers_and_flows_agree() -> None:
    """The same backward work, once joined by numbers and once by flows."""
    path = TRACES / "hta/a100_ddp_resnet_2rank_rank0.json.gz"
    loaded = json.loads(gzip.decompress(path.read_bytes()))
    by_flow, by_number = [], []
    for e in loaded["traceEvents"]:
        if e.get("cat") != "fwdbwd":
            by_number.append(e)
        args = {k: v for k, v in e.get("args", {}).items() if k not in ("Sequence number", "Fwd thread id")}
        by_flow.append(e | {"args": args})
    one, other = found_in(by_flow), found_in(by_number)
    assert one.source == "annotations"
    assert {part.path[-1]: part.backward for part in one.parts if part.backward > 1e6} == {
        part.path[-1]: part.backward for part in other.parts if part.backward > 1e6
    }
    whole = {part.path: part for part in one.parts}["## forward ##",]
    assert whole.backward > whole.forward > 0


def launch(number: int, at: int, thread: int, dur: int) -> list[dict[str, Any]]:
    return [
        event("cuda_runtime", "cudaLaunchKernel", at, 5, 1, thread, correlation=number),
        event("kernel", f"k{number}", 10_000 + 1000 * number, dur, correlation=number),
    ]


def module(name: str, start: int, dur: int, thread: int = HOST) -> dict[str, Any]:
    return event("python_function", f"nn.Module: {name}", start, dur, 1, thread)


def test_backward_and_recomputation() -> None:
    numbered = {"Sequence number": 7}
    events = [
        module("Net_0", 0, 1000),
        module("Linear_0", 100, 200),
        module("Linear_1", 400, 200),
        event("cpu_op", "aten::linear", 110, 100, 1, HOST, **numbered, **{"Fwd thread id": 0}),
        event("cpu_op", "aten::linear", 410, 100, 1, HOST, **{"Sequence number": 8, "Fwd thread id": 0}),
        *launch(1, 120, HOST, 10),
        *launch(2, 420, HOST, 20),
        *launch(3, 900, HOST, 40),  # in Net_0 itself
        event("cpu_op", "LinearBackward", 2000, 300, 1, ENGINE, **{"Sequence number": 8, "Fwd thread id": 1}),
        *launch(4, 2010, ENGINE, 80),
        module("Linear_1", 2100, 100, ENGINE),  # computed once more inside the backward
        *launch(5, 2110, ENGINE, 160),
        event("cpu_op", "LinearBackward", 2400, 300, 1, ENGINE, **numbered, **{"Fwd thread id": 1}),
        *launch(6, 2410, ENGINE, 320),
        *launch(7, 3000, ENGINE, 640),  # nobody's
    ]  # fmt: skip
    found = found_in(events)
    assert {part.path: (part.calls, part.forward, part.backward) for part in found.parts} == {
        ("Net_0",): (1, 70, 400),
        ("Net_0", "Linear_0"): (1, 10, 320),
        ("Net_0", "Linear_1"): (1, 20, 80),
        ("Linear_1",): (1, 0, 160),
    }
    assert {part.path: (part.calls, part.forward, part.backward) for part in found.kinds} == {
        ("Net",): (1, 70, 400),
        ("Net", "Linear"): (2, 30, 400),
        ("Linear",): (1, 0, 160),
    }
    assert found.outside == 640
    assert found.parts[0].share == pytest.approx(470 / 1270)
    assert [part.path for part in found.parts][:2] == [("Net_0",), ("Net_0", "Linear_0")]


def test_functions_where_nothing_else_tells() -> None:
    events = [
        event("python_function", "train.py(3): step", 0, 1000, 1, HOST),
        event("python_function", "torch/functional.py(9): einsum", 10, 500, 1, HOST),
        event("python_function", "<built-in method matmul>", 20, 400, 1, HOST),
        event("user_annotation", "ProfilerStep#1", 0, 1000, 1, HOST),
        *launch(1, 30, HOST, 10),
    ]
    found = found_in(events)
    assert (found.source, [part.path for part in found.parts]) == ("functions", [("train.py(3): step",)])
    assert found_in(events[3:]) == Modules("", (), (), 10)
    assert found_in([]).parts == ()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = torch.nn.Linear(8, 512), torch.nn.Linear(512, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(self.small(x))


def test_a_run_on_the_host(tmp_path: Path) -> None:
    """Torch's own profile of a step without any device: time of operators stands for that of kernels."""
    net, x = Net(), torch.randn(1024, 8)
    net(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profile:
        net(x).sum().backward()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e.get("ph") == "X"]
    operators = [e for e in events if e["cat"] == "cpu_op"]
    outermost = [e for e in operators if not any(inside(e, o) for o in operators if o is not e)]
    trace = read_trace(tmp_path / "trace.json")
    found = modules_of(trace, issued(trace))
    assert found.source == "modules"
    parts = {part.path: part for part in found.parts}
    assert set(parts) == {("Net_0",), ("Net_0", "Linear_0"), ("Net_0", "Linear_1")}
    for path, part in parts.items():
        span = next(e for e in events if e["name"] == f"nn.Module: {path[-1]}")
        forward = [e for e in outermost if inside(e, span)]
        numbers = {e["args"].get("Sequence number") for e in operators if inside(e, span)} - {None}
        backward = [e for e in outermost if e not in forward and e["args"].get("Sequence number") in numbers]
        assert len(backward) >= 2
        assert part.forward == pytest.approx(1000 * sum(e["dur"] for e in forward), abs=len(forward))
        assert part.backward == pytest.approx(1000 * sum(e["dur"] for e in backward), abs=len(backward))


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    """In the same thread, from its begin to its end."""
    return bool(
        inner["tid"] == outer["tid"]
        and outer["ts"] <= inner["ts"]
        and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    )
