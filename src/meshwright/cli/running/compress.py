"""meshwright compress bench, meshwright compress explain"""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

import click

from meshwright.base.files import writable, write_text
from meshwright.base.units import size
from meshwright.cli.common import as_json, console, load_plan, own_runtime_option, print_json, runtime_named
from meshwright.errors import InputError

_LATENCY = 0.1  # ms per message, by default
_NARROW = 120  # characters of a terminal: a narrower one shows every other bandwidth, and fewer columns of layers


EPILOG = """
\b
Examples:
  meshwright compress bench                              how fast every codec is on this device
  meshwright compress explain --processes 4 --mbit 200   what pays on such a link, by size of a gradient
  meshwright compress explain plan.json -o new.json      which layers of a plan; the plan with what was decided
"""


@click.group("compress", epilog=EPILOG)
def command() -> None:
    """Gradients in fewer bytes: how fast codecs are here, and where they pay."""


BENCH = """
\b
Examples:
  meshwright compress bench                       every codec on this device; some seconds
  meshwright compress bench --codecs int8,topk    some of them
  meshwright compress bench --mib 1024 --json     of larger gradients, for programs
\b
GB/s are bytes that an algorithm's passes must read and write, so that 100 % is as fast as a copy. A CUDA device is measured
where there is one, else the processor. Other load on the machine shows in the figures.
Exit codes: 0 measured, 2 bad input.
"""


@command.command("bench", epilog=BENCH)
@click.option("--codecs", metavar="A,B,...", help="Which (default: all).")
@click.option("--mib", type=click.IntRange(1, 1 << 15), help="Size of the gradients (default 16; 256 on CUDA devices).")
@as_json
def bench(codecs: str | None, mib: int | None, json_: bool) -> None:
    """Time encoding and decoding of every codec, against a copy on the same device."""
    from meshwright.compression import preflight
    from meshwright.measurement.progress import bar

    names = [name.strip() for name in codecs.split(",")] if codecs is not None else []
    with bar() as tell:
        found = preflight.bench(names, mib, tell)
    if json_:
        print_json(found)
        return
    copy = found["copy_bytes_per_second"]
    click.echo(f"{found['device']}, {size(found['bytes'])} of float32: copy {copy / 1e9:.4g} GB/s")
    rows = [
        [
            one["codec"],
            f"{one['ratio']:.1f}",
            *(
                word
                for what in ("encode", "decode")
                for rate in [one[f"{what}_bytes_per_second"]]
                for word in (f"{rate / 1e9:.4g}", f"{rate / copy:.0%}", f"{one[what] * 1e6:,.0f}")
            ),
        ]
        for one in found["codecs"]
    ]
    headings = ["encode GB/s", "of copy", "us", "decode GB/s", "of copy", "us"]
    _print(["codec", "times smaller", *headings], rows, left={"codec"})


EXPLAIN = """
\b
Examples:
  meshwright compress explain --processes 4 --mbit 200            what pays on such a link, by size
  meshwright compress explain --processes 16 --html pays.html     the picture, every bandwidth
  meshwright compress explain plan.json                           which layers of a plan, on its cluster's links
  meshwright compress explain plan.json --mbit 1000 -o new.json   on another link; the plan with what was decided
\b
Codecs and topologies are run on this machine's processor, without a network, and timed; then a step is simulated with every
way. Gradients stay as they are unless training to the same loss takes a tenth less time with 16 bits, or a third less with
fewer. Gradients of more than 2^22 numbers
are run as smaller ones of the same form, and scaled. The speed-up counts the
steps that a lossy way needs besides. docs/compress.md says more.
Exit codes: 0 explained (also where nothing pays: then it says so), 2 bad input.
"""


