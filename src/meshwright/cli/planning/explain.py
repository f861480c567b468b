"""meshwright explain PLAN"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.common import (
    as_json,
    console,
    job_options,
    load_plan,
    notes_on,
    own_runtime_option,
    print_json,
    runtime_named,
)  # fmt: skip

if TYPE_CHECKING:
    from meshwright.search.explanation.explain import Explanation

_VISIBLE = 0.0005  # share of the step; less is rounded to zero
EPILOG = """
\b
Examples:
  meshwright explain plan.json
  meshwright explain tp=8,pp=4 --model llama3-70b --cluster 8x8xh100 --batch 128 --seq 8192
  meshwright explain plan.json --seconds 10     search longer for what would help
  meshwright explain plan.json --seconds 0      where the time goes, nothing searched
\b
A plan that `meshwright plan` found is searched again for each change of the job, within the same limits; a plan
written by hand is priced again as it is, and compared with the best there is.
Exit codes: 0 explained (also where it does not fit: then it says so), 2 bad input.
"""


@click.command("explain", epilog=EPILOG)
@click.argument("plan", type=click.Path())
@job_options
@own_runtime_option
@click.option("--seconds", type=click.FloatRange(min=0), help="For asking what would help (default 1).")
@as_json
def command(plan: str, runtime: str | None, seconds: float | None, json_: bool, **options: Any) -> None:
    """Say where the step of a plan goes, what limits it now, and what would help most.

    PLAN is a file, - for standard input, or a short text such as tp=8,pp=4 with the job in options.
    """
    document, job = load_plan(plan, options)
    from meshwright.search.explanation.explain import BUDGET, explain

    found = explain(job, document, runtime_named(document, runtime), seconds=BUDGET if seconds is None else seconds)
    notes = notes_on(document, job)
    if json_:
        print_json(found.to_table() | {"notes": notes})
        return
    _print(found)
    for note in notes:
        click.echo(f"note: {note}")


def _print(explanation: Explanation) -> None:
    from rich.table import Table

    from meshwright.cost.page import job_text, plan_text

    found = explanation.estimate
    click.echo(f"{found.job.model.name} on {found.job.cluster.name}: {job_text(found)}")
    click.echo(f"{plan_text(found)}; {found.runtime.title}")
    click.echo(
        f"step {found.step_seconds:.4g} s   MFU {found.mfu:.1%}   "
        f"{found.tokens_per_second_per_device:,.0f} tokens/s/device\n"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("where the step goes")
    for heading in ("seconds", "part"):
        table.add_column(heading, justify="right")
    for name, seconds in sorted(explanation.spending.parts.items(), key=lambda item: -item[1]):
        if seconds > _VISIBLE * found.step_seconds:
            table.add_row(name, f"{seconds:.4g}", f"{seconds / found.step_seconds:.1%}")
    console().print(table)
    click.echo(f"\nlimited by {explanation.limit.text}")
    for stage in explanation.stages:
        click.echo(f"  {stage.text}")
    if explanation.helps:
        click.echo("\nwhat would help")
    for help_ in explanation.helps:
        click.echo(f"  {help_.text}")
