"""A dense grid of plans: vTrain's measured iteration times of Megatron-LM on one node of A100.

Which plan is best there differs by model, batch and number of devices, so the grid shows what a choice by prediction
would cost. The peer is a roofline of ten terms fitted to half of these very rows: 8.6 % mean error, 3.5 % regret.
"""

from __future__ import annotations

import csv
from collections import defaultdict

import numpy as np
from described import gpt_model, usual_cluster
from published import BadTable

import meshwright as mw
from meshwright.cost.runtime import runtime
from meshwright.cost.step.step import pipeline_time

Row = dict[str, float]
_COLUMNS = ("devices", "batch", "micro_batch", "hidden", "heads", "layers", "seq", "tp", "dp", "pp", "milliseconds")


def read_grid(path: str) -> list[Row]:
    """Rows of a table in vTrain's columns."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = [row for row in list(csv.reader(file))[1:] if any(row)]
    if not rows:
        raise BadTable("has no rows")
    try:
        return [dict(zip(_COLUMNS, map(float, row), strict=True)) for row in rows]
    except ValueError:
        raise BadTable(f"is no grid: each row needs the numbers {', '.join(_COLUMNS)}") from None


def predict_row(row: Row) -> float:
    """Predicted seconds: Megatron-LM without recomputation, 16 bits, whole optimizer on every replica."""
    n = {name: int(value) for name, value in row.items()}
    model = gpt_model(n["layers"], n["hidden"], n["heads"], n["seq"])
    job = mw.Job(model, usual_cluster("a100-80gb", 1, n["devices"]), n["batch"], n["seq"], "fp16")
    degrees = {"tp": n["tp"], "dp": n["dp"], "pp": n["pp"], "micro_batch": n["micro_batch"], "zero": 0, "sp": False}
    plan = mw.Plan.of(degrees, job)
    return pipeline_time(job, plan.pipelines[0], runtime("megatron-2021")).seconds


def grid_report(path: str) -> dict[str, float]:
    """Errors as fractions, and the regret of choosing by prediction."""
    rows = read_grid(path)
    measured = np.array([row["milliseconds"] / 1e3 for row in rows])
    predicted = np.array([predict_row(row) for row in rows])
    size = np.abs(predicted / measured - 1)
    groups: dict[tuple[float, ...], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        groups[tuple(row[name] for name in ("devices", "batch", "hidden", "layers"))].append(i)
    regrets = [
        measured[members[int(np.argmin(predicted[members]))]] / measured[members].min() - 1
        for members in groups.values()
        if len(members) > 1
    ]
    return {
        "rows": len(rows), "mape": float(size.mean()), "median": float(np.median(size)),
        "p95": float(np.quantile(size, 0.95)), "bias": float((predicted / measured - 1).mean()),
        "regret": float(np.mean(regrets or [0.0])), "worst_regret": max(regrets, default=0.0), "groups": len(regrets),
        "peer_mape": 0.086, "peer_regret": 0.035,
    }  # fmt: skip
