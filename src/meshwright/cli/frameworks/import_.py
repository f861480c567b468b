"""meshwright import FILE --from FORMAT --cluster CLUSTER"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
import msgspec

from meshwright.base.files import decode_text, read_text, writable
from meshwright.cli.common import as_json, complete_clusters, complete_models, print_json
from meshwright.clusters import Cluster
from meshwright.errors import InputError, closest_names
from meshwright.frameworks.contract import Beside, Imported
from meshwright.frameworks.registry import format_named, read
from meshwright.models import Model

if TYPE_CHECKING:
    from meshwright.cost.estimate import Estimate

EPILOG = """
\b
Examples:
  meshwright import run.sh --from megatron --cluster 8x8xh100 -o plan.json
  meshwright explain plan.json                      what it costs, what limits it, what would help
  meshwright import run.sh --from megatron --cluster 8x8xh100 | meshwright estimate -
  meshwright import args.yaml --from megatron --model llama3-70b --cluster 16x8xh100
\b
The document goes to standard output or to --output, what was assumed and what was not understood to standard error.
Arguments that contradict each other are refused with both values.
Exit codes: 0 imported, 2 bad input.
"""


@click.command("import", epilog=EPILOG)
@click.argument("file", type=click.Path())
@click.option("--from", "name", required=True, metavar="FORMAT", help="The framework: see `export --to list`.")
@click.option(
    "--cluster", required=True, help="What it runs on: 8x8xh100 or a .toml file.", shell_complete=complete_clusters
)
@click.option("--model", help="What it trains, where the file does not say.", shell_complete=complete_models)
@click.option("--batch", type=click.IntRange(min=1), help="Samples per step, where the file does not say.")
@click.option("--seq", type=click.IntRange(min=1), help="Tokens per sample, where the file does not say.")
@click.option("--output", "-o", type=click.Path(), help="Write the plan to a file (default: print it).")
@as_json
def command(
    file: str, name: str, cluster: str, model: str | None, batch: int | None, seq: int | None, output: str | None,
    json_: bool,
) -> None:  # fmt: skip
    """Read the present configuration of another framework into a plan, so that it can be priced and improved.

    FILE is the script or configuration, or - for standard input.
    """
    if output is not None:
        writable("--output", output)
    try:
        found = format_named(name)
    except InputError as error:
        raise error.at(field="--from") from None
    beside = Beside(_made(Cluster.load, cluster, "--cluster"), _made(Model.load, model, "--model"), batch, seq)
    imported = read(_text(file), name, "standard input" if file == "-" else file, beside)
    from meshwright.cost.estimate import estimate  # numpy is loaded here, not at the start
    from meshwright.frameworks.price import runtime_of

    priced = estimate(imported.job, imported.plan, runtime_of(found))
    document = msgspec.structs.replace(imported.plan, estimate=_predicted(priced))
    imported = replace(imported, plan=document)
    if output is not None:
        document.save(output)
    if json_:
        print_json(_facts(imported, priced))
        return
    if output is None:
        click.echo(document.to_json(), nl=False)
    _notes(imported, priced, name)
    if output is not None:
        click.echo(f"plan: {output}")
        click.echo(f"next: meshwright explain {output}")


def _notes(imported: Imported, priced: Estimate, name: str) -> None:
    from meshwright.cost.page import job_text, plan_text

    job = imported.job
    click.echo(f"{job.model.name} on {job.cluster.name}: {job_text(priced)}", err=True)
    fits = "" if priced.fits else "; it does not fit into memory"
    click.echo(f"{plan_text(priced)}; predicted step {priced.step_seconds:.4g} s, MFU {priced.mfu:.1%}{fits}", err=True)
    for line in imported.assumed:
        click.echo(f"assumed: {line}", err=True)
    for argument in imported.unknown:
        near = _near(argument, name)
        click.echo(f"unknown: {argument}" + (f"; did you mean {near}?" if near else ""), err=True)
    if imported.unused:
        click.echo(f"says nothing about a plan: {' '.join(imported.unused)}", err=True)


def _predicted(priced: Estimate) -> dict[str, Any]:
    """Return the prediction as the plan stores it, with the runtime, so that readers price the plan as it runs."""
    return {
        "runtime": priced.runtime.name,
        "step_time_s": priced.step_seconds,
        "tokens_per_s_per_device": priced.tokens_per_second_per_device,
        "mfu": priced.mfu,
        "peak_memory_bytes": priced.peak_memory,
    }


def _near(argument: str, name: str) -> str:
    """Return the known argument that is most similar to an unknown one."""
    known = format_named(name).words
    near = closest_names(argument.lstrip("-"), known, limit=1)
    return f"{argument[: len(argument) - len(argument.lstrip('-'))]}{near[0]}" if near else ""


def _facts(imported: Imported, priced: Estimate) -> dict[str, Any]:
    return {
        "plan": imported.plan.to_table(),
        "unknown": list(imported.unknown),
        "unused": list(imported.unused),
        "assumed": list(imported.assumed),
        "step_time_s": priced.step_seconds,
        "fits": priced.fits,
    }


def _made(make: Any, what: str | None, option: str) -> Any:
    if what is None:
        return None
    try:
        return make(what)
    except InputError as error:
        raise error.at(field=option) from None


def _text(file: str) -> str:
    if file != "-":
        return read_text(file)
    if sys.stdin is None:
        raise InputError("is closed", file="standard input")
    return decode_text(sys.stdin.buffer.read(), "standard input")
