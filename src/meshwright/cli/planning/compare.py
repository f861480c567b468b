"""meshwright compare A B"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.common import (
    as_json,
    console,
    job_options,
    load_plans,
    own_runtime_option,
    print_json,
    runtime_named,
)

if TYPE_CHECKING:
    from meshwright.search.explanation.compare import Comparison

EPILOG = """
\b
Examples:
  meshwright compare best.json by-hand.json
  meshwright compare plan.json tp=8,pp=4        the short text takes the job of the file
  meshwright compare tp=8,pp=4 tp=4,pp=8 --model llama3-70b --cluster 8x8xh100 --batch 128 --seq 8192
  meshwright compare plan.json plan.json --runtime megatron
\b
Exit codes: 0 compared (also where one does not fit: then it says so), 2 bad input.
"""


@click.command("compare", epilog=EPILOG)
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@job_options
@own_runtime_option
@as_json
def command(a: str, b: str, runtime: str | None, json_: bool, **options: Any) -> None:
    """Put two plans side by side: jobs, choices, speed, memory, and where the time differs.

    A and B are files, or short texts such as tp=8,pp=4 with the job in options or taken from the other plan.
    """
    pairs = load_plans((a, b), options)
    from meshwright.cost.estimate import estimate  # numpy is loaded here, not at the start
    from meshwright.search.explanation.compare import compare

    first, second = (estimate(job, plan, runtime_named(plan, runtime)) for plan, job in pairs)
    found = compare(first, second)
    if json_:
        print_json(found.to_table())
        return
    _print(found, a, b)


def _print(found: Comparison, a: str, b: str) -> None:
    from rich.table import Table
    from rich.text import Text

    from meshwright.search.explanation.time_breakdown import percent

    out = console()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("", a, b, "change"):
        table.add_column(Text(heading), justify="left" if not heading else "right")
    for title, rows in (("job", found.job), ("choices", found.choices), ("reached", found.reached)):
        if rows:
            table.add_row(Text(title, style="bold"))
        for row in rows:
            table.add_row(f"  {row.name}", row.first, row.second)
    table.add_row(Text("seconds of a step", style="bold"))
    for line in found.time:
        table.add_row(f"  {line.name}", f"{line.first:.4g}", f"{line.second:.4g}", percent(line.change))
    out.print(table)
    if not found.choices:
        click.echo("both make the same choices")
    click.echo(found.verdict)
