"""meshwright estimate MODEL CLUSTER --plan PLAN"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import click

from meshwright.base.files import write_text
from meshwright.base.units import count, size
from meshwright.cli.common import (
    as_json,
    complete_clusters,
    complete_models,
    console,
    load_plan,
    notes_on,
    own_runtime_option,
    plan_options,
    print_json,
    runtime_named,
)  # fmt: skip
from meshwright.errors import InputError
from meshwright.models import presets
from meshwright.plans import Job, Plan

if TYPE_CHECKING:
    from meshwright.cost.estimate import Estimate

EPILOG = """
\b
Examples:
  meshwright estimate llama3-70b 64x8xh100 --batch 1024 --seq 4096 \\
      --plan "tp=8,pp=4,dp=16,micro_batch=1,zero=1,recompute=selective"
  meshwright estimate plan.json --html plan.html      a page with the timeline and memory bars
  meshwright estimate plan.json --timeline step.json  for chrome://tracing or ui.perfetto.dev
  meshwright estimate plan.json --runtime megatron    as another framework would run it
  ... --plan "tp=8,recompute=norm+activation"         repeat chosen operators only
\b
Times are predictions: docs/measurements.md says how far they were off on published runs.
Exit codes: 0 it fits, 1 it does not fit into memory, 2 bad input.
"""


@click.command("estimate", epilog=EPILOG)
@click.argument("what", metavar="MODEL|PLAN", shell_complete=complete_models)
@click.argument("cluster", required=False, shell_complete=complete_clusters)
@click.option("--plan", "short", help="How to train it: tp=8,pp=4,zero=1, or a file.")
@plan_options
@own_runtime_option
@click.option("--timeline", type=click.Path(), help="Write the step as a Chrome/Perfetto trace.")
@click.option("--html", type=click.Path(), help="Write a page with the timeline and memory bars.")
@as_json
def command(
    what: str, cluster: str | None, short: str | None, runtime: str | None, timeline: str | None, html: str | None,
    json_: bool, **options: Any,
) -> None:  # fmt: skip
    """Predict step time, throughput and memory of any plan, and where the time goes.

    Name a MODEL and a CLUSTER and say how with --plan, or give the file of a PLAN that names its own.
    """
    document, job = _read(what, cluster, short, options)
    if timeline is not None and timeline == html:
        raise InputError("is the file of --timeline too", field="--html")
    from meshwright.cost import fits
    from meshwright.cost.estimate import estimate  # numpy is loaded here, not at the start

    found = estimate(job, document, runtime_named(document, runtime))
    if timeline:
        from meshwright.cost.chrome_trace import chrome_trace

        write_text(timeline, json.dumps(chrome_trace(found)))
    if html:
        from meshwright.cost.page import page

        write_text(html, page(found, notes_on(document, job)))
    if json_:
        print_json(found.to_table() | {"notes": notes_on(document, job)})
        raise click.exceptions.Exit(0 if found.fits else 1)
    _print(found)
    for path, text in ((timeline, "timeline"), (html, "page")):
        if path:
            click.echo(f"{text}: {path}")
    for note in notes_on(document, job):
        click.echo(f"note: {note}")
    fits(list(found.memory))


def _read(what: str, cluster: str | None, short: str | None, options: dict[str, Any]) -> tuple[Plan, Job]:
    """Load the plan and its job, from a file that names both or from a model, a cluster and a short plan."""
    if cluster is None:
        known = "=" not in what and not os.path.exists(what) and what in presets()
        if short is not None or known:
            raise InputError("is needed beside MODEL", field="CLUSTER", valid="8x8xh100, or a .toml file; and --plan")
        return load_plan(what, options)
    if not short:
        raise InputError("is needed beside MODEL and CLUSTER", field="--plan", valid="such as tp=8,pp=4,zero=1")
    if options.get("batch") is None:
        raise InputError("is needed beside MODEL and CLUSTER", field="--batch", valid="samples per step")
    try:
        return load_plan(short, {"model": what, "cluster": cluster, **options})
    except InputError as error:
        if error.field in {"--model", "--cluster"}:
            error.field = error.field.removeprefix("--").upper()
        if "job of its own" in error.problem:
            error.problem, error.field = "the plan has a job of its own: leave out MODEL and CLUSTER", "--plan"
        raise


def _print(found: Estimate) -> None:
    from rich.table import Table

    from meshwright.cost.estimate import MEMORY_MARGIN
    from meshwright.cost.page import job_text, plan_text
    from meshwright.plans.picture import draw_memory, legend_of_memory

    out = console()
    click.echo(f"{found.job.model.name} on {found.job.cluster.name}: {job_text(found)}")
    click.echo(f"{plan_text(found)}; {found.runtime.title}")
    click.echo(
        f"step {found.step_seconds:.3g} s   {found.tokens_per_second_per_device:,.0f} tokens/s/device   "
        f"MFU {found.mfu:.1%}   HFU {found.hfu:.1%}   {count(found.job.tokens_per_step)} tokens/step"
    )
    click.echo()
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("where the time goes")
    for heading in ("seconds", "part", "hidden beside it"):
        table.add_column(heading, justify="right")
    for name, seconds in sorted(found.breakdown.items(), key=lambda item: -item[1]):
        under = found.hidden.get(name, 0.0)
        table.add_row(name, f"{seconds:.4g}", f"{seconds / found.step_seconds:.1%}", f"{under:.4g}" if under else "")
    out.print(table)
    out.print(draw_memory(found.memory, out.width))
    out.print(legend_of_memory())
    out.print(f"peak {size(found.peak_memory)} on one device, give or take {MEMORY_MARGIN:.0%}")
