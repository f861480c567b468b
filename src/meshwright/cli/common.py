"""What several verbs share: output, the job options, completion of names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from meshwright.cluster import Cluster
from meshwright.errors import InputError
from meshwright.files import read_json
from meshwright.model import Model, presets
from meshwright.plan import Job, Plan

if TYPE_CHECKING:
    from rich.console import Console

F = TypeVar("F", bound=Callable[..., Any])

as_json = click.option("--json", "json_", is_flag=True, help="Print JSON for programs instead of text for people.")


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def console() -> Console:
    """Terminal width and colour, with enough room for tables when the output is a file."""
    import sys

    from rich.console import Console

    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else 120)


def complete_models(_: click.Context, __: click.Parameter, typed: str) -> list[str]:
    return [name for name in presets() if name.startswith(typed.lower())]


def complete_clusters(_: click.Context, __: click.Parameter, typed: str) -> list[str]:
    from meshwright.cluster import device_names

    before, times, last = typed.rpartition("x") if typed[:1].isdigit() else ("", "", typed)
    return [f"{before}{times}{name}" for name in device_names() if name.startswith(last.lower())]


def job_options(verb: F) -> F:
    """The job of a short plan that does not name its own."""
    options = (
        click.option("--model", help="Model of a short plan: preset or config.json.", shell_complete=complete_models),
        click.option("--cluster", help="Its cluster: 8x8xh100 or a .toml file.", shell_complete=complete_clusters),
        click.option("--batch", type=int, help="Its samples per step."),
        click.option("--seq", type=int, help="Its tokens per sample."),
        click.option("--precision", help="Its precision (default bf16)."),
        click.option("--optimizer", help="Its optimizer (default adamw)."),
    )
    for option in reversed(options):
        verb = option(verb)
    return verb


def load_plan(path: str, options: dict[str, Any]) -> tuple[Plan, Job]:
    """The plan in a file and its job: from the file, or from the options."""
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        plan = Plan.load(path)
        return plan, plan.resolve()
    for name in ("model", "cluster", "batch"):
        if name not in given:
            raise InputError(f"is needed beside --{next(iter(given))}", field=f"--{name}")
    try:
        job = Job(
            Model.load(given["model"]), Cluster.load(given["cluster"]), given["batch"], given.get("seq", 0),
            given.get("precision", "bf16"), given.get("optimizer", "adamw"),
        )  # fmt: skip
        table = read_json(path)
        if isinstance(table, dict) and ("pipelines" in table or "job" in table):
            raise InputError("has a job of its own; leave --model and the others out", file=path, field="job")
        return Plan.of(table, job, file=path), job
    except InputError as error:
        raise error.at(file=path if Path(path).exists() else "") from None