@command.command("explain", epilog=EXPLAIN)
@click.argument("plan", required=False, type=click.Path())
@click.option("--processes", type=click.IntRange(2, 1024), help="That sum their gradients, where there is no plan.")
@click.option("--mbit", type=click.FloatRange(0, 1e7, min_open=True), help="Mbit/s that each process can send.")
@click.option("--latency", type=click.FloatRange(0, 1e4), help=f"Milliseconds of a message (default {_LATENCY}).")
@click.option("--html", type=click.Path(), help="Write the picture of sizes and bandwidths.")
@click.option("--output", "-o", type=click.Path(), help="Write the plan with its compression.")
@own_runtime_option
@as_json
def explain(
    plan: str | None, processes: int | None, mbit: float | None, latency: float | None, html: str | None,
    output: str | None, runtime: str | None, json_: bool,
) -> None:  # fmt: skip
    """Say whether compressing gradients pays, how, and how much faster training gets.

    Without a PLAN: by size of a gradient and bandwidth. With one: layer by layer, as its replicas sum them.
    """
    for option, path in (("--html", html), ("--output", output)):
        if path is not None:
            writable(option, path)
    for option, number in (("--mbit", mbit), ("--latency", latency)):
        if number is not None and isnan(number):
            raise InputError("is no number", field=option)
    needless = (
        {"--output": output, "--runtime": runtime} if plan is None else {"--processes": processes, "--html": html}
    )
    for option, value in needless.items():
        if value is not None:
            raise InputError("needs a PLAN" if plan is None else "does not go with a PLAN", field=option)
    if plan is None and processes is None:
        raise InputError("is needed without a PLAN", field="--processes", valid="2 or more")
    if plan is not None and mbit is None and latency is not None:
        raise InputError("goes with --mbit: the plan's cluster has its own", field="--latency")
    milliseconds = _LATENCY if latency is None else latency
    if processes is not None:
        _without_plan(processes, mbit, milliseconds, html, json_=json_)
    elif plan is not None:
        _with_plan(plan, None if mbit is None else (mbit, milliseconds / 1e3), output, runtime, json_=json_)


def _without_plan(processes: int, mbit: float | None, latency: float, html: str | None, *, json_: bool) -> None:
    from meshwright.compression import preflight
    from meshwright.compression.planning.page import NOTE, TITLES, bandwidth, page, row
    from meshwright.measurement.progress import bar

    with bar() as tell:
        found = preflight.grid(processes, mbit, latency / 1e3, tell)
    if html:
        write_text(html, page(found))
    if json_:
        print_json(found)
        return
    click.echo(f"{processes} processes, {latency:g} ms for a message, {found['cores']:g} cores for each")
    step = 1 if console().width >= _NARROW else 2
    across = [bandwidth(one) for one in found["mbits"][::step]]
    rows = [
        [size(bytes_), *(cell["way"] for cell in cells[::step])]
        for bytes_, cells in zip(found["sizes"], found["grid"], strict=True)
    ]
    _print(["gradient", *across], rows, left=set(across))
    if mbit:
        click.echo(f"\nat {bandwidth(mbit)}/s")
        _print(list(TITLES), [row(cell) for cell in found["table"]], left={"way", "topology"})
    click.echo(f"\n{NOTE}")
    if html:
        click.echo(f"page: {html}")


def _with_plan(
    what: str, link: tuple[float, float] | None, output: str | None, runtime: str | None, *, json_: bool
) -> None:
    document, job = load_plan(what, {})
    from meshwright.compression import preflight
    from meshwright.measurement.progress import bar

    with bar() as tell:
        found, other = preflight.planned(job, document, runtime_named(document, runtime), link, tell)
    if output:
        other.save(output)
    facts = found.to_table()
    if json_:
        print_json(facts)
        return
    click.echo(f"{job.model.name} on {job.cluster.name}, {facts['link']}; codecs {facts['codecs']}")
    told: dict[str, Callable[[dict[str, Any]], str]] = {
        "layers": _layers, "numbers each": lambda one: f"{one['numbers']:,}", "replicas": lambda one: str(one["replicas"]),
        "way": lambda one: one["way"], "topology": lambda one: one["topology"],
        "each sends": lambda one: size(one["sent_bytes"]), "why": lambda one: one["why"],
    }  # fmt: skip
    if console().width < _NARROW:
        told = {heading: told[heading] for heading in ("layers", "way", "why")}
    rows = [[text(one) for text in told.values()] for one in facts["rows"]]
    _print(list(told), rows, left={"layers", "way", "topology", "why"})
    _print_verdict(facts)
    if output:
        click.echo(f"plan: {output}")


def _print_verdict(facts: dict[str, Any]) -> None:
    from meshwright.compression.planning.page import seconds, times

    if not facts["compression"]:
        click.echo("\nnothing pays: gradients stay as they are")
        return
    before, after = seconds(facts["plain_seconds"]), seconds(facts["seconds"])
    click.echo(
        f"\nthe last backward pass with its sums: {after} instead of {before}; with {facts['steps']:.2f} times the steps "
        f"that is {times(facts['speed_up'])}"
    )


def _layers(row: dict[str, Any]) -> str:
    names, part = row["layers"], " (experts)" if row["part"] == "experts" else ""
    return f"{names[0]}{part}" + f" and {len(names) - 1} like it" * (len(names) > 1)


def _print(headings: list[str], rows: list[list[str]], left: set[str]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=heading != "why")
    for row in rows:
        table.add_row(*row)
    console().print(table)
