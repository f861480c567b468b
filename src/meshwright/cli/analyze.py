"""meshwright analyze"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.common import as_json
from meshwright.files import writable

if TYPE_CHECKING:
    pass

EPILOG = """
\b
Examples:
  meshwright analyze traces/                            where the time of a job went, and what to do about it
  meshwright analyze traces/ --html report.html         the same as a page, with timelines
  meshwright analyze traces/ --plan plan.json           what the plan promised beside what was seen
  meshwright analyze after/ --against before/           what changed between two runs
  meshwright analyze traces/ --sql "select name, sum(dur)/1e6 ms from events group by name order by ms desc limit 9"
  meshwright analyze traces/ --perfetto window.json     the step to look at, all ranks on one clock, for ui.perfetto.dev
  meshwright analyze /shared/traces --ray HOST:6379     on all nodes of a cluster of Ray that see the folder
\b
Reads what torch.profiler exports: JSON, plain or packed (.gz, .zst), of NVIDIA, AMD and Ascend devices or of CPUs
alone; one file per rank. What was read is kept next to each trace as Parquet, and the next question takes no reading.
Files that are cut off give what they have; files that are no traces are named and skipped; nothing is dropped silently.
Exit codes: 0 analyzed; 2 bad input.
"""


@click.command("analyze", epilog=EPILOG)
@click.argument("paths", nargs=-1, required=True, type=click.Path(), metavar="DIR|FILES...")
@click.option("--plan", "plan_", metavar="FILE", help="The plan that was run: predicted against measured.")
@click.option("--against", metavar="DIR", help="Traces of another run: what changed since then.")
@click.option("--html", type=click.Path(), metavar="FILE", help="Write a report with timelines, one file.")
@click.option("--perfetto", type=click.Path(), metavar="FILE", help="Write the window to look at as a Chrome trace.")
@click.option(
    "--sql", metavar="QUERY", help="Ask the columns: tables events, steps, calls, kernels, ... ('show tables')."
)
@click.option("--workers", type=click.IntRange(min=1), help="Processes that read (default: one per core).")
@click.option("--ray", metavar="ADDRESS", help="Read on the cluster of Ray at HOST:PORT, or 'auto'.")
@click.option("--no-cache", is_flag=True, help="Neither use nor write Parquet next to the traces.")
@as_json
def command(paths: tuple[str, ...], against: str | None, json_: bool, **options: Any) -> None:
    """Turn profiler traces of a job into the few numbers that decide what to fix."""
    for option in ("html", "perfetto"):
        if options[option]:
            writable(options[option])
