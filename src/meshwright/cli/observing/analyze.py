"""meshwright analyze"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from meshwright.base.files import writable, write_text
from meshwright.cli.common import as_json, console, print_json
from meshwright.errors import InputError
from meshwright.plans import Plan

if TYPE_CHECKING:
    from meshwright.traces.analysis import Analysis
    from meshwright.traces.gather_ranks import Tell
    from meshwright.traces.job.difference import Difference

QUIET = 1.0  # seconds before a bar appears
MOST_ROWS = 1_000  # rows of a query printed as text
EPILOG = """
\b
Examples:
  meshwright analyze traces/                            where the time of a job went, and what to do about it
  meshwright analyze traces/ --html report.html         the same as a page, with timelines
  meshwright analyze traces/ --plan plan.json           what the plan promised beside what was seen
  meshwright analyze after/ --against before/           what changed between two runs
  meshwright analyze traces/ --sql "select name, sum(dur)/1e6 ms from events group by name order by ms desc limit 9"
  meshwright analyze traces/ --perfetto window.json     the step to look at, all ranks on one clock, for ui.perfetto.dev
  meshwright analyze /shared/traces --ray HOST:6379     on all nodes of a cluster of Ray that see the folder
\b
Reads what torch.profiler exports: JSON, plain or packed (.gz, .zst), of NVIDIA, AMD and Ascend devices or of CPUs
alone; one file per rank. What was read is kept next to each trace as Parquet, and the next question takes no reading.
Files that are cut off give what they have; files that are no traces are named and skipped; nothing is dropped silently.
Exit codes: 0 analyzed; 2 bad input.
"""


@click.command("analyze", epilog=EPILOG)
@click.argument("paths", nargs=-1, required=True, type=click.Path(), metavar="DIR|FILES...")
@click.option("--plan", "plan_", metavar="FILE", help="The plan that was run: predicted against measured.")
@click.option("--against", metavar="DIR", help="Traces of another run: what changed since then.")
@click.option("--html", metavar="FILE", help="Write a report with timelines, one file.")
@click.option("--perfetto", metavar="FILE", help="Write the window to look at as a Chrome trace.")
@click.option("--sql", metavar="QUERY", help="Ask the columns; 'show tables' and 'describe events' tell what there is.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes that read (default: one per core).")
@click.option("--ray", metavar="ADDRESS", help="Read on the cluster of Ray at HOST:PORT, or 'auto'.")
@click.option("--no-cache", is_flag=True, help="Neither use nor write Parquet next to the traces.")
@as_json
def command(
    paths: tuple[str, ...], plan_: str | None, against: str | None, html: str | None, perfetto: str | None, sql: str | None,
    workers: int | None, ray: str | None, no_cache: bool, json_: bool,
) -> None:  # fmt: skip
    """Turn profiler traces of a job into the few numbers that decide what to fix."""
    from meshwright.traces.analyze import analyze

    for option, path in (("--html", html), ("--perfetto", perfetto)):
        if path is not None:
            writable(option, path)
    plan = Plan.load(plan_) if plan_ else None
    how: dict[str, Any] = {"workers": workers, "ray": ray, "cache": not no_cache}
    with bar("reading traces") as tell:
        found = analyze(paths, plan=plan, tell=tell, **how)
    if html is not None:
        from meshwright.traces.page.html import page

        write_text(html, page(found, cache=not no_cache))
    if perfetto is not None:
        window = _window(found, perfetto, not no_cache)
    if sql is not None:
        _answer(found, sql, json_)
        return
    if against is not None:
        with bar("reading traces of the run before") as tell:
            change = found.against(analyze(against, tell=tell, **how))
        _changed(change, json_)
        return
    if json_:
        from meshwright.traces.page.document import document

        print_json(document(found))
        return
    _show(found)
    if html is not None:
        click.echo(f"written to {html}")
    if perfetto is not None:
        click.echo(f"written to {perfetto}: {window}")


def _show(found: Analysis) -> None:
    from meshwright.traces.page.tables import grids
    from meshwright.traces.page.terminal import lines, notes, table

    screen = console()
    for line in lines(found):
        click.echo(line)
    for grid in grids(found):
        screen.print()
        screen.print(table(grid))
    for number, note in enumerate(notes(found)):
        click.echo(f"  {note}" if number else f"\nNotes:\n  {note}")


def _changed(change: Difference, json_: bool) -> None:
    from meshwright.traces.page.changes import changes
    from meshwright.traces.page.plain import plain

    if json_:
        print_json(plain(change))
        return
    for line in changes(change):
        click.echo(line)


def _window(found: Analysis, path: str, cache: bool) -> str:
    """Return the contents of the window."""
    from meshwright.traces.page.html import read_ranks
    from meshwright.traces.page.perfetto import merged
    from meshwright.traces.page.window import ahead, interesting
    from meshwright.traces.page.words import ranks_text

    window = interesting(found)
    if window is None:
        raise InputError("no work was recorded: there is no window to write", field="--perfetto")
    moved = {rank: ahead(found, place) for place, rank in enumerate(found.across.ranks)}
    write_text(path, merged(read_ranks(found, window.ranks, cache), window, moved).decode())
    return f"{ranks_text(window.ranks)}, {window.why}"


def _answer(found: Analysis, query: str, json_: bool) -> None:
    """Print a query's rows: a table for people, a list of objects for programs."""
    from rich.table import Table

    from meshwright.traces.page.plain import plain
    from meshwright.traces.page.sql import ask
    from meshwright.traces.page.words import printable

    answer = ask(found, query)
    if json_:
        print_json([dict(zip(answer.columns, plain(row), strict=True)) for row in answer.rows])
        return
    table = Table(box=None, pad_edge=False)
    for column in answer.columns:
        table.add_column(column, overflow="fold")
    for row in answer.rows[:MOST_ROWS]:
        table.add_row(*("" if value is None else printable(str(value)) for value in row))
    console().print(table)
    if len(answer.rows) > MOST_ROWS:
        click.echo(f"... and {len(answer.rows) - MOST_ROWS:,} rows more: --json prints all")


@contextmanager
def bar(what: str) -> Iterator[Tell]:
    """Yield a progress function, which draws a bar on a terminal once the work takes long."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    screen = Console(stderr=True)
    begun, started = time.monotonic(), False
    progress = Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)
    task = progress.add_task(what)

    def tell(done: int, of: int) -> None:
        nonlocal started
        progress.update(task, completed=done, total=of)
        if not started and time.monotonic() - begun > QUIET:
            started = True
            progress.start()

    try:
        yield tell
    finally:
        if started:
            progress.stop()
