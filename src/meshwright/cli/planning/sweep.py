"""meshwright sweep MODEL CLUSTER"""

from __future__ import annotations

import csv
import sys
from typing import TYPE_CHECKING

import click

from meshwright.base.files import writable, write_text
from meshwright.base.units import size
from meshwright.cli.common import as_json, complete_clusters, complete_models, console, own_runtime_option, print_json
from meshwright.cli.planning.search_options import Watch, limits_from, search_options
from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.models import PRECISIONS, Model
from meshwright.plans import OPTIMIZERS
from meshwright.search.space.targets import TARGETS

if TYPE_CHECKING:
    from meshwright.search.explanation.sweep import Point

EPILOG = """
\b
Examples:
  meshwright sweep llama3-8b 8xh100 --batch 64,128 --seq 4096,8192
  meshwright sweep llama3-8b 4x8xh100 --nodes 1,2,4 --batch 128 --seq 8192 --price 2.5
  meshwright sweep llama3-8b 8xh100 --batch 64,128 --seq 8192 --csv
\b
Rows marked * are worth it: no other is faster at no more cost. Costs are device-hours per billion tokens, idle
devices included, or dollars with --price. Combinations that do not fit are rows that say so.
Exit codes: 0 at least one combination fits, 1 none fits, 2 bad input.
"""
_PATIENCE = 10.0  # seconds for each combination
_WIDE = 110  # characters needed for every column


@click.command("sweep", epilog=EPILOG)
@click.argument("model", shell_complete=complete_models)
@click.argument("cluster", shell_complete=complete_clusters)
@click.option("--batch", required=True, metavar="N,N,...", help="Samples per step.")
@click.option("--seq", metavar="N,N,...", help="Tokens per sample (default: 4096, or what the model takes).")
@click.option("--nodes", metavar="N,N,...", help="Numbers of nodes (default: the cluster's).")
@click.option("--price", type=click.FloatRange(min=0), help="Dollars per device and hour.")
@click.option("--precision", type=click.Choice(list(PRECISIONS)), default="bf16", help="Precision (default bf16).")
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", help="Optimizer (default adamw).")
@own_runtime_option
@search_options
@click.option("--csv", "csv_", is_flag=True, help="Print comma-separated values.")
@click.option("--html", type=click.Path(), help="Write a page with throughput against cost.")
@as_json
def command(
    model: str, cluster: str, batch: str, seq: str | None, nodes: str | None, price: float | None, precision: str,
    optimizer: str, runtime: str | None, time_limit: float | None, headroom: float, target_: str | None,
    fix: tuple[str, ...], forbid: tuple[str, ...], csv_: bool, html: str | None, json_: bool,
) -> None:  # fmt: skip
    """Plan every combination of batch, sequence and number of nodes; compare throughput and cost.

    --time-limit is for each combination (default 10 seconds).
    """
    if csv_ and json_:
        raise InputError("does not go with --json", field="--csv", valid="one of the two")
    limits = limits_from(fix, forbid, target_, headroom)
    batches, seqs = _numbers("--batch", batch), _numbers("--seq", seq) if seq else [0]
    counts = _numbers("--nodes", nodes) if nodes else []
    if html is not None:
        writable("--html", html)
    loaded = _load(model, cluster)
    from meshwright.search.explanation.sweep import sweep  # numpy is loaded here, not at the start

    name = runtime or (TARGETS[target_].runtime if target_ else "meshwright")
    with Watch() as watch:

        def progress(done: int, total: int) -> None:
            if sys.stderr.isatty():
                watch.show(f"{done} of {total} combinations", done / total)

        try:
            points = sweep(
                *loaded, batches, seqs, counts, runtime_name=name, precision=precision, optimizer=optimizer,
                limits=limits, time_limit=time_limit or _PATIENCE, progress=progress,
            )  # fmt: skip
        except InputError as error:
            fields = {"global_batch": "--batch", "seq_len": "--seq", "precision": "--precision"}
            error.field = fields.get(error.field, error.field)
            raise
    _say(points, price, csv_=csv_, json_=json_)
    if html:
        from meshwright.search.explanation.html import sweep_page

        write_text(html, sweep_page(points, price))
        if not (csv_ or json_):
            click.echo(f"page: {html}")
    raise click.exceptions.Exit(0 if any(point.best for point in points) else 1)


def _load(model: str, cluster: str) -> tuple[Model, Cluster]:
    try:
        found = Model.load(model)
    except InputError as error:
        raise error.at(field="MODEL") from None
    try:
        return found, Cluster.load(cluster)
    except InputError as error:
        raise error.at(field="CLUSTER") from None


def _numbers(option: str, text: str) -> list[int]:
    """Parse `256,512` as numbers, each once."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isascii() and word.isdigit() and int(word[:12]) > 0 and len(word) <= 12):
            raise InputError(f"'{word[:20]}' is not a positive integer", field=option, valid="such as 256,512")
    return list(dict.fromkeys(map(int, words)))


def _say(points: list[Point], price: float | None, *, csv_: bool, json_: bool) -> None:
    rows = [point.to_table(price) for point in points]
    if json_:
        print_json(rows)
    elif csv_:
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        _print(points, price)


def _print(points: list[Point], price: float | None) -> None:
    """Print a row for each combination; narrow terminals omit columns that others imply."""
    from rich.table import Table

    from meshwright.cost.page import plan_text

    out, table = console(), Table(box=None, pad_edge=False, header_style="dim")
    headings = ["", "nodes", "devices", "batch", "seq", "tokens/s", "per device", "MFU", "memory", "cost"]
    shown = [h for h in headings if out.width >= _WIDE or h not in {"devices", "per device"}]
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("plan", overflow="fold")
    for point in points:
        cells = dict.fromkeys(headings, "")
        cells |= {"nodes": str(point.nodes), "devices": f"{point.devices:,}"}
        cells |= {"batch": f"{point.job.global_batch:,}", "seq": f"{point.job.seq_len:,}"}
        if found := point.best:
            cells |= {
                "": "*" if point.worth_it else "",
                "tokens/s": f"{point.tokens_per_second:,.0f}",
                "per device": f"{found.tokens_per_second_per_device:,.0f}",
                "MFU": f"{found.mfu:.1%}",
                "memory": size(found.peak_memory),
                "cost": f"{point.device_hours * (1 if price is None else price):,.1f}",
            }
        table.add_row(*(cells[h] for h in shown), plan_text(found) if found else point.problem)
    out.print(table)
    if any(point.best for point in points):
        click.echo(f"* worth it: no other is faster at no more cost ({_unit(price)} per billion tokens)")


def _unit(price: float | None) -> str:
    return "device-hours" if price is None else "dollars"
