"""Choose the window to look at: one step, and the ranks whose comparison is most informative."""

from __future__ import annotations

import numpy as np

from meshwright.traces.analysis import Analysis
from meshwright.traces.page.perfetto import Window
from meshwright.traces.page.words import percent

MOST_RANKS = 8
UNUSUAL = 1.05  # times the median step: such a step is chosen, else one from the middle


def interesting(found: Analysis) -> Window | None:
    """Return a window on the common clock, or None if nothing worked."""
    parts = found.across.parts
    if not len(parts.numbers) or not parts.present.any():
        return None
    means = parts.length.sum(axis=0) / parts.present.sum(axis=0).clip(1)
    usual = float(np.median(means))
    step = int(means.argmax())
    if means[step] < UNUSUAL * usual:
        step = len(means) // 2
    places = _ranks(found, step)
    edges = [_edges(found, place, int(parts.numbers[step])) for place in places]
    number = int(parts.numbers[step])
    why = "the whole recording" if number < 0 else f"step {number}"
    if number >= 0 and means[step] >= UNUSUAL * usual:
        why += f", which takes {percent(means[step] / usual - 1)} longer than the median step"
    ranks = tuple(found.across.ranks[place] for place in places)
    return Window(min(start for start, _ in edges), max(end for _, end in edges), ranks, why)


def _ranks(found: Analysis, step: int) -> list[int]:
    """Return places of the busiest rank, the one that computes least, the one most often last, then an even selection."""
    parts, late = found.across.parts, found.across.aligned.late
    with_step = np.flatnonzero(parts.present[:, step])
    by_compute = with_step[np.argsort(-parts.compute[with_step, step], kind="stable")]
    counts = np.bincount(late[late >= 0], minlength=len(parts.length))
    last = with_step[np.argsort(-counts[with_step], kind="stable")]
    even = with_step[np.linspace(0, len(with_step) - 1, MOST_RANKS).round().astype(int)]
    wanted = [int(place) for place in (*by_compute[:2], *last[:2], by_compute[-1], *even)]
    return sorted(list(dict.fromkeys(wanted))[:MOST_RANKS])


def _edges(found: Analysis, place: int, number: int) -> tuple[int, int]:
    facts = found.ranks[place]
    windows = facts.devices[0].windows
    at = int(np.flatnonzero(windows.numbers == number)[0])
    begins, ends = int(windows.edges[at]), int(windows.edges[at + 1])
    hosts = [
        step.host.start for device in facts.breakdown.devices for step in device.steps if step.host.number == number
    ]
    shift = facts.base_ns - ahead(found, place)
    return min([begins, *hosts]) + shift, ends + shift  # the host issues the first work before it runs


def ahead(found: Analysis, place: int) -> int:
    """Return the nanoseconds by which a rank's clock is ahead of the common one, at the recording's start."""
    clocks = found.across.clocks
    return -int(clocks.since_origin(place, np.array([clocks.origin]))[0])
