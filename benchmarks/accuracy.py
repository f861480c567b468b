"""How far the cost model is off on runs that others measured.

    python benchmarks/accuracy.py [--csv FILE] [--json]      every row of a table, by group, source and device
    python benchmarks/accuracy.py --grid FILE                a dense grid of plans of one model (vTrain's format)
    python benchmarks/accuracy.py --leave-one-out            each source with constants fitted without it
    python benchmarks/accuracy.py --fit                      the constants that would fit best now

Errors are fractions of the measured value. Peers, on other rows: a constant FLOP/s rule 0.33; vTrain 0.084 on one node and
0.147 on many, after profiling; SimuMax 0.056 on the machine it was calibrated on; Calculon 0.037 on eight rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fitting import FITTED, fit, get, jacobian
from grid import grid_report
from published import BadTable, Run, read_table
from rich.console import Console
from rich.progress import track
from rich.table import Table

from meshwright.cost.constants import DEFAULT, Constants
from meshwright.cost.memory.device_memory import plan_memory
from meshwright.cost.step.step import pipeline_time

HERE = Path(__file__).parent
COUNTED = ("dense-16bit", "moe-or-low-precision")  # flagged rows and noisy V100 sources are reported apart
PEERS = "constant FLOP/s rule 33 %, vTrain 8.4-14.7 % after profiling, uncalibrated roofline -22 % to +54 %"


def predict(runs: Sequence[Run], constants: Constants = DEFAULT, text: str = "predicting") -> np.ndarray:
    """Predicted step times."""
    shown = track(runs, description=text, console=Console(stderr=True), transient=True)
    return np.array(
        [max(pipeline_time(r.job, p, r.runtime, constants).seconds for p in r.plan.pipelines) for r in shown]
    )


def peak_memory(run: Run) -> int:
    """Predicted peak, as the source measured it: bytes of tensors, or what the allocator reserved."""
    rows = plan_memory(run.plan, run.job, run.runtime)
    return max(row.reserved if run.reserved else row.allocated for row in rows)


def errors_of(runs: Sequence[Run], predicted: np.ndarray) -> np.ndarray:
    """Signed errors of step time, as fractions."""
    return predicted / np.array([run.seconds for run in runs]) - 1


def summary(runs: Sequence[Run], predicted: np.ndarray, memory: Sequence[Run]) -> dict[str, Any]:
    """The figures of one set of rows."""
    found: dict[str, Any] = {"rows": len(runs)} | dict.fromkeys(("mape", "median", "p90", "bias"))
    if runs:
        error = errors_of(runs, predicted)
        size = np.abs(error)
        found |= {
            "mape": float(size.mean()), "median": float(np.median(size)), "p90": float(np.quantile(size, 0.9)),
            "bias": float(error.mean()),
        }  # fmt: skip
    wrong = [abs(peak_memory(run) / run.peak_bytes - 1) for run in memory if run.peak_bytes]
    found |= {"memory_rows": len(wrong), "memory_mape": float(np.mean(wrong)) if wrong else None}
    return found | choice(runs, predicted)


def choice(runs: Sequence[Run], predicted: np.ndarray) -> dict[str, Any]:
    """Where one model ran on one cluster under several plans: does the prediction rank them, and what does its pick cost?"""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        same = ("source_id", "model", "layers", "gpu", "n_gpus", "seq_len", "global_batch", "precision")
        groups[tuple(run.row[name] for name in same)].append(i)
    ranks, regrets = [], []
    for members in groups.values():
        measured = np.array([runs[i].seconds for i in members])
        if len({runs[i].plan.to_json() for i in members}) < 2 or measured.max() / measured.min() < 1.02:
            continue
        regrets.append(float(measured[int(np.argmin(predicted[members]))] / measured.min() - 1))
        if len(members) > 2:
            ranks.append(rank_correlation(measured, predicted[members]))
    return {
        "rank_correlation": float(np.mean(ranks)) if ranks else None,
        "regret": float(np.mean(regrets)) if regrets else None,
    }


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's: of the ranks, ties in order of appearance."""
    first, second = (np.argsort(np.argsort(values)).astype(float) for values in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


def report(runs: Sequence[Run], predicted: np.ndarray, memory: Sequence[Run], refused: list[dict[str, str]]) -> Any:
    """Everything `--json` prints."""

    def part(keep: Callable[[Run], bool]) -> dict[str, Any]:
        chosen = [i for i, run in enumerate(runs) if keep(run)]
        return summary([runs[i] for i in chosen], predicted[chosen], [run for run in memory if keep(run)])

    counted = [run for run in (*runs, *memory) if run.group in COUNTED]
    names: dict[str, Callable[[Run], str]] = {
        "sources": lambda run: run.row["source_id"],
        "devices": lambda run: run.row["gpu"],
        "precisions": lambda run: run.job.precision,
        "kinds": lambda run: "mixture" if any(layer.experts for layer in run.job.model.layers) else "dense",
    }
    table: dict[str, Any] = {"overall": part(lambda run: run.group in COUNTED)}
    table["groups"] = {
        name: part(lambda run, name=name: run.group == name)
        for name in (*COUNTED, "flagged", "v100")  # type: ignore[misc]
    }
    for name, key in names.items():
        values = sorted({key(run) for run in counted})
        table[name] = {
            value: part(lambda run, value=value, key=key: run.group in COUNTED and key(run) == value)  # type: ignore[misc]
            for value in values
        }
    table["out_of_memory"] = out_of_memory(memory)
    table["refused"] = refused
    return table


def out_of_memory(runs: Iterable[Run]) -> dict[str, Any]:
    """Runs that were reported out of memory and are predicted not to fit; runs that fitted and are predicted not to."""
    reported = caught = fitted = 0
    refused: list[dict[str, Any]] = []
    for run in runs:
        over = max(row.total / row.capacity for row in plan_memory(run.plan, run.job, run.runtime)) - 1
        if "OOM" in run.row["notes"] and not (run.seconds or run.peak_bytes):
            reported += 1
            caught += over > 0
        elif run.seconds:
            fitted += 1
            if over > 0:
                refused.append({"row_id": run.row["row_id"], "over": round(over, 3)})
    return {"reported": reported, "caught": caught, "fitted": fitted, "refused": refused}


def leave_one_out(runs: Sequence[Run]) -> dict[str, Any]:
    """Each source predicted with constants fitted to all the others."""
    measured = np.array([run.seconds for run in runs])
    sources = [run.row["source_id"] for run in runs]
    at, slope = jacobian(lambda constants: predict(runs, constants, "derivatives"), DEFAULT)
    predicted = np.zeros(len(runs))
    for source in sorted(set(sources)):
        rest = np.array([s != source for s in sources])
        constants = fit(at[rest], slope[rest], measured[rest], [s for s in sources if s != source])
        here = [i for i, s in enumerate(sources) if s == source]
        predicted[here] = predict([runs[i] for i in here], constants, f"without {source}")
    table = report(runs, predicted, [], [])
    return {"overall": table["overall"], "groups": table["groups"], "sources": table["sources"]}


def show(table: dict[str, Any]) -> None:
    """The same for people."""
    out = Console(width=118)
    columns = ("rows", "mape", "median", "p90", "bias", "memory_rows", "memory_mape", "rank_correlation", "regret")
    drawn = Table(title="error of predicted step time and peak memory", title_justify="left")
    drawn.add_column("")
    for name in columns:
        drawn.add_column(name.replace("_", " "), justify="right")
    for title, rows in (("overall", {"overall": table["overall"]}), *((k, table.get(k)) for k in table)):
        if (
            title not in {"overall", "groups", "sources", "devices", "precisions", "kinds"}
            or not rows
            or "rows" in rows
        ):
            continue
        for name, row in rows.items():
            if row["rows"] or row["memory_rows"]:
                drawn.add_row(name, *(_cell(row.get(column), column) for column in columns))
        drawn.add_section()
    out.print(drawn)
    out.print(f"peers, on rows of their own: {PEERS}")
    if memory := table.get("out_of_memory"):
        out.print(f"out of memory: {memory['caught']} of {memory['reported']} reported runs predicted not to fit")
        over = [f"{row['row_id']} by {row['over']:.0%}" for row in memory["refused"]]
        out.print(
            f"{len(over)} of {memory['fitted']} runs that fitted are predicted not to: {', '.join(over) or 'none'}"
        )
    if refused := table.get("refused"):
        why: dict[str, int] = defaultdict(int)
        for row in refused:
            why[row["why"]] += 1
        out.print(f"{len(refused)} rows refused: " + "; ".join(f"{n} x {text}" for text, n in why.items()))


def _cell(value: Any, column: str) -> str:
    if value is None:
        return ""
    if column.endswith("rows"):
        return str(value)
    return f"{value:+.1%}" if column == "bias" else f"{value:.2f}" if "rank" in column else f"{value:.1%}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", default=str(HERE / "data" / "public.csv"), help="a table of published runs")
    parser.add_argument("--grid", help="a table in vTrain's format: benchmarks/data/vtrain.csv")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--rows", action="store_true", help="list rows off by more than a quarter; with --json every row"
    )
    parser.add_argument("--leave-one-out", action="store_true", help="constants refitted without each source")
    parser.add_argument("--fit", action="store_true", help="print the constants that fit this table best")
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    try:
        _run(chosen)
    except (OSError, UnicodeError, csv.Error, BadTable) as error:
        why = getattr(error, "strerror", None) or str(error)
        file = chosen.grid or chosen.csv
        if chosen.json:
            print(json.dumps({"error": why, "file": file}))
        print(f"error: {file}: {why}", file=sys.stderr)
        sys.exit(2)


