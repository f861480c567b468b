"""Predictions beside real training steps of our own runtime on one H200 (`benchmarks/predict_own_runs.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.models.presets import find_preset

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = mw.Cluster.load(ROOT / "examples/h200-measured.toml")
ROWS = {row["case"]["name"]: row for row in json.loads((ROOT / "benchmarks/results/h200_own_runs.json").read_text())}
# Where the host cannot issue kernels as fast as they run: docs/measurements.md says why.
HOST = {"1b, one short sample", "gpt2-xl"}


def errors(name: str) -> tuple[float, float]:
    """Of the step's time, and of the most memory that tensors take."""
    case, seen = ROWS[name]["case"], ROWS[name]["measured"]
    config = dict(find_preset(case["preset"]).config)
    layers = "n_layer" if "n_layer" in config else "num_hidden_layers"
    config[layers] = case["layers"] or config[layers]
    job = mw.Job(mw.Model.from_config(config), CLUSTER, case["samples"], case["length"], "bf16", case["optimizer"])
    found = mw.estimate(job, {"micro_batches": 1, **case["plan"]})
    return found.step_seconds / seen["seconds"] - 1, found.memory[0].allocated / seen["allocated"] - 1


@pytest.mark.parametrize("name", sorted(ROWS.keys() - HOST))
def test_a_step_takes_as_long_as_expected(name: str) -> None:
    assert abs(errors(name)[0]) < 0.08


@pytest.mark.parametrize("name", sorted(ROWS))
def test_tensors_take_as_much_memory_as_expected(name: str) -> None:
    assert abs(errors(name)[1]) < 0.045


def test_most_are_nearer() -> None:
    near = [name for name in ROWS if abs(errors(name)[0]) < 0.08 and abs(errors(name)[1]) < 0.03]
    assert len(near) >= 10
