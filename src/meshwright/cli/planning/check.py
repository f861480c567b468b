"""meshwright check PLAN"""

from __future__ import annotations

from typing import Any

import click
import msgspec

from meshwright.base.units import size
from meshwright.cli.common import (
    as_json,
    job_options,
    load_plan,
    notes_on,
    own_runtime_option,
    print_json,
    runtime_named,
)
from meshwright.cost import RUNTIMES
from meshwright.plans.stored_estimate import StageMemory

EPILOG = """
\b
Examples:
  meshwright check plan.json
  meshwright check tp=8,pp=4 --model llama3-70b --cluster 8x8xh100 --batch 512 --seq 8192
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
@own_runtime_option
@as_json
def command(plan: str, runtime: str | None, json_: bool, **options: Any) -> None:
    """Check a plan: every rule it must keep, and whether it fits into memory.

    PLAN is a file, - for standard input, or a short text such as tp=8,pp=4 with the job in options.
    """
    from meshwright.cost import fits, plan_memory  # numpy is loaded here, not at the start

    document, job = load_plan(plan, options)
    memory = plan_memory(document, job, RUNTIMES[runtime_named(document, runtime)])
    notes = notes_on(document, job)
    if json_:
        facts = _facts(memory)
        idle = job.cluster.devices - document.devices
        print_json(facts | {"devices": document.devices, "idle_devices": idle, "notes": notes})
        raise click.exceptions.Exit(0 if facts["fits"] else 1)
    click.echo(f"{plan}: keeps every rule")
    for note in notes:
        click.echo(f"note: {note}")
    fits(memory)
    worst = max(memory, key=lambda row: row.total / row.capacity)
    click.echo(f"fits: the fullest devices ({worst.devices}) hold {size(worst.total)} of {size(worst.capacity)}")


def _facts(memory: list[StageMemory]) -> dict[str, Any]:
    short = max(max(row.short_by, row.host_short_by) for row in memory)
    extra = ("total", "short_by", "host_short_by")
    return {
        "valid": True,
        "fits": short == 0,
        "short_by_bytes": short,
        "peak_memory_bytes": max(row.total for row in memory),
        "memory": [msgspec.to_builtins(row) | {name: getattr(row, name) for name in extra} for row in memory],
    }
