"""Shares of a rank's time: per device, and per step for the work that the step launched."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.rank.communication_kernels import COMMUNICATION
from meshwright.traces.rank.device_activity import COMMUNICATES, COMPUTE, COPIES, HOST, Work, work_of
from meshwright.traces.rank.intervals import length
from meshwright.traces.rank.timeline.steps import Span, host_steps
from meshwright.traces.rank.timeline.windows import members
from meshwright.traces.reading import NONE, Trace

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Shares:
    """Lengths of time in nanoseconds, each the union of its work: concurrent work counts once."""

    start: int
    end: int
    busy: int
    compute: int  # kernels that do not communicate
    communication: int
    overlap: int  # communication overlapped with computing
    copies: int  # memcpy and memset
    exposed_copies: int  # copies while no kernel runs

    @property
    def span(self) -> int:
        return self.end - self.start

    @property
    def idle(self) -> int:
        return self.span - self.busy

    @property
    def exposed(self) -> int:
        """Exposed communication: nothing computes."""
        return self.communication - self.overlap


@dataclass(frozen=True)
class Step:
    """Host time of a step, and shares of the device work that it launched (None if there is none)."""

    host: Span
    shares: Shares | None
    events: int


@dataclass(frozen=True)
class Device:
    """Time of one device of a rank."""

    pid: int | float | str | None  # the trace's name of it
    shares: Shares
    events: int  # kernels and copies
    kernels: int
    communication_kernels: int
    streams: int
    kernel_time: int  # ns, concurrent runs counted separately
    steps: tuple[Step, ...]
    without_launch: int  # events placed into steps by their own time, without a recorded launch
    outside_steps: int  # events that belong to no step


@dataclass(frozen=True)
class Breakdown:
    """Devices of a rank; none for a trace of the CPU alone."""

    rank: int | None
    devices: tuple[Device, ...]


def breakdown(trace: Trace, communication: re.Pattern[str] = COMMUNICATION) -> Breakdown:
    """Return the shares of time on a trace's devices.

    >>> from meshwright.traces.reading import read_trace
    >>> breakdown(read_trace("tests/data/traces/hta/triton_example.json.gz")).devices[0].shares.busy
    1760
    """
    return of_work(trace, work_of(trace, communication), host_steps(trace))


def of_work(trace: Trace, works: tuple[Work, ...], steps: tuple[Span, ...]) -> Breakdown:
    """Return the breakdown from the work of each device."""
    devices = [_device(trace, work, steps) for work in works if work.device != HOST]
    return Breakdown(trace.rank, tuple(sorted(devices, key=lambda device: str(device.pid))))


def _device(trace: Trace, work: Work, steps: tuple[Span, ...]) -> Device:
    kernels, member = work.kind != COPIES, members(work, steps)
    return Device(
        pid=work.device,
        shares=shares(work.starts, work.ends, work.kind),
        events=len(work),
        kernels=int(kernels.sum()),
        communication_kernels=int((work.kind == COMMUNICATES).sum()),
        streams=int((np.bincount(trace.events.track[work.rows]) > 0).sum()),
        kernel_time=int((work.ends - work.starts)[kernels].sum()),
        steps=tuple(
            Step(
                step,
                shares(work.starts[mine], work.ends[mine], work.kind[mine]) if mine.any() else None,
                int(mine.sum()),
            )
            for place, step in enumerate(steps)
            for mine in [member == place]
        ),
        without_launch=int((work.launch == NONE).sum()),
        outside_steps=int((member < 0).sum()),
    )


def shares(starts: Ints, ends: Ints, kind: Ints) -> Shares:
    """Return the shares of at least one piece of work.

    >>> found = shares(np.array([0, 2, 9]), np.array([4, 6, 10]), np.array([COMPUTE, COMMUNICATES, COPIES]))
    >>> found.compute, found.exposed, found.exposed_copies, found.idle
    (4, 2, 1, 3)
    """
    long = {what: length(starts[kind == what], ends[kind == what]) for what in (COMPUTE, COMMUNICATES, COPIES)}
    busy = length(starts, ends)
    kernels = length(starts[kind != COPIES], ends[kind != COPIES])
    return Shares(
        start=int(starts.min()),
        end=int(ends.max()),
        busy=busy,
        compute=long[COMPUTE],
        communication=long[COMMUNICATES],
        overlap=long[COMPUTE] + long[COMMUNICATES] - kernels,
        copies=long[COPIES],
        exposed_copies=busy - kernels,
    )
