"""Watch something and give back what was written."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.base.native import compiler
from meshwright.watcher.events.events import Event, read
from meshwright.watcher.values import marks, unchanged

Look = Callable[..., list[Event]]

HEADERS = Path(sysconfig.get_path("include")) / "Python.h"
# Not where the C of the watch fails to be built: that is a failure.
needs_c = pytest.mark.skipif(not compiler() or not HEADERS.exists(), reason="no C compiler, or no headers of Python")


def look_in(folder: Path) -> Look:
    def look(work: Callable[[], object], targets: Any, **options: Any) -> list[Event]:
        with meshwright.watch(targets, output=folder / "run", **options):
            work()
        path = folder / "run.rank0.jsonl"
        return read(str(path))[1:-1] if path.exists() else []

    return look


def short(events: list[Event]) -> list[str]:
    """'  set Counter.count 1 -> 2': indent, event, name, values."""
    return [
        "  " * one.depth
        + f"{one.event} {one.name}"
        + (f" {one.old} -> {one.new}" if one.event == "set" else "")
        + (f" {one.text}" if one.text else "")
        for one in events
    ]


@contextmanager
def without_compiler() -> Iterator[None]:
    """As where C cannot be built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unchanged, "compiled", lambda: None)
        _forget()
        yield
    _forget()


def _forget() -> None:
    unchanged.makers.cache_clear()
    marks._MAKERS.clear()
    marks.KINDS.clear()
