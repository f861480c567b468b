"""Work of a rank: kernels and copies of its devices, or operators if only the host was recorded."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.distinct import distinct
from meshwright.traces.rank.communication_kernels import COMMUNICATION, communication_kernels
from meshwright.traces.reading import NONE, Category, Trace

COMPUTE, COMMUNICATES, COPIES = 0, 1, 2
HOST = "host"  # name of the device if operators stand for kernels
# Names of the spans in which backends of torch.distributed exchange data on the host.
ON_HOST = re.compile(r"^(?:gloo|mpi|ucc):")
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Work:
    """Rows of the trace's events, by start; times in nanoseconds on the trace's own clock."""

    device: int | float | str | None  # the trace's name of the device, or HOST
    rows: Ints
    starts: Ints
    ends: Ints
    kind: Ints  # COMPUTE, COMMUNICATES or COPIES
    launch: Ints  # start of the host's call that issued it, NONE if not recorded
    issued: Ints  # end of that call

    def __len__(self) -> int:
        return len(self.rows)

    def some(self, chosen: NDArray[np.bool_] | Ints) -> Work:
        """Return chosen rows, with NumPy's indexing."""
        columns = ("rows", "starts", "ends", "kind", "launch", "issued")
        return replace(self, **{name: getattr(self, name)[chosen] for name in columns})


def work_of(trace: Trace, communication: re.Pattern[str] = COMMUNICATION) -> tuple[Work, ...]:
    """Return the work of each device, the busiest first; of the host if no device was recorded.

    >>> from meshwright.traces.reading import read_trace
    >>> [(work.device, len(work)) for work in work_of(read_trace("tests/data/traces/hta/triton_example.json.gz"))]
    [(0, 1)]
    """
    rows = trace.complete(Category.KERNEL, Category.MEMCPY, Category.MEMSET)
    if not len(rows):
        return _on_host(trace)
    kind = np.where(trace.events.category[rows] == Category.KERNEL, COMPUTE, COPIES)
    kind[communication_kernels(trace, communication)[rows]] = COMMUNICATES
    launch, issued = launches(trace, rows)
    pids = list(dict.fromkeys(track.pid for track in trace.tracks))
    pid_of = np.array([pids.index(track.pid) for track in trace.tracks], np.int64)
    starts = trace.events.ts[rows]
    whole = Work(None, rows, starts, starts + trace.events.dur[rows], kind, launch, issued)
    whole = whole.some(np.argsort(starts, kind="stable"))
    place = pid_of[trace.events.track[whole.rows]]
    found = [replace(whole.some(place == pid), device=pids[pid]) for pid in distinct(place)]
    return tuple(sorted(found, key=lambda work: int((work.starts - work.ends).sum())))


def _on_host(trace: Trace) -> tuple[Work, ...]:
    """Return operators as computing, and a backend's own spans as communication."""
    exchanges = np.array([ON_HOST.match(text) is not None for text in trace.texts], np.bool_)
    rows = trace.complete(Category.OPERATOR, Category.ANNOTATION)
    talks = exchanges[trace.events.name[rows]]
    rows = rows[talks | (trace.events.category[rows] == Category.OPERATOR)]
    steps = np.array([text.startswith("ProfilerStep#") for text in trace.texts], np.bool_)
    rows = rows[~steps[trace.events.name[rows]]]
    if not len(rows):
        return ()
    rows = rows[np.argsort(trace.events.ts[rows], kind="stable")]
    starts = trace.events.ts[rows]
    kind = np.where(exchanges[trace.events.name[rows]], COMMUNICATES, COMPUTE)
    return (Work(HOST, rows, starts, starts + trace.events.dur[rows], kind, starts, starts),)


def launches(trace: Trace, rows: Ints) -> tuple[Ints, Ints]:
    """Return start and end of the host's calls that issued device work; NONE if not recorded."""
    events = trace.events
    calls = trace.complete(Category.RUNTIME, Category.DRIVER)
    calls = calls[events.link[calls] != NONE]
    calls = calls[np.lexsort((events.ts[calls], events.link[calls]))]
    begun, returned = np.full(len(rows), NONE), np.full(len(rows), NONE)
    if len(calls):
        ids = events.link[calls]
        near = np.minimum(np.searchsorted(ids, events.link[rows]), len(ids) - 1)
        known = ids[near] == events.link[rows]
        begun[known] = events.ts[calls[near[known]]]
        returned[known] = begun[known] + events.dur[calls[near[known]]]
    return begun, returned
