"""Shared parts of verbs: output, the job options, completion of names."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from meshwright.base.files import decode_text, parse_json, read_json
from meshwright.clusters import Cluster
from meshwright.cost import RUNTIMES
from meshwright.errors import InputError
from meshwright.models import PRECISIONS, Model, presets
from meshwright.plans import OPTIMIZERS, Job, Plan, parse_short, read_plan

if TYPE_CHECKING:
    from rich.console import Console

F = TypeVar("F", bound=Callable[..., Any])

as_json = click.option("--json", "json_", is_flag=True, help="Print JSON for programs instead of text for people.")


own_runtime_option = click.option(
    "--runtime",
    type=click.Choice(list(RUNTIMES), case_sensitive=False),
    help="The framework that runs it (default: the plan's or the target's own, else meshwright).",
)


def runtime_named(plan: Plan, asked: str | None) -> str:
    """Return the framework a plan is priced for: the requested one, else the one of its search or import."""
    where = "search" if "runtime" in (plan.search or {}) else "estimate"
    name = asked or (getattr(plan, where) or {}).get("runtime", "meshwright")
    if name not in RUNTIMES:
        raise InputError(f"is {name!r}", field=f"{where}.runtime", valid=", ".join(RUNTIMES))
    return str(name)


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def console() -> Console:
    """Return the terminal at its width; files and pipes get room for every column. Text is never read as markup."""
    from rich.console import Console

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, markup=False, emoji=False, width=None if known else 200)


def complete_models(_: click.Context, __: click.Parameter, typed: str) -> list[str]:
    return [name for name in presets() if name.startswith(typed.lower())]


def complete_clusters(_: click.Context, __: click.Parameter, typed: str) -> list[str]:
    from meshwright.clusters import device_names

    before, times, last = typed.rpartition("x") if typed[:1].isdigit() else ("", "", typed)
    return [f"{before}{times}{name}" for name in device_names() if name.startswith(last.lower())]


def job_options(verb: F) -> F:
    """Add the options for the job of a short plan that names none."""
    verb = plan_options(verb)
    options = (
        click.option("--model", help="Model of a short plan: preset or config.json.", shell_complete=complete_models),
        click.option("--cluster", help="Its cluster: 8x8xh100 or a .toml file.", shell_complete=complete_clusters),
    )
    for option in reversed(options):
        verb = option(verb)
    return verb


def plan_options(verb: F) -> F:
    """Add the options of a job beside its model and its cluster."""
    count = click.IntRange(min=1)
    options = (
        click.option("--batch", type=count, help="Samples per step."),
        click.option("--seq", type=count, help="Tokens per sample (default: 4096, or what the model takes)."),
        click.option(
            "--precision", type=click.Choice(list(PRECISIONS)), help="Precision (default bf16; fp32 to train on CPUs)."
        ),
        click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), help="Optimizer (default adamw)."),
    )
    for option in reversed(options):
        verb = option(verb)
    return verb


def load_plan(what: str, options: dict[str, Any]) -> tuple[Plan, Job]:
    """Load a plan from a file, standard input (-) or short text (tp=8,pp=4), with its job."""
    given = {name: value for name, value in options.items() if value is not None}
    table, file = _plan_table(what)
    if given and isinstance(table, dict) and {"pipelines", "job", "model"} & set(table):
        first = next(iter(given))
        raise InputError("the plan has a job of its own, which no option changes", file=file, field=f"--{first}")
    return read_plan(table, _job(given) if given else None, file)


def load_plans(every: tuple[str, ...], options: dict[str, Any]) -> list[tuple[Plan, Job]]:
    """Load several plans; one without a job takes the job of the options, else of the first plan that has one."""
    given = {name: value for name, value in options.items() if value is not None}
    tables = [_plan_table(what) for what in every]
    whole = [isinstance(table, dict) and bool({"pipelines", "job", "model"} & set(table)) for table, _ in tables]
    if given and all(whole):
        raise InputError("every plan has a job of its own, which no option changes", field=f"--{next(iter(given))}")
    read = {i: read_plan(table, None, file) for i, (table, file) in enumerate(tables) if whole[i]}
    job = _job(given) if given else next((job for _, job in read.values()), None)
    return [read[i] if i in read else read_plan(table, job, file) for i, (table, file) in enumerate(tables)]


def job_of(model: str, cluster: str, options: dict[str, Any]) -> Job:
    """Return the job of a verb that takes MODEL and CLUSTER as arguments."""
    if options.get("batch") is None:
        raise InputError("is needed beside MODEL and CLUSTER", field="--batch", valid="samples per step")
    try:
        return _job({"model": model, "cluster": cluster} | {n: v for n, v in options.items() if v is not None})
    except InputError as error:
        if error.field in {"--model", "--cluster"}:
            error.field = error.field.removeprefix("--").upper()
        raise


def notes_on(plan: Plan, job: Job) -> list[str]:
    """Return notes that are no errors but worth knowing."""
    notes = []
    if idle := job.cluster.devices - plan.devices:
        notes.append(f"{idle} of {job.cluster.devices} devices are idle")
    if job.model.max_seq_len and job.seq_len > job.model.max_seq_len:
        notes.append(f"{job.model.name} was made for {job.model.max_seq_len} tokens, the job has {job.seq_len}")
    return notes


def _plan_table(what: str) -> tuple[object, str]:
    if what == "-":
        if sys.stdin is None:
            raise InputError("is closed", file="standard input")
        return parse_json(decode_text(sys.stdin.buffer.read(), "standard input"), "standard input"), "standard input"
    if "=" in what and not os.path.exists(what):
        return parse_short(what), ""
    return read_json(what), what


def _job(given: dict[str, Any]) -> Job:
    """Return the job that the options describe; an error is reported at its option."""
    for name in ("model", "cluster", "batch"):
        if name not in given:
            raise InputError(f"is needed beside --{next(iter(given))}", field=f"--{name}")
    made: dict[str, Any] = {}
    for name, make in (("model", Model.load), ("cluster", Cluster.load)):
        try:
            made[name] = make(given[name])
        except InputError as error:
            raise error.at(field=f"--{name}") from None
    settings = (given.get("seq", 0), given.get("precision", "bf16"), given.get("optimizer", "adamw"))
    try:
        return Job(made["model"], made["cluster"], given["batch"], *settings)
    except InputError as error:
        error.field = {"global_batch": "--batch", "seq_len": "--seq"}.get(error.field, f"--{error.field}")
        raise
