"""The timeline as a trace: opens in a viewer, loses nothing, and its slices are what the estimate says."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

import meshwright as mw
from meshwright.cost.chrome_trace import chrome_trace
from meshwright.cost.estimate import Estimate, estimate

JOB = mw.Job(mw.Model.preset("llama3-8b"), mw.Cluster.preset("4x8xh100"), global_batch=64, seq_len=8192)
PLANS: list[dict[str, Any]] = [
    {"tp": 8, "pp": 4}, {"tp": 4, "pp": 4, "virtual": 2, "recompute": "full"}, {"zero": 3}, {"pp": 4, "schedule": "zbv"},
    {"pp": 4, "schedule": "dualpipev", "ring": 2}, {"ulysses": 4, "zero": 3, "recompute": "selective"},
]  # fmt: skip


def traced(plan: dict[str, Any]) -> tuple[Estimate, list[dict[str, Any]]]:
    found = estimate(JOB, mw.Plan.of(plan, JOB), "megatron")
    trace = json.loads(json.dumps(chrome_trace(found)))
    return found, trace["traceEvents"]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_rows_are_full_and_never_overlap(plan: dict[str, Any]) -> None:
    """The device's row of each group: compute, communication and bubbles, end to end without gap or overlap."""
    found, events = traced(plan)
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for (process, thread), slices in rows.items():
        slices.sort()
        for (_, end), (start, _) in pairwise(slices):
            assert start >= end - 1e-3, (process, thread)
            if thread == 1:
                assert start == pytest.approx(end, abs=1e-2)
    longest = max(end for slices in rows.values() for _, end in slices) / 1e6
    assert longest == pytest.approx(found.step_seconds)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_slices_add_up_to_the_breakdown(plan: dict[str, Any]) -> None:
    found, events = traced(plan)
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X" and event["tid"] == 1:
            seconds[event["cat"]] += event["dur"] / 1e6
    groups = found.pipelines[0].timeline.groups
    compute = found.breakdown["forward compute"] + found.breakdown["backward compute"]
    assert seconds["compute"] / groups == pytest.approx(compute, rel=1e-3)
    for part in ("tp", "ring", "ulysses", "zero", "recompute", "gradients", "optimizer"):
        assert seconds[part] / groups == pytest.approx(found.breakdown.get(part, 0.0), rel=1e-3, abs=1e-6)


def test_every_action_of_the_schedule_is_there() -> None:
    _, events = traced({"tp": 8, "pp": 4})
    actions = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert len(actions) == 4 * 64 * 2
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert names == {"devices 0-7", "devices 8-15", "devices 16-23", "devices 24-31"}
