"""meshwright show PLAN"""

from __future__ import annotations

from typing import Any

import click

from meshwright.cli.common import as_json, console, job_options, load_plan, notes_on, own_runtime_option, runtime_named

EPILOG = """
\b
Examples:
  meshwright show plan.json           stages over layers, memory bars
  meshwright show short.json --json   the full form that a short plan expands to
  meshwright show tp=8,pp=4 --model llama3-70b --cluster 8x8xh100 --batch 512 --seq 8192
"""


@click.command("show", epilog=EPILOG)
@click.argument("plan", type=click.Path())
@job_options
@own_runtime_option
@as_json
def command(plan: str, runtime: str | None, json_: bool, **options: Any) -> None:
    """Draw a plan in the terminal: which devices run which layers how, and what fills their memory.

    PLAN is a file, - for standard input, or a short text such as tp=8,pp=4 with the job in options.
    """
    document, job = load_plan(plan, options)
    if json_:
        click.echo(document.to_json(), nl=False)
        return
    from meshwright.cost import RUNTIMES, plan_memory  # numpy is loaded here, not at the start
    from meshwright.plans.picture import draw

    out = console()
    out.print(draw(document, job, plan_memory(document, job, RUNTIMES[runtime_named(document, runtime)]), out.width))
    for note in notes_on(document, job):
        out.print(f"note: {note}")