def _run(chosen: argparse.Namespace) -> None:
    if chosen.grid:
        table: Any = grid_report(chosen.grid)
        print(json.dumps(table, indent=2) if chosen.json else "   ".join(f"{k} {v:.3g}" for k, v in table.items()))
        return
    found = read_table(chosen.csv)
    if not found.runs and not found.refused:
        raise BadTable("has no rows")
    runs = [run for run in found.runs if run.seconds]
    if chosen.fit:
        _fit([run for run in runs if run.group in COUNTED])
        return
    if chosen.leave_one_out:
        table = leave_one_out([run for run in runs if run.group in COUNTED])
    else:
        predicted = predict(runs)
        table = report(runs, predicted, found.runs, found.refused)
        if chosen.rows:
            table["rows"] = _rows(runs, predicted)
    if chosen.json:
        print(json.dumps(table, indent=2))
        return
    for row in table.get("rows", ()):
        if abs(row["error"]) > 0.25 and row["group"] in COUNTED:
            print(f"{row['row_id']:26}{row['model']:34}{row['error']:+.0%}")
    show(table)


def _rows(runs: Sequence[Run], predicted: np.ndarray) -> list[dict[str, Any]]:
    """Every row with what was measured and predicted."""
    return [
        {
            "row_id": run.row["row_id"], "model": run.row["model"], "group": run.group, "runtime": run.runtime.name,
            "measured": run.seconds, "predicted": float(seconds), "error": float(seconds / run.seconds - 1),
        }
        for run, seconds in zip(runs, predicted, strict=True)
        if run.seconds
    ]  # fmt: skip


def _fit(runs: Sequence[Run]) -> None:
    measured = np.array([run.seconds for run in runs])
    at, slope = jacobian(lambda constants: predict(runs, constants, "derivatives"), DEFAULT)
    constants = fit(at, slope, measured, [run.row["source_id"] for run in runs])
    print(f"{'':24}{'before':>10}{'now':>10}{'fitted':>10}")
    for name, before, *_ in FITTED:
        print(f"{name:24}{before:10.4f}{get(DEFAULT, name):10.4f}{get(constants, name):10.4f}")


if __name__ == "__main__":
    main()
