"""Facts of one rank: small enough to keep a thousand ranks in memory, and enough for every question.

A worker process reads a trace, extracts these facts and drops the trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.rank.collectives import Calls, calls_of
from meshwright.traces.rank.device_activity import COMPUTE, HOST, Work, work_of
from meshwright.traces.rank.issued import Issued, issued
from meshwright.traces.rank.kernel_classes import CLASSES, classes_of
from meshwright.traces.rank.kernels import Kernel, kernel_table
from meshwright.traces.rank.memory.memory import Peak, device_peak
from meshwright.traces.rank.memory.peak_memory import Held, held_at_peak
from meshwright.traces.rank.modules.modules import Modules, modules_of
from meshwright.traces.rank.nesting import nest
from meshwright.traces.rank.operators.operators import Operators, operators_of
from meshwright.traces.rank.operators.roofline import roofline
from meshwright.traces.rank.timeline.breakdown import Breakdown, of_work
from meshwright.traces.rank.timeline.host_bound import Launches, launches_of
from meshwright.traces.rank.timeline.steps import Span, host_steps
from meshwright.traces.rank.timeline.windows import Windows, windows
from meshwright.traces.reading import Note, Trace

UNSEEN = Note("no work of its device was recorded, or it was cut off: operators of the host are taken for computing")


@dataclass(frozen=True, eq=False)
class DeviceFacts:
    """Facts of one device of a rank, or of its host if no device was recorded."""

    device: int | float | str | None
    windows: Windows
    calls: Calls
    launches: Launches
    by_class: NDArray[np.int64]  # [step, index into CLASSES]: ns of kernels that compute, concurrent ones added
    launched: NDArray[np.int64]  # [step, index into CLASSES]: how many of them


@dataclass(frozen=True, eq=False)
class RankFacts:
    """Facts of one file."""

    path: str
    rank: int | None
    rank_from: str
    world_size: int | None
    host: str  # the machine's name, "" if unknown
    device_name: str
    base_ns: int
    events: int
    text_bytes: int
    breakdown: Breakdown
    devices: tuple[DeviceFacts, ...]  # the busiest first; none if nothing worked
    kernels: tuple[Kernel, ...]
    operators: tuple[Kernel, ...]  # time on the host
    costs: Operators  # of operators: time on the device, and the work that their shapes imply
    modules: Modules
    peak: Peak | None  # of memory; None if allocations were not recorded
    memory: Held | None  # holders of memory at the peak
    notes: tuple[Note, ...]


def digest(trace: Trace) -> RankFacts:
    """Return the facts of a trace.

    >>> from meshwright.traces.reading import read_trace
    >>> facts = digest(read_trace("tests/data/traces/hta/triton_example.json.gz"))
    >>> facts.rank, facts.devices[0].windows.compute.tolist()
    (None, [1760])
    """
    steps = host_steps(trace)
    properties = trace.header.get("deviceProperties")
    first = properties[0] if isinstance(properties, list) and properties and isinstance(properties[0], dict) else {}
    host = issued(trace)
    works = work_of(trace)
    on_host = bool(works) and works[0].device == HOST
    has_shapes = bool((trace.operators.dims > 0).any())
    costs = operators_of(trace, host, roofline(first) if has_shapes and not on_host else None)
    return RankFacts(
        path=trace.path,
        rank=trace.rank,
        rank_from=trace.rank_from,
        world_size=trace.world_size,
        host=str(trace.header.get("host_name") or ""),
        device_name=str(first.get("name") or ""),
        base_ns=trace.base_ns,
        events=len(trace.events),
        text_bytes=trace.text_bytes,
        breakdown=of_work(trace, works, steps),
        devices=tuple(_device(trace, work, steps, host) for work in works),
        kernels=kernel_table(trace),
        operators=tuple(sorted((row.host for row in costs.table), key=lambda row: (-row.total, row.name))),
        costs=costs,
        modules=modules_of(trace, host),
        peak=device_peak(trace),
        memory=held_at_peak(trace, host),
        notes=(*trace.notes, UNSEEN) if on_host and first else trace.notes,
    )


def _device(trace: Trace, work: Work, steps: tuple[Span, ...], host: Issued) -> DeviceFacts:
    found, member = windows(work, steps)
    computes = work.kind == COMPUTE
    computing = work.some(computes)
    classes, step = classes_of(trace, trace.events.name[computing.rows]), member[computes]
    inside = step >= 0
    flat = step[inside] * len(CLASSES) + classes[inside]
    shape = (len(found.numbers), len(CLASSES))
    lasts = _alone(trace, computing.rows) if work.device == HOST else computing.ends - computing.starts
    spent = np.bincount(flat, lasts[inside], minlength=shape[0] * shape[1])
    return DeviceFacts(
        device=work.device,
        windows=found,
        calls=calls_of(trace, work, member),
        launches=launches_of(trace, work, host),
        by_class=spent.astype(np.int64).reshape(shape),
        launched=np.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape),
    )


def _alone(trace: Trace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each operator's own time, without that of nested operators."""
    found = nest(trace, rows)
    order = np.argsort(rows)
    alone = np.zeros(len(rows), np.int64)
    alone[order[np.searchsorted(rows[order], found.rows)]] = found.alone()
    return alone
