"""Progress of a measurement, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import environ


@contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that moves a progress bar; without a terminal it does nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    if environ.get("RANK", "0") != "0" or not sys.stderr.isatty():
        yield lambda name, done, of: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=None)
        yield lambda name, done, of: progress.update(task, description=name, completed=done, total=of)
