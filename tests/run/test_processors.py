"""Threads and memory of processes on processors: measured, trained and predicted alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import meshwright as mw
from meshwright.cost.memory.device_memory import plan_memory
from meshwright.run.memory.host_memory import Peaks, malloc_bytes
from meshwright.run.processes import threads
from meshwright.run.processes.threads import share_cores

counted = pytest.mark.skipif(not malloc_bytes(), reason="the C library counts no bytes")
_THREADS = """
import os, torch
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
torch.set_num_threads(7)
import meshwright as mw
from meshwright.measurement.worker import _join

job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("1xcpu"), 2, seq_len=8, precision="fp32")
found = []
mw.train(mw.Plan.of({}, job), steps=1, tell=lambda _: found.append(torch.get_num_threads()))
after = torch.get_num_threads()
_join(1)
print(found[0], after, torch.get_num_threads())
"""


def plan(batch: int, **short: object) -> mw.Plan:
    job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("1xcpu"), batch, seq_len=128, precision="fp32")
    return mw.Plan.of({"micro_batches": 1, **short}, job)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
@pytest.mark.parametrize(("given", "expected"), [("", "1 7 1"), ("3", "7 7 7")], ids=["ours", "the user's"])
def test_training_and_measuring_use_the_same_threads(given: str, expected: str) -> None:
    """One core: one thread, unless the user says otherwise; the caller's own number comes back."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", **({"OMP_NUM_THREADS": given} if given else {})}
    done = subprocess.run([sys.executable, "-c", _THREADS], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == expected.split(), done.stderr


@pytest.mark.parametrize(("cores", "ranks", "expected"), [(8, 1, 8), (8, 3, 2), (2, 4, 1)])
def test_ranks_share_the_cores_of_a_node(
    cores: int, ranks: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(cores)))
    before = torch.get_num_threads()
    try:
        assert share_cores(ranks) == torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


@counted
def test_bytes_that_are_held_and_freed_are_seen() -> None:
    with Peaks("cpu") as peaks:
        first = peaks.facts()["peak_tensor_bytes"]
        held = torch.ones(2**24)
        peaks.facts()
        del held
    found = peaks.facts()
    assert found["peak_tensor_bytes"] - first == pytest.approx(2**26, rel=0.02)
    assert found["peak_memory_bytes"] >= 2**26


@counted
@pytest.mark.parametrize("recompute", ["full", pytest.param("none", marks=pytest.mark.nightly)])
def test_the_peak_of_tensors_is_that_of_the_profiler(recompute: str, tmp_path: Path) -> None:
    """The profiler is told of every allocation; samples miss short ones, and count what else malloc hands out."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        events = mw.train(plan(32, recompute=recompute), steps=3)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    rows = [
        row for row in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if row["name"] == "[memory]"
    ]
    held = peak = 0
    for row in sorted(rows, key=lambda row: float(row["ts"])):
        held += row["args"]["Bytes"]
        peak = max(peak, held)
    (last,) = [event for event in events if event["event"] == "step" and event["step"] == 3]
    assert last["peak_tensor_bytes"] == pytest.approx(peak, rel=0.12, abs=2**23)


@counted
@pytest.mark.parametrize("batch", [4, pytest.param(16, marks=pytest.mark.nightly)])
def test_a_process_takes_what_was_predicted_of_it(batch: int, tmp_path: Path) -> None:
    """Weights and activations alone were 29 MiB of the 406 that a small run took."""
    command = [sys.executable, "-m", "meshwright", "train", "tiny-llama", "--plan", "micro_batches=1", "--seq", "128"]
    command += ["--batch", str(batch), "--steps", "3", "--data", "synthetic", "--json"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    (row,) = plan_memory(plan(batch))
    assert row.context > 2**28
    assert row.total == row.reserved + row.context
    assert row.total == pytest.approx(seen["peak_memory_bytes"], rel=0.3)
    assert row.allocated == pytest.approx(seen["peak_tensor_bytes"], rel=0.4, abs=2**24)
