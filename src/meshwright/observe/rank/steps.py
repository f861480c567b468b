"""Steps of a training loop, and which device work belongs to which of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.observe.traces import NONE, Category, Trace

STEP = re.compile(r"ProfilerStep#(\d+)$")


@dataclass(frozen=True)
class Span:
    """One step as the host saw it: its work on the device begins and ends later. Nanoseconds."""

    number: int
    start: int
    end: int


def host_steps(trace: Trace) -> tuple[Span, ...]:
    """The steps of a trace, in order of time; none where the loop does not tell the profiler."""
    numbers = {place: int(found[1]) for place, text in enumerate(trace.texts) if (found := STEP.match(text))}
    rows = trace.complete(Category.ANNOTATION, Category.OPERATOR)
    rows = rows[np.isin(trace.events.name[rows], list(numbers))]
    ts, dur, name = trace.events.ts[rows], trace.events.dur[rows], trace.events.name[rows]
    spans = {(int(t), int(t + d), numbers[int(n)]) for t, d, n in zip(ts, dur, name, strict=True)}
    return tuple(Span(number, start, end) for start, end, number in sorted(spans))


@dataclass(frozen=True, eq=False)
class Membership:
    """Which step each of some rows of device work belongs to: its place among the steps, -1 for none."""

    step: NDArray[np.int64]
    launched: NDArray[np.bool_]  # whether the launch was recorded; the others are placed by their own time


def steps_of(trace: Trace, rows: NDArray[np.int64], steps: tuple[Span, ...]) -> Membership:
    """Work belongs to the step in which it was launched, since a device runs behind its host."""
    events = trace.events
    launches = trace.complete(Category.RUNTIME, Category.DRIVER)
    launches = launches[events.link[launches] != NONE]
    order = np.lexsort((events.ts[launches], events.link[launches]))
    launches = launches[order]
    ids = events.link[launches]
    at = np.searchsorted(ids, events.link[rows])
    near = np.minimum(at, max(len(ids) - 1, 0))
    launched = ids[near] == events.link[rows] if len(ids) else np.zeros(len(rows), np.bool_)
    times = events.ts[rows].copy()
    if len(ids):
        times[launched] = events.ts[launches[near[launched]]]
    if not steps:
        return Membership(np.full(len(rows), -1), launched)
    starts, ends = (np.array([getattr(step, side) for step in steps]) for side in ("start", "end"))
    step = np.searchsorted(starts, times, side="right") - 1
    step[(step >= 0) & (times > ends[step])] = -1
    return Membership(step, launched)
