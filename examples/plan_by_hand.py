"""Plan a real model on a real cluster by hand. Needs only the light install; runs in a second.

Shows: a 70B model and a 64-device cluster by name, a plan of a few lines, what it expands to, what it
fills, what happens when it does not fit, and the same plan changed until it does.
"""

from __future__ import annotations

from rich.console import Console

import meshwright as mw
from meshwright.base.units import size
from meshwright.cost import fits, plan_memory
from meshwright.plans.picture import draw

console = Console()


def show(job: mw.Job, degrees: dict[str, object]) -> None:
    """Draw a plan and say whether it fits."""
    plan = mw.Plan.of(degrees, job)
    memory = plan_memory(plan, job)
    console.rule(" ".join(f"{name}={value}" for name, value in degrees.items()))
    console.print(draw(plan, job, memory, console.width))
    try:
        fits(memory)
        console.print("[bold green]fits[/]\n")
    except mw.DoesNotFit as error:
        console.print(f"[bold red]{error}[/]\n")


job = mw.Job(mw.Model.preset("llama3-70b"), mw.Cluster.preset("8x8xh100"), global_batch=512, seq_len=8192)
console.print(f"{job.model}, {job.cluster}, {job.tokens_per_step:,} tokens per step")
layer = job.model.layer("block.0.attention")
kept = size(layer.kept_bytes(mw.Slice(seq_len=8192)))
console.print(f"{layer.name}: {layer.parameters:,} parameters, {kept} kept per sample until its backward pass\n")

show(job, {"tp": 4, "pp": 2, "dp": 8})
show(job, {"tp": 8, "pp": 4, "recompute": "selective"})
show(job, {"tp": 8, "pp": 4, "virtual": 2})

console.rule("a mistake is named")
try:
    mw.Plan.of({"tp": 8, "pp": 3}, job)
except mw.PlanError as error:
    console.print(f"{error}", markup=False)
