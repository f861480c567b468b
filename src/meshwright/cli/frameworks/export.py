"""meshwright export PLAN --to FORMAT"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from meshwright.base.files import write_error, write_texts
from meshwright.cli.common import as_json, job_options, load_plan, print_json
from meshwright.errors import InputError, MeshwrightError
from meshwright.frameworks.registry import FORMATS, format_named
from meshwright.plans import Job

if TYPE_CHECKING:
    from meshwright.frameworks.contract import Exported, Format
    from meshwright.frameworks.price import Price

EPILOG = """
\b
Examples:
  meshwright export plan.json --to megatron             print the script
  meshwright export plan.json --to megatron -o run/     write it, with the plan that it means beside it
  meshwright export tp=8,pp=4 --model llama3-70b --cluster 8x8xh100 --batch 512 --to megatron
  meshwright export --to list                           every format
\b
What a framework has no words for is taken as near as it can be said, listed on standard error, and priced. A plan
that was searched with `meshwright plan ... --for FORMAT` is said exactly.
Exit codes: 0 exported, 1 nothing near the plan can be said or the disk is full, 2 bad input.
"""


@click.command("export", epilog=EPILOG)
@click.argument("plan", type=click.Path(), required=False)
@click.option("--to", "name", required=True, metavar="FORMAT", help="The framework; 'list' lists them.")
@click.option("--output", "-o", type=click.Path(), help="Write the files into this folder (default: print the first).")
@job_options
@as_json
def command(plan: str | None, name: str, output: str | None, json_: bool, **options: Any) -> None:
    """Say a plan in the words of another framework: files that it runs unchanged.

    PLAN is a file, - for standard input, or a short text such as tp=8,pp=4 with the job in options.
    """
    if name == "list":
        _list(json_)
        return
    try:
        found = format_named(name)
    except InputError as error:
        raise error.at(field="--to") from None
    if plan is None:
        raise InputError("is needed beside --to", field="PLAN", valid="the file of a plan")
    document, job = load_plan(plan, options)
    if output is not None:
        _check_folder(output)
    exported = found.write(job, document)
    from meshwright.frameworks.price import price  # numpy is loaded here, not at the start

    priced = price(job, document, exported, found)
    if output is not None:
        _save(output, exported)
    if json_:
        print_json(_facts(exported, priced))
        return
    first = next(iter(exported.files))
    if output is None:
        click.echo(exported.files[first], nl=False)
    else:
        for file in exported.files:
            click.echo(f"wrote {os.path.join(output, file)}")
        click.echo(f"start it: {exported.command}")
    _notes(job, found, exported, priced)


def _notes(job: Job, found: Format, exported: Exported, priced: Price) -> None:
    """Print what the files leave to a user, and what they cannot express; it is not part of the files."""
    for line in exported.to_fill:
        click.echo(f"to fill in: {line}", err=True)
    for line in exported.missing:
        click.echo(f"cannot be said: {line}", err=True)
    click.echo(priced.text, err=True)
    if exported.missing and found.target:
        model = job.model.reference if isinstance(job.model.reference, str) else "config.json"
        rest = f"{model} {job.cluster.name} --batch {job.global_batch} --seq {job.seq_len}"
        click.echo(f"said exactly: meshwright plan {rest} --for {found.target}", err=True)


def _facts(exported: Exported, priced: Price) -> dict[str, Any]:
    return {
        "files": dict(exported.files),
        "command": exported.command,
        "missing": list(exported.missing),
        "to_fill": list(exported.to_fill),
        "step_time_s": priced.said.step_seconds,
        "given_step_time_s": priced.given.step_seconds,
        "fits": priced.said.fits,
        "runtime": priced.said.runtime.name,
        "plan": exported.plan.to_table(),
    }


def _list(json_: bool) -> None:
    formats = [format_named(name) for name in FORMATS]
    if json_:
        print_json([{"name": f.name, "title": f.title, "reads": f.read is not None, "for": f.target} for f in formats])
        return
    for found in formats:
        both = "export and import" if found.read else "export"
        click.echo(f"{found.name:12} {found.title:28} {both}")


def _check_folder(path: str) -> None:
    if os.path.exists(path) and not os.path.isdir(path):
        raise InputError("is a file", field="--output", valid="a folder, there or not")
    above = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(path) and not os.path.isdir(above):
        raise InputError(f"there is no folder '{above}'", field="--output")


def _save(path: str, exported: Exported) -> None:
    there = os.path.isdir(path)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise write_error(error, file=path, field="--output") from None
    try:
        write_texts({os.path.join(path, file): text for file, text in exported.files.items()})
    except MeshwrightError:
        if not there:
            os.rmdir(path)
        raise
