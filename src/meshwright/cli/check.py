"""meshwright check PLAN"""

from __future__ import annotations

from typing import Any

import click
import msgspec

from meshwright.cli.common import as_json, console, job_options, load_plan, print_json
from meshwright.cost import fits, plan_memory
from meshwright.units import size

EPILOG = """
\b
Examples:
  meshwright check plan.json
  meshwright check short.json --model llama3-70b --cluster 8x8xh100 --batch 512 --seq 8192
\b
A short plan of a few lines is enough:
  {"model": "llama3-70b", "cluster": "8x8xh100", "global_batch": 512, "seq_len": 8192,
   "tp": 8, "pp": 4, "recompute": "selective"}
\b
Exit codes: 0 valid and fits, 1 valid but does not fit, 2 not valid (names the rule it breaks).
"""


@click.command("check", epilog=EPILOG)
@click.argument("plan", type=click.Path())
@job_options
@as_json
def command(plan: str, json_: bool, **options: Any) -> None:
    """Check a plan: every rule it must keep, and whether it fits into memory."""
    document, job = load_plan(plan, options)
    memory = plan_memory(document, job)
    worst = max(memory, key=lambda row: row.total / row.capacity)
    if json_:
        rows = [msgspec.to_builtins(row) | {"total": row.total, "short_by": row.short_by} for row in memory]
        print_json(
            {
                "valid": True,
                "fits": not any(row.short_by for row in memory),
                "short_by_bytes": max(row.short_by for row in memory),
                "devices": document.devices,
                "idle_devices": job.cluster.devices - document.devices,
                "peak_memory_bytes": max(row.total for row in memory),
                "memory": rows,
            }
        )
        raise click.exceptions.Exit(1 if any(row.short_by for row in memory) else 0)
    out = console()
    out.print(f"{plan}: keeps every rule", markup=False)
    idle = job.cluster.devices - document.devices
    if idle:
        out.print(f"note: {idle} of {job.cluster.devices} devices are idle")
    fits(memory)
    out.print(f"fits: the fullest devices ({worst.devices}) hold {size(worst.total)} of {size(worst.capacity)}")
