"""Steps on a device, end to end: every nanosecond of the recording belongs to one step, and to one part of it.

A device runs behind its host. So a step begins with the first work that the host launched in it, and lasts until the
next one begins. Work launched by no step (before the first, after the last) is counted in `outside`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.rank.device_activity import COMMUNICATES, COMPUTE, COPIES, Work
from meshwright.traces.rank.intervals import before, gaps, union
from meshwright.traces.rank.timeline.steps import Span
from meshwright.traces.reading import NONE

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Windows:
    """Steps on a device: step i lasts from edges[i] to edges[i + 1]. Parts are nanoseconds, and add up to its length."""

    numbers: Ints  # of the steps; a single step -1 if the loop marks none
    edges: Ints
    compute: Ints
    exposed: Ints  # exposed communication
    copies: Ints  # copies and fills while no kernel runs
    host_bound: Ints  # idle, and the next work was not yet issued
    waiting: Ints  # idle though the next work was issued: it waits for other streams, devices or the launch itself
    hidden: Ints  # beside these: communication overlapped with computing
    outside: int  # pieces of work that belong to no step

    @property
    def lengths(self) -> Ints:
        return np.diff(self.edges)

    @property
    def idle(self) -> Ints:
        return self.host_bound + self.waiting


def windows(work: Work, steps: tuple[Span, ...]) -> tuple[Windows, Ints]:
    """Return the steps of some work, which must not be empty, and the step of each piece of it (-1: none).

    >>> at = np.array([0, 10, 30])
    >>> kinds = np.array([COMPUTE, COMMUNICATES, COMPUTE])
    >>> work = Work(0, at, at, at + [12, 10, 5], kinds, at - 2, at - 1)
    >>> found, _ = windows(work, ())
    >>> [int(part[0]) for part in (found.compute, found.exposed, found.hidden, found.host_bound, found.waiting)]
    [17, 8, 2, 9, 1]
    """
    member = members(work, steps)
    numbers, edges, places = _edges(work, steps, member)
    compute, communication = (union(*_of(work, work.kind == kind)) for kind in (COMPUTE, COMMUNICATES))
    kernels, busy = union(*_of(work, work.kind != COPIES)), union(work.starts, work.ends)
    in_compute, in_communication, in_kernels, in_busy = (
        np.diff(before(merged, edges)) for merged in (compute, communication, kernels, busy)
    )
    late = np.diff(before(unissued(work, busy, int(edges[0]), int(edges[-1])), edges))
    exposed = in_kernels - in_compute
    found = Windows(
        numbers=numbers,
        edges=edges,
        compute=in_compute,
        exposed=exposed,
        copies=in_busy - in_kernels,
        host_bound=late,
        waiting=np.diff(edges) - in_busy - late,
        hidden=in_communication - exposed,
        outside=int((places < 0).sum()),
    )
    return found, places


def _of(work: Work, chosen: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    return work.starts[chosen], work.ends[chosen]


def _edges(work: Work, steps: tuple[Span, ...], member: Ints) -> tuple[Ints, Ints, Ints]:
    """Return numbers and edges of the steps that launched something, and the step of each piece of work."""
    last = int(work.ends.max())
    used = np.flatnonzero(np.bincount(member[member >= 0], minlength=len(steps)))
    if not len(used) or not steps:
        return np.array([-1]), np.array([work.starts[0], last]), np.zeros(len(work), np.int64)
    place = np.full(len(steps) + 1, -1)
    place[used] = np.arange(len(used))
    places = place[member]  # -1, no step, is the last index
    firsts = np.full(len(used), last)
    np.minimum.at(firsts, places[places >= 0], work.starts[places >= 0])
    firsts = np.minimum.accumulate(firsts[::-1])[
        ::-1
    ]  # a later step's work may begin before the rest of an earlier one's
    stop = max(last, steps[used[-1]].end) if work.device == "host" else last
    return np.array([step.number for step in steps])[used], np.append(firsts, stop), places


def members(work: Work, steps: tuple[Span, ...]) -> Ints:
    """Return the index of the step that launched each piece of work, -1 for none."""
    if not steps:
        return np.full(len(work), -1)
    times = np.where(work.launch == NONE, work.starts, work.launch)
    starts, ends = (np.array([getattr(step, side) for step in steps]) for side in ("start", "end"))
    step = np.searchsorted(starts, times, side="right") - 1
    step[(step >= 0) & (times > ends[step])] = -1
    return step


def unissued(work: Work, busy: tuple[Ints, Ints], start: int, end: int) -> tuple[Ints, Ints]:
    """Return the parts of idle gaps in which the host had not yet issued the work that ends the gap."""
    begins, stops = gaps(busy, start, end)
    follows = np.minimum(np.searchsorted(work.starts, stops), len(work) - 1)
    issued = np.where(work.issued[follows] == NONE, begins, work.issued[follows])
    until = np.clip(issued, begins, stops)
    late = (work.launch[follows] > begins) & (until > begins)
    return begins[late], until[late]
