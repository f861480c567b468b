"""What would a step take? Price several plans of one job, see where the time goes, and write a page and a trace.

Needs only the light install; runs in a second.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import meshwright as mw
from meshwright.cost.chrome_trace import chrome_trace
from meshwright.cost.page import page

job = mw.Job(mw.Model.preset("llama3-70b"), mw.Cluster.preset("8x8xh100"), global_batch=128, seq_len=8192)
print(f"{job.model.name} on {job.cluster.devices} devices, {job.tokens_per_step:,} tokens per step\n")

plans = {
    "tensor and pipeline": {"tp": 8, "pp": 4},
    "interleaved": {"tp": 4, "pp": 4, "virtual": 5, "ring": 2},
    "zero bubble": {"tp": 4, "pp": 4, "schedule": "zbv", "ring": 2},
    "fully sharded": {"zero": 3, "recompute": "full"},
}
print(f"{'plan':22}{'step':>8}{'tokens/s':>10}{'MFU':>8}{'memory':>10}   largest cost beside computing")
for name, degrees in plans.items():
    found = mw.estimate(job, mw.Plan.of(degrees, job), runtime="nemo")
    lost = {part: s for part, s in found.breakdown.items() if "compute" not in part}
    worst = max(lost, key=lambda part: lost[part])
    fits = "" if found.fits else "  does not fit"
    print(
        f"{name:22}{found.step_seconds:7.2f}s{found.tokens_per_second_per_device:10,.0f}{found.mfu:8.1%}"
        f"{found.peak_memory / 2**30:6.0f} GiB   {worst} {lost[worst] / found.step_seconds:.0%}{fits}"
    )

folder = Path(tempfile.mkdtemp(prefix="meshwright-"))
(folder / "step.html").write_text(page(found))
(folder / "step.json").write_text(json.dumps(chrome_trace(found)))
print(f"\nthe last one as a page: {folder / 'step.html'}\nand for ui.perfetto.dev: {folder / 'step.json'}")
