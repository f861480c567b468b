"""meshwright plan MODEL CLUSTER"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from meshwright.base.files import writable, write_text
from meshwright.base.units import size
from meshwright.cli.common import (
    as_json,
    complete_clusters,
    complete_models,
    console,
    job_of,
    notes_on,
    own_runtime_option,
    plan_options,
)  # fmt: skip
from meshwright.cli.planning.search_options import Watch, forbiddable, limits_from, proof, search_options
from meshwright.errors import InputError
from meshwright.search.space.targets import TARGETS

if TYPE_CHECKING:
    from meshwright.search.explanation.explain import Explanation
    from meshwright.search.explanation.runners_up import RunnerUp
    from meshwright.search.planner import Answer

_SPARE = 0.05  # share of a device's memory; less gets a note
EPILOG = f"""
\b
Examples:
  meshwright plan llama3-8b 8xh100 --batch 64 --seq 8192
  meshwright plan llama3-70b 8x8xh100 --batch 128 --seq 8192 -o plan.json --html report.html
  meshwright plan llama3-8b 8xh100 --batch 64 --seq 8192 --fix tp=2,pp=2 --forbid offload
  meshwright plan llama3-8b 8xh100 --batch 64 --seq 8192 --for megatron
  meshwright plan llama3-8b 8xh100 --batch 64 --seq 8192 --time-limit 5 --json
