"""Let the search plan a real model on a real cluster, and say why. Needs only the light install; runs in seconds."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

import meshwright as mw
from meshwright.plans.picture import draw
from meshwright.search.explanation.explain import explain, runners_up
from meshwright.search.explanation.html import report
from meshwright.search.planner import plan

console = Console()
job = mw.Job(mw.Model.preset("llama3-70b"), mw.Cluster.preset("8x8xh100"), global_batch=128, seq_len=8192)
answer = plan(job)
found = answer.estimate
console.print(draw(answer.plan, job, found.memory, console.width))
print(
    f"\n{answer.plan.devices} devices, {found.step_seconds:.2f} s per step, MFU {found.mfu:.1%}, proven: {answer.optimal}"
)

why = explain(job, answer.plan)
print(f"limited by {why.limit.text}")
for help_ in why.helps:
    print(f"  {help_.text}")

others = runners_up(answer)
for other in others:
    print(f"{other.kind}: {other.slower_text} slower, loses on {other.loses}")

file = Path(tempfile.mkdtemp(prefix="meshwright-")) / "report.html"
file.write_text(report(answer, why, others, f"proven optimal: {answer.optimal}"))
print(f"the same as a page: {file}")
