"""Time of operators on the host and the device, relative to what their shapes imply."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.rank.issued import Issued
from meshwright.traces.rank.kernels import Kernel, kernel_table
from meshwright.traces.rank.operators.flops import cost, counted, has_flops
from meshwright.traces.rank.operators.inputs import Cost
from meshwright.traces.rank.operators.roofline import Roofline
from meshwright.traces.reading import Category, Trace

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MOST_SHAPES = 200  # maximum rows
MOST_KERNELS = 3  # named per operator
TF32 = re.compile(r"tf32|s1688")  # kernels that multiply 32-bit numbers on matrix units
LINK = re.compile(r"Memcpy (?:HtoD|DtoH|PtoP)|CopyHostToDevice|CopyDeviceToHost")  # copies to or from the device


@dataclass(frozen=True)
class Operator:
    """All calls of one operator; times in nanoseconds include nested operators unless `alone`."""

    host: Kernel  # its name, count and time on the host
    alone: int  # on the host, without nested operators
    device: int  # kernels and copies that it issued, concurrent ones counted separately
    device_alone: int  # those that no nested operator issued
    issued: int  # number of these
    kernels: tuple[tuple[str, int, int], ...]  # the longest: name, count, time

    @property
    def name(self) -> str:
        return self.host.name


@dataclass(frozen=True)
class Shaped:
    """Calls of one operator with equal inputs. `time` is that of its kernels, on the host if there are none."""

    name: str
    dims: str
    types: str
    count: int
    time: int  # nanoseconds, all calls
    cost: Cost  # of one call
    precision: str  # of its products
    share: float  # of the device's best; 0 if unknown
    bound: str  # limit of the device's best: "compute", "memory", "link" for copies off the device, "" if unknown

    @property
    def flops_per_second(self) -> float:
        return self.cost.flops * self.count / (self.time * 1e-9) if self.time else 0.0

    @property
    def bytes_per_second(self) -> float:
        return self.cost.bytes * self.count / (self.time * 1e-9) if self.time else 0.0


@dataclass(frozen=True)
class Operators:
    """Operators of a rank, by time on the device, then on the host."""

    table: tuple[Operator, ...]
    shaped: tuple[Shaped, ...]  # by time, the first MOST_SHAPES
    flops: int  # of all calls with known shapes
    flops_time: int  # nanoseconds of these calls
    bytes: int
    bytes_time: int
    device: str  # the catalogue's name; "" if unknown, or if no shapes were recorded
    unattributed: int  # nanoseconds of device work that no operator issued


def operators_of(trace: Trace, work: Issued, roof: Roofline | None) -> Operators:
    """Return the costs of operators. `roof` is that of the rank's device."""
    places = np.flatnonzero(work.operator >= 0)
    mine = work.operator[places]
    size = len(work.operators)
    own: Floats = np.bincount(mine, work.time[places], minlength=size).astype(np.float64)
    shaped = _shaped(trace, work, own, roof)
    known = [row for row in shaped if row.cost.flops]
    return Operators(
        table=_table(trace, work, own, np.bincount(mine, minlength=size)),
        shaped=tuple(shaped[:MOST_SHAPES]),
        flops=sum(row.cost.flops * row.count for row in known),
        flops_time=sum(row.time for row in known),
        bytes=sum(row.cost.bytes * row.count for row in shaped),
        bytes_time=sum(row.time for row in shaped),
        device=roof.device if roof else "",
        unattributed=int(work.time[work.operator < 0].sum()),
    )


def _table(trace: Trace, work: Issued, own: Floats, launched: Ints) -> tuple[Operator, ...]:
    names = trace.events.name[work.operators.rows].astype(np.int64)
    sums = {
        "alone": work.operators.alone(),
        "device": work.operators.within(own),
        "device_alone": own,
        "issued": work.operators.within(launched),
    }
    by_name = {key: np.bincount(names, values, minlength=len(trace.texts)) for key, values in sums.items()}
    kernels = _kernels(trace, work, names)
    number = {text: place for place, text in enumerate(trace.texts)}
    found = [
        Operator(host, kernels=kernels.get(at, ()), **{key: int(values[at]) for key, values in by_name.items()})
        for host in kernel_table(trace, Category.OPERATOR)
        for at in [number[host.name]]
    ]
    return tuple(sorted(found, key=lambda row: (-row.device, -row.host.total, row.name)))


