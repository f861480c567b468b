"""Shared parts of the verbs that search: limits as options, a progress bar, and the line about the proof."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from meshwright.errors import InputError
from meshwright.plans import parse_short
from meshwright.search.space.limits import FORBIDDABLE, Limits
from meshwright.search.space.targets import TARGETS, limits_for, target

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

F = TypeVar("F", bound=Callable[..., Any])
_BEYOND = 0.0005  # faster than the proven optimum; less is not mentioned
_QUIET = 2.0  # seconds before a bar appears


def search_options(verb: F) -> F:
    """Add the options that limit the choices and the time of a search."""
    options = (
        click.option(
            "--time-limit", type=click.FloatRange(min=0, min_open=True), help="Seconds; the best so far then."
        ),
        click.option(
            "--headroom",
            type=click.FloatRange(0, 0.9),
            default=0.0,
            help="Part of each device's memory to leave free, as 0.1.",
        ),
        click.option("--for", "target_", metavar="TARGET", help=f"Only what this can run: {', '.join(TARGETS)}."),
        click.option(
            "--fix", multiple=True, metavar="NAME=VALUE", help="Choices that are made: tp=8,pp=4. Repeatable."
        ),
        click.option(
            "--forbid", multiple=True, metavar="NAME", help="What must not be used: offload,zero3. Repeatable."
        ),
    )
    for option in reversed(options):
        verb = option(verb)
    return verb


def limits_from(fix: tuple[str, ...], forbid: tuple[str, ...], target_: str | None, headroom: float) -> Limits:
    """Return the limits of the options; an error is reported at its option."""
    return replace(_named(fix, forbid, target_), headroom=headroom)


def _named(fix: tuple[str, ...], forbid: tuple[str, ...], target_: str | None) -> Limits:
    names = [name.strip() for text in forbid for name in text.split(",") if name.strip()]
    try:
        Limits.of({}, names)
    except InputError as error:
        raise _at("--forbid", error) from None
    try:
        fixed = parse_short(",".join(fix))
        Limits.of(fixed, names)
        if target_ is None:
            return Limits.of(fixed, names)
    except InputError as error:
        raise _at("--fix", error) from None
    try:
        target(target_)
    except InputError as error:
        raise _at("--for", error) from None
    try:
        return limits_for(target_, fixed, names)
    except InputError as error:
        raise _at("--fix", error) from None


def _at(option: str, error: InputError) -> InputError:
    error.field = f"{option} {error.field.removeprefix('fix').strip()}".strip()
    return error


def forbiddable() -> str:
    """Return every name that --forbid takes, with its meaning, for --help."""
    return "\n".join(f"  {name:12}{meaning}" for name, meaning in FORBIDDABLE.items())


def proof(facts: dict[str, Any], reason: str) -> str:
    """Return one line on how good a found plan is."""
    looked = f"{facts['explored']:,} candidates in {facts['seconds']:.2f} s"
    beyond = facts.get("space_bound", facts["bound"]) / facts["bound"] - 1 if facts["bound"] else 0.0
    if facts["optimal"] and beyond > _BEYOND:
        least = f"proven: nothing in the searched space is faster than {facts['space_bound']:.4g} s"
        return f"{least}; steps beyond it made this {beyond:.1%} faster, {looked}"
    if facts["optimal"]:
        return f"proven optimal in the searched space: bound equals value, {looked}"
    return f"gap {facts['gap']:.1%}: {reason}; nothing is faster than {facts['bound']:.4g} s, {looked}"


class Watch:
    """Callback of a search, which gets its best plan and bound, draws a bar on a terminal, and records an interrupt."""

    def __init__(self, time_limit: float | None = None) -> None:
        self.time_limit, self.interrupted = time_limit, False
        self.started = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Watch:
        self._before = signal.signal(signal.SIGINT, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        if self._bar:
            self._bar.stop()

    def __call__(self, best: float, bound: float) -> None:
        if not sys.stderr.isatty() or time.monotonic() - self.started < _QUIET:
            return
        found = f"best {best:.4g} s, " if best < float("inf") else "no plan yet, "
        text = f"{found}bound {bound:.4g} s (Ctrl-C: the best so far)"
        self.show(text, bound / best)

    def show(self, text: str, part: float) -> None:
        """Draw a bar filled to a part, with a text beside it."""
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(text, total=1.0)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=part, description=text)

    def _stop(self, _: int, __: FrameType | None) -> None:
        self.interrupted = True
        raise KeyboardInterrupt

    @property
    def reason(self) -> str:
        """Reason why a search ended without a proof."""
        if self.interrupted:
            return "interrupted"
        late = self.time_limit is not None and time.monotonic() - self.started >= self.time_limit
        return "time limit" if late else "the bound is loose"
