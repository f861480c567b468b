"""How long the search takes, in CPU seconds, and how long an open solver takes for the same chain problem.

    python benchmarks/search.py                    every preset on 8, 64 and 1024 devices, and the largest jobs
    python benchmarks/search.py --presets gpt3     only presets with this in their name
    python benchmarks/search.py --milp [SECONDS]   UniAP's models on clusters like its own, ours and HiGHS in one run

Peers, on other machines of this kind: Galvatron 168-345 s (7B, 8 devices), Calculon 118 s, Aceso 37 s, Metis 0.7-83 s,
HiGHS 58 s on a chain of 24 layers, 4 stages, 10 strategies.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

import meshwright as mw
from meshwright.cost.constants import DEFAULT
from meshwright.cost.runtime import RUNTIMES
from meshwright.errors import MeshwrightError
from meshwright.models import presets
from meshwright.search.exact.solve import Search
from meshwright.search.planner import first_plan, plan
from meshwright.search.refine.chain import solve
from meshwright.search.refine.layers import instance_of, ways_of, with_all_choices
from meshwright.search.refine.milp import solve_milp
from meshwright.search.space.limits import Limits

LARGE = [
    ("llama3.1-405b", "2048x8xh100", 2048, 8192),
    ("deepseek-v3", "2048x8xh800", 16384, 4096),
    ("llama3-70b", "16x8xh100+16x8xa100-80gb+32x8xa100-40gb", 1024, 4096),
]
# UniAP's jobs (arXiv 2307.16375): model, cluster, batch, sequence, precision.
UNIAP = [
    ("bert-huge", "8xv100-32gb", 16, 512, "fp16"), ("t5-large", "8xv100-32gb", 16, 512, "fp16"),
    ("vit-huge", "8xv100-32gb", 128, 257, "fp16"), ("swin-huge", "8xv100-32gb", 128, 0, "fp16"),
    ("bert-huge", "2x4xtitan-xp", 16, 512, "fp32"), ("vit-huge", "2x4xtitan-xp", 64, 257, "fp32"),
    ("t5-large", "4x4xtitan-xp", 16, 512, "fp32"), ("swin-huge", "2x4xtitan-xp", 32, 0, "fp32"),
    ("llama-7b", "8xa100-40gb", 8, 2048, "bf16"), ("llama-13b", "8xa100-40gb", 4, 2048, "bf16"),
    ("llama-7b", "8x8xhygon-dcu", 64, 2048, "fp16"), ("llama-13b", "8x8xhygon-dcu", 64, 2048, "fp16"),
]  # fmt: skip


def searched(names: str) -> Iterator[tuple[str, str, int, float, str, float | None]]:
    """(model, cluster, devices, CPU seconds, what was found, CPU seconds until a first plan was there)"""
    jobs = [
        (name, "8xh100" if devices == 8 else f"{devices // 8}x8xh100", max(512, devices), 0)
        for name in presets()
        for devices in (8, 64, 1024)
    ]
    for model, cluster, batch, seq in [*jobs, *LARGE]:
        if names not in model:
            continue
        job = mw.Job(mw.Model.preset(model), mw.Cluster.preset(cluster), global_batch=batch, seq_len=seq)
        started = time.process_time()
        try:
            answer = plan(job)
            found = (
                f"{answer.estimate.step_seconds:.4g} s, gap {answer.plan.search['gap']:.1%}"
                if answer.plan.search
                else ""
            )
        except MeshwrightError:
            found = "nothing fits"
        yield model, cluster, job.cluster.devices, time.process_time() - started, found, first_seconds(job)


def first_seconds(job: mw.Job) -> float | None:
    """CPU seconds until there is a plan to show; None where no rule of thumb finds one."""
    if len(job.cluster.groups) > 1:
        return None
    started = time.process_time()
    found = first_plan(job, RUNTIMES["meshwright"], Limits(), DEFAULT)
    return time.process_time() - started if found else None


def show_searches(names: str) -> None:
    out = Console(width=110)
    table = Table(title="CPU seconds of plan(job), the whole space")
    for name in ("model", "cluster", "CPU s", "first plan", "found"):
        table.add_column(name, justify="right" if name in ("CPU s", "first plan") else "left")
    rows = list(searched(names))
    for model, cluster, _, seconds, found, first in sorted(rows, key=lambda row: -row[3]):
        table.add_row(model, cluster, f"{seconds:.2f}", "" if first is None else f"{first:.3f}", found)
    out.print(table)
    fits = [row[3] for row in rows if row[2] <= 1024 and "+" not in row[1] and row[4] != "nothing fits"]
    if fits:
        under = sum(seconds < 1 for seconds in fits)
        middle, most = statistics.median(fits), max(fits)
        out.print(
            f"one kind, up to 1024 devices: {under} of {len(fits)} under 1 s, median {middle:.2f} s, most {most:.2f} s"
        )
    firsts = [first for *_, first in rows if first is not None]
    if firsts:
        out.print(f"first plans: {len(firsts)}, median {statistics.median(firsts):.3f} s, slowest {max(firsts):.3f} s")
    out.print(f"the whole command (llama3-8b on 8xh100): {command_seconds():.2f} s CPU, start-up and printing included")


def command_seconds() -> float:
    """CPU seconds of the command line, as a user calls it."""
    start = "from meshwright.cli import main; main()"
    command = [sys.executable, "-c", start, "plan", "llama3-8b", "8xh100", "--batch", "64", "--seq", "8192", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def show_solvers(limit: float, names: str) -> None:
    """UniAP's space: GPipe, no recomputation, every layer its own tp, dp and ZeRO; both solvers get the same instance."""
    table = Table(
        title=f"the chain problem of UniAP's jobs: ours and HiGHS (limit {limit:g} s), same optimum, same run"
    )
    for name in ("model", "cluster", "layers / stages / ways", "ours s", "HiGHS s", "ratio", "objective", "HiGHS"):
        table.add_column(name)
    ratios = []
    for model, cluster, batch, seq, precision in [case for case in UNIAP if names in case[0]]:
        job = mw.Job(
            mw.Model.preset(model), mw.Cluster.preset(cluster), global_batch=batch, seq_len=seq, precision=precision
        )
        limits = Limits.of({"pp": 4, "schedule": "gpipe"}, ["offload", "adaptive", "hybrid"])
        search = Search(job, RUNTIMES["meshwright"], limits)
        search.run()
        if not search.best:
            table.add_row(model, cluster, "nothing fits in 4 stages")
            continue
        best = with_all_choices(search, search.best[0])
        instance = instance_of(search, best, ways_of(search, best, 12, fill=True))
        started = time.process_time()
        ours = solve(instance)
        spent = time.process_time() - started
        started = time.process_time()
        theirs = solve_milp(instance, limit)
        highs = time.process_time() - started
        ratios.append(highs / spent)
        value = ours.value if ours else float("inf")
        said = f"{theirs.value:.6g}" if theirs.gap <= 1e-6 else f"{theirs.value:.6g}, gap {theirs.gap:.1%}"
        size = f"{len(instance.time)} / 4 / {instance.time.shape[1]}"
        table.add_row(
            model, cluster, size, f"{spent:.3f}", f"{highs:.1f}", f"{highs / spent:.0f}x", f"{value:.6g}", said
        )
    out = Console(width=130)
    out.print(table)
    out.print(f"median {statistics.median(ratios):.0f}x, least {min(ratios):.0f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", default="", help="part of a preset's name")
    parser.add_argument("--milp", nargs="?", const=60.0, type=float, help="hold HiGHS beside ours; seconds it may take")
    chosen = parser.parse_args()
    if chosen.milp is not None:
        show_solvers(chosen.milp, chosen.presets)
    else:
        show_searches(chosen.presets)


if __name__ == "__main__":
    main()
