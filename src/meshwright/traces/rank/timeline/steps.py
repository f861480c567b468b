"""Steps of a training loop, as its host marks them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from meshwright.traces.reading import Category, Trace

STEP = re.compile(r"ProfilerStep#(\d+)$")


@dataclass(frozen=True)
class Span:
    """One step as the host marks it: its work on the device begins and ends later. Nanoseconds."""

    number: int
    start: int
    end: int


def host_steps(trace: Trace) -> tuple[Span, ...]:
    """Return the steps of a trace in order of time; none if the loop marks no steps."""
    numbers = {place: int(found[1]) for place, text in enumerate(trace.texts) if (found := STEP.match(text))}
    rows = trace.complete(Category.ANNOTATION, Category.OPERATOR)
    rows = rows[np.isin(trace.events.name[rows], list(numbers))]
    ts, dur, name = trace.events.ts[rows], trace.events.dur[rows], trace.events.name[rows]
    spans = {(int(t), int(t + d), numbers[int(n)]) for t, d, n in zip(ts, dur, name, strict=True)}
    return tuple(Span(number, start, end) for start, end, number in sorted(spans))