\b
--fix takes tp, sp, ulysses, ring, ep, etp, dp, pp, virtual, micro_batch, micro_batches, zero, zero_group, devices,
schedule and recompute. --forbid takes:
{forbiddable()}
\b
--json prints the plan document; --why adds the explanation to it, under search.why.
Ctrl-C ends the search with the best plan so far and how far from the best it can be.
Exit codes: 0 a plan, 1 nothing fits (says what comes closest, and what would be enough), 2 bad input.
"""


@click.command("plan", epilog=EPILOG)
@click.argument("model", shell_complete=complete_models)
@click.argument("cluster", shell_complete=complete_clusters)
@plan_options
@own_runtime_option
@click.option("--solver", type=click.Choice(["exact", "milp"]), default="exact", help="How to search (default exact).")
@search_options
@click.option("--top", type=click.IntRange(0, 10), default=3, help="Runners-up of another kind to show (default 3).")
@click.option("--output", "-o", type=click.Path(), help="Write the plan to a file.")
@click.option("--html", type=click.Path(), help="Write a report that opens in a browser.")
@click.option("--why/--no-why", default=None, help="Say what limits it and what would help (default: with text).")
@as_json
def command(
    model: str, cluster: str, runtime: str | None, solver: str, time_limit: float | None, target_: str | None,
    fix: tuple[str, ...], forbid: tuple[str, ...], headroom: float, top: int, output: str | None,
    html: str | None, why: bool | None, json_: bool, **options: Any,
) -> None:  # fmt: skip
    """Find the fastest plan for a model on a cluster, and prove that nothing in the searched space is faster.

    MODEL is a preset or a config.json, CLUSTER a text such as 8x8xh100 or a .toml file.
    """
    limits = limits_from(fix, forbid, target_, headroom)
    _writable(output, html)
    job = job_of(model, cluster, options)
    if target_ not in (None, "meshwright") and len(job.cluster.groups) > 1:
        raise InputError(f"{target_} runs one plan on equal devices", field="--for", valid="a cluster of one kind")
    from meshwright.cost import fits
    from meshwright.search import planner  # numpy is loaded here, not at the start

    name = runtime or (TARGETS[target_].runtime if target_ else "meshwright")
    with Watch(time_limit) as watch:
        answer = planner.plan(
            job, name, fix=limits.fixed, forbid=limits.forbidden, time_limit=time_limit, progress=watch, solver=solver,
            headroom=headroom,
        )  # fmt: skip
    fits(list(answer.estimate.memory))  # a printed plan must be able to run
    reason = watch.reason
    said = not json_ if why is None else why
    document = answer.plan
    if output:
        document.save(output)  # before it is explained: no result may be lost
    notes = [*notes_on(document, job), *_tight(answer)]
    line = proof(document.search or {}, reason)
    if not json_:
        _print(answer, line)
        sys.stdout.flush()  # the explanation takes a second or two
    explanation, others = _explained(answer, top) if (said or html) and not watch.interrupted else (None, ())
    if json_ and explanation and said:
        more = {"why": explanation.to_table(), "runners_up": [r.to_table() for r in others]}
        document = replace(document, search={**(document.search or {}), **more})
        if output:
            document.save(output)
    if html:
        from meshwright.search.explanation.html import report

        write_text(html, report(answer, explanation, others, line, notes))
    if json_:
        click.echo(document.to_json(), nl=False)
        return
    if said:
        _print_why(explanation, others)
    for path, text in ((output, "plan"), (html, "report")):
        if path:
            click.echo(f"{text}: {path}")
    for note in notes:
        click.echo(f"note: {note}")


def _writable(output: str | None, html: str | None) -> None:
    """Raise if an output cannot be written, before a search that may take long."""
    if output and html and os.path.realpath(output) == os.path.realpath(html):
        raise InputError("is the file of --output too", field="--html")
    for option, path in (("--output", output), ("--html", html)):
        if path is not None:
            writable(option, path)


def _tight(answer: Answer) -> list[str]:
    """Return notes where little memory is left: memory is predicted, not measured."""
    from meshwright.cost.estimate import MEMORY_MARGIN

    used = max(row.total / row.capacity for row in answer.estimate.memory)
    if used < 1 - _SPARE:
        return []
    return [
        f"{used:.1%} of a device's memory is planned for, and predictions are off by up to {MEMORY_MARGIN:.0%}; "
        "--headroom 0.1 leaves a tenth free"
    ]


def _explained(answer: Answer, top: int) -> tuple[Explanation | None, tuple[RunnerUp, ...]]:
    """Return what limits the plan, and the runners-up; an interrupt drops these, not the plan."""
    from meshwright.search.explanation.explain import explain, runners_up

    found = answer.estimate
    try:
        return explain(found.job, answer.plan, found.runtime), runners_up(answer, most=top)
    except KeyboardInterrupt:
        return None, ()


def _print(answer: Answer, line: str) -> None:
    from meshwright.plans.picture import draw

    out, found = console(), answer.estimate
    out.print(draw(answer.plan, found.job, found.memory, out.width))
    worst = max(found.memory, key=lambda row: row.total / row.capacity)
    click.echo(
        f"\nstep {found.step_seconds:.4g} s   MFU {found.mfu:.1%}   "
        f"{found.tokens_per_second_per_device:,.0f} tokens/s/device   "
        f"memory {size(worst.total)} of {size(worst.capacity)}   {found.runtime.name}"
    )
    click.echo(line)


def _print_why(explanation: Explanation | None, others: tuple[RunnerUp, ...]) -> None:
    if others:
        click.echo()
        console().print(_table(others))
        if any(other.cut_short for other in others):
            click.echo("at most: the search for the best of that kind was cut short")
    if explanation:
        click.echo(f"\nlimited by {explanation.limit.text}")
        for help_ in explanation.helps:
            click.echo(f"  {help_.text}")
        if any(help_.at_least for help_ in explanation.helps):
            click.echo("  (at least: the search for it was cut short)")


def _table(others: tuple[RunnerUp, ...]) -> Any:
    from rich.table import Table

    from meshwright.cost.page import plan_text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("runner-up", "step", "slower", "memory", "loses on", "plan"):
        number = heading in {"step", "slower", "memory"}
        table.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for other in others:
        found = other.estimate
        step, memory = f"{found.step_seconds:.4g} s", size(found.peak_memory)
        table.add_row(other.kind, step, other.slower_text, memory, other.loses, plan_text(found))
    return table
