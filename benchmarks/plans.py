"""Our plans against published ones and against other planners' spaces, all judged by the same `estimate`.

    python benchmarks/plans.py [--rows 40] [--json]

Every row is one published run: its model, devices, batch, precision and framework. The plans:

published     as its authors ran it
megatron      rules of thumb: the least tp x pp whose states fit, tp inside a node first, micro-batches of one, ZeRO-1
galvatron     what Hetu-Galvatron searches: no ring, no ZeRO-1, 1F1B and GPipe, no adaptive recomputation, whole blocks
hierarchical  Alpa's order: the fastest grid for the layers first, memory aside, then pipeline and the rest for that grid
ours          the whole space
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from published import Run, read_table
from rich.console import Console
from rich.progress import track
from rich.table import Table

import meshwright as mw
from meshwright.cost.estimate import estimate
from meshwright.cost.runtime import Runtime
from meshwright.errors import DoesNotFit, MeshwrightError
from meshwright.search.planner import plan

HERE = Path(__file__).parent
GALVATRON = (
    "ring", "zero1", "hybrid", "adaptive", "offload", "interleaved", "zero-bubble", "zbv", "dualpipev", "split", "placement",
    "idle",
)  # fmt: skip
PATIENCE = 90.0  # seconds per search


def seconds(job: mw.Job, runtime: Runtime, **limits: Any) -> float:
    """Of the best plan under some limits; infinite where nothing fits."""
    try:
        return plan(job, runtime, time_limit=PATIENCE, **limits).estimate.step_seconds
    except (DoesNotFit, MeshwrightError):
        return float("inf")


def by_rules_of_thumb(job: mw.Job, runtime: Runtime) -> float:
    """Megatron's: grow tp inside the node, then pp, until it fits; recompute selectively, else fully."""
    node = job.cluster.groups[0].devices_per_node
    degrees = sorted(
        ((t, p) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8, 16, 32) if t <= node), key=lambda d: (d[0] * d[1], d[1])
    )
    for recompute in ("selective", "full"):
        for tp, pp in degrees:
            short = {"tp": tp, "pp": pp, "micro_batch": 1, "zero": 1, "recompute": recompute}
            try:
                found = estimate(job, mw.Plan.of(short, job), runtime)
            except MeshwrightError:
                continue
            if found.fits:
                return found.step_seconds
    return float("inf")


def hierarchical(job: mw.Job, runtime: Runtime) -> float:
    """Intra-layer first: the best grid if memory were no matter, then everything else for that grid."""
    group = job.cluster.groups[0]
    roomy = replace(job.cluster, groups=(replace(group, device=replace(group.device, memory=10**15)),))
    try:
        first = plan(replace(job, cluster=roomy), runtime, fix={"pp": 1}, time_limit=PATIENCE)
    except MeshwrightError:
        return float("inf")
    span = first.plan.pipelines[0].stages[0].spans[0]
    return seconds(job, runtime, fix={"tp": span.tp, "ulysses": span.ulysses, "ring": span.ring})


def chosen(rows: int) -> list[Run]:
    """Runs that fit by our own account, each job once, spread over models and devices."""
    found: dict[tuple[object, ...], Run] = {}
    for run in read_table(HERE / "data" / "public.csv").runs:
        if run.group in {"flagged", "v100"} or run.seconds is None:
            continue
        key = (run.job.model.name, run.job.cluster.devices, run.job.cluster.groups[0].device.name, run.job.precision)
        if key in found or not estimate(run.job, run.plan, run.runtime).fits:
            continue
        found[key] = run
    runs = sorted(found.values(), key=lambda run: -run.job.cluster.devices * run.job.model.active_parameters)
    step = max(len(runs) / rows, 1)
    return [runs[int(i * step)] for i in range(min(rows, len(runs)))]


def compared(run: Run) -> dict[str, Any]:
    job, runtime = run.job, run.runtime
    group = job.cluster.groups[0]
    published = estimate(job, run.plan, runtime).step_seconds
    started = time.process_time()
    ours = plan(job, runtime, time_limit=PATIENCE)
    spent = time.process_time() - started
    best = ours.estimate.step_seconds
    others = {
        "published": published,
        "megatron": by_rules_of_thumb(job, runtime),
        "galvatron": seconds(job, runtime, forbid=GALVATRON),
        "hierarchical": hierarchical(job, runtime),
    }
    gains = {name: value / best - 1 for name, value in others.items() if value < float("inf")}
    return {
        "row": run.row["row_id"], "model": job.model.name, "devices": f"{group.devices} {group.device.name}",
        "runtime": runtime.name, "ours_s": best, "gap": ours.plan.search["gap"] if ours.plan.search else None,
        "search_cpu_s": spent, "gains": gains,
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    out = Console(width=150 if not sys.stdout.isatty() else None)
    table = Table(title="how much slower than our plan (predicted)")
    for name in (
        "run",
        "model",
        "devices",
        "framework",
        "ours s",
        "gap",
        "CPU s",
        "published",
        "megatron",
        "galvatron",
        "hierarchical",
    ):
        table.add_column(name, justify="right" if name.endswith("s") or name in {"gap"} else "left")
    kinds = ("published", "megatron", "galvatron", "hierarchical")
    for row in rows:
        cells = [f"{row['gains'][kind]:+.1%}" if kind in row["gains"] else "does not fit" for kind in kinds]
        table.add_row(
            row["row"], row["model"], row["devices"], row["runtime"], f"{row['ours_s']:.4g}", f"{row['gap']:.1%}",
            f"{row['search_cpu_s']:.2f}", *cells,
        )  # fmt: skip
    out.print(table)
    for kind in kinds:
        gains = [row["gains"][kind] for row in rows if kind in row["gains"]]
        if gains:
            worse = sum(gain < -1e-9 for gain in gains)
            out.print(
                f"{kind:12}  {len(gains)} cases: median {statistics.median(gains):+.1%}, most {max(gains):+.1%}, "
                f"least {min(gains):+.1%}; better than ours in {worse}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=24, help="how many published runs")
    parser.add_argument("--json", action="store_true")
    chosen_ = parser.parse_args()
    runs = chosen(chosen_.rows)
    rows = [compared(run) for run in track(runs, "planning", console=Console(stderr=True))]
    if chosen_.json:
        print(json.dumps(rows, indent=2))
    else:
        show(rows)


if __name__ == "__main__":
    main()
