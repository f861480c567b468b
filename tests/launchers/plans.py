"""Plans for the tests of launching, and the losses that one process finds."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.launchers.request import Request
from meshwright.plans.spans import device_text
from meshwright.run.options import Training

# Three processes on two unlike nodes; device 2, the first of the second node, is idle.
UNLIKE = {
    "model": "tiny-llama", "cluster": "1x2xcpu+1x2xcpu", "global_batch": 4, "seq_len": 32, "precision": "fp32",
    "micro_batches": 2,
    "stages": [
        {"layers": "embed..block.1", "devices": "0-1", "dp": 2}, {"layers": "block.2..head", "devices": "3", "dp": 1}
    ],
}  # fmt: skip


def written(folder: Path, table: dict[str, Any] = UNLIKE) -> str:
    """A plan's file in a folder."""
    (folder / "plan.json").write_text(json.dumps(table))
    return "plan.json"


def using(cluster: str, devices: list[int]) -> mw.Plan:
    """Data parallelism over some devices of a cluster."""
    job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset(cluster), len(devices), seq_len=32, precision="fp32")
    stage = {"layers": "embed..head", "devices": device_text(devices), "dp": len(devices), "zero": 0}
    return mw.Plan.of({"stages": [stage], "micro_batches": 1}, job)


def request(plan: mw.Plan, **run: Any) -> Request:
    """To train under a plan."""
    return Request(plan.resolve(), plan, "plan.json", Training(**{"steps": 5, **run}))


@cache
def losses_of_one_process(steps: int) -> list[float]:
    """Of UNLIKE's job, trained by a single process."""
    job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("1xcpu"), 4, seq_len=32, precision="fp32")
    events = mw.train(mw.Plan.of({"micro_batches": 2}, job), steps=steps)
    return [event["loss"] for event in events if event["event"] == "step"]


def losses_in(folder: Path) -> list[float]:
    """That a run has written."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"]