def _kernels(trace: Trace, work: Issued, names: Ints) -> dict[int, tuple[tuple[str, int, int], ...]]:
    """Return the longest kernels that each operator issued itself, by the number of its name."""
    mine = np.flatnonzero(work.operator >= 0)
    width = len(trace.texts)
    keys = names[work.operator[mine]] * width + trace.events.name[work.rows[mine]]
    pairs, place, counts = np.unique(keys, return_inverse=True, return_counts=True)
    times = np.bincount(place, work.time[mine], minlength=len(pairs))
    found: dict[int, tuple[tuple[str, int, int], ...]] = {}
    for at in np.lexsort((-times, pairs // width)):
        name, kernel = divmod(int(pairs[at]), width)
        if len(held := found.get(name, ())) < MOST_KERNELS:
            found[name] = (*held, (trace.texts[kernel], int(counts[at]), int(times[at])))
    return found


def _shaped(trace: Trace, work: Issued, own: Floats, roof: Roofline | None) -> list[Shaped]:
    """Return operators with a known cost, grouped by their inputs."""
    spans, inputs = work.operators, trace.operators
    place_of = np.full(len(trace.events), -1)
    place_of[spans.rows] = np.arange(len(spans))
    described = np.flatnonzero((inputs.dims > 0) & (place_of[inputs.row] >= 0))
    if not len(described):
        return []
    places = place_of[inputs.row[described]]
    can_cost = np.array([counted(text) for text in trace.texts], np.bool_)[trace.events.name[spans.rows]]
    multiplies = np.array([has_flops(text) for text in trace.texts], np.bool_)[trace.events.name[spans.rows]]
    inner = spans.within(multiplies.astype(np.int64)) - multiplies  # nested products are counted, not this one
    time = _time(work, own, can_cost)
    chosen = can_cost[places] & (time[places] > 0) & ~(multiplies[places] & (inner[places] > 0))
    described, places = described[chosen], places[chosen]
    columns = (
        trace.events.name[spans.rows[places]],
        *(getattr(inputs, c)[described] for c in ("dims", "types", "concrete")),
    )
    groups, firsts = _grouped(columns, len(trace.texts))
    counts = np.bincount(groups)
    times = np.bincount(groups, time[places])
    fast, leaves = _issues(trace, work, TF32), _issues(trace, work, LINK)
    found = []
    for group, first in enumerate(firsts):
        name, dims, types, concrete = (trace.texts[column[first]] for column in columns)
        if made := cost(name, dims, types, concrete):
            precision = "tf32" if made.precision == "fp32" and fast[places[first]] else made.precision
            count, spent = int(counts[group]), int(times[group])
            if leaves[places[first]]:  # the host's memory and link have no roofline of the device
                share, bound = 0.0, "link"
            else:
                share, bound = roof.bound(made, spent * 1e-9 / count, precision) if roof else (0.0, "")
            shapes, kinds = (re.sub(r"\s+", "", text) for text in (dims, types))
            found.append(Shaped(name, shapes, kinds, count, spent, made, precision, share, bound))
    return sorted(found, key=lambda row: (-row.time, row.name, row.dims))


def _time(work: Issued, own: Floats, chosen: NDArray[np.bool_]) -> Floats:
    """Return the nanoseconds of each chosen operator: its kernels and those of nested operators that are not chosen."""
    spans = work.operators
    if not len(work.rows):
        return np.where(chosen, spans.ends - spans.starts, 0).astype(np.float64)
    owner = np.arange(len(spans))
    left = np.flatnonzero((own > 0) & ~chosen)
    while len(left):
        owner[left] = spans.parent[owner[left]]
        left = left[owner[left] >= 0]
        left = left[~chosen[owner[left]]]
    held = (own > 0) & (owner >= 0)
    time: Floats = np.bincount(owner[held], own[held], minlength=len(spans)).astype(np.float64)
    return time


def _issues(trace: Trace, work: Issued, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    """Return True for operators that issued any work with such a name."""
    says = np.array([pattern.search(text) is not None for text in trace.texts], np.bool_)[trace.events.name[work.rows]]
    hits = np.bincount(work.operator[says & (work.operator >= 0)], minlength=len(work.operators))
    return work.operators.within(hits) > 0


def _grouped(columns: tuple[Ints, ...], width: int) -> tuple[Ints, Ints]:
    """Return the group of each row, rows in a group being equal in all columns, and the first row of each group."""
    group = np.zeros(len(columns[0]), np.int64)
    firsts = np.zeros(0, np.int64)
    for column in columns:
        _, firsts, group = np.unique(group * width + column, return_index=True, return_inverse=True)
    return group, firsts
