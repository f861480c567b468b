"""Collectives and messages of a rank: their arguments, their times, and how much was overlapped."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.distinct import distinct
from meshwright.traces.rank.device_activity import COMMUNICATES, COMPUTE, Work
from meshwright.traces.rank.intervals import before, union
from meshwright.traces.reading import NONE, Category, Trace

Ints = NDArray[np.int64]
# Spellings of a collective in libraries, PyTorch and kernels; the first match counts.
SPELLINGS = {
    "all_to_all": r"all_?to_?all|all2all|dispatch|combine",
    "reduce_scatter": r"reduce_?scatter",
    "all_gather": r"all_?gather",
    "all_reduce": r"all_?reduce|cross_device_reduce|quick_?reduce|shot_reduce",
    "send_recv": r"send_?recv|coalesced|batch_isend_irecv",
    "send": r"send",
    "recv": r"recv|receive",
    "broadcast": r"broadcast|bcast",
    "gather": r"gather",
    "scatter": r"scatter",
    "barrier": r"barrier",
    "reduce": r"reduce",
}
KINDS = (*SPELLINGS, "other")
POINT_TO_POINT = ("send_recv", "send", "recv")
BACKEND = re.compile(r"^[nrhm]ccl:")  # torch.distributed's name of that span
_SPELLED = {kind: re.compile(spelling, re.IGNORECASE) for kind, spelling in SPELLINGS.items()}
SIZES = {"float": 4, "int": 4, "long": 8, "double": 8, "half": 2, "bfloat16": 2, "short": 2, "byte": 1, "char": 1,
         "bool": 1, "complexfloat": 8, "complexdouble": 16}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Calls:
    """Calls by start, one per row. Texts of groups are in `groups`; times are nanoseconds since the epoch."""

    kind: Ints  # index into KINDS
    start: Ints  # arrival of this rank: the start of its kernel
    end: Ints
    step: Ints  # index into the rank's windows, -1 for none
    group: Ints  # index into `groups`
    seq: Ints  # the group's own sequence number, NONE if not recorded
    bytes: Ints  # of the whole buffer, as bandwidths count it: the larger of input and output; NONE if unknown
    size: Ints  # ranks in the group, NONE if unknown
    peer: Ints  # the other rank of a message, NONE if unknown
    stream: Ints
    hidden: Ints  # overlapped nanoseconds of it, during which something computed
    computed: Ints  # computing from the recording's start to the call's, in ns: differences lie between two calls
    groups: tuple[Group, ...]
    # Disjoint intervals of computing during calls, in order: the overlapped part of a wait can be computed later.
    busy_starts: Ints
    busy_ends: Ints

    def __len__(self) -> int:
        return len(self.kind)

    def computing(self, starts: Ints, ends: Ints) -> Ints:
        """Return the computing in each interval, all of which must lie within calls."""
        merged = (self.busy_starts, self.busy_ends)
        return before(merged, ends) - before(merged, starts)


@dataclass(frozen=True)
class Group:
    """Process group as the profiler names it."""

    name: str  # "" if unnamed
    description: str
    ranks: tuple[int, ...]  # () if unknown


def kind_of(text: str) -> str:
    """Return the collective that a kernel or an operator is named after.

    >>> kind_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)"), kind_of("_allgather_base"), kind_of("nccl:recv 3<-2")
    ('all_reduce', 'all_gather', 'recv')
    """
    return next((kind for kind, spelling in _SPELLED.items() if spelling.search(text)), KINDS[-1])


def calls_of(trace: Trace, work: Work, member: Ints) -> Calls:
    """Return the calls of one device. `member` is the step of each piece of work."""
    chosen = np.flatnonzero(work.kind == COMMUNICATES)
    rows, launch = work.rows[chosen], work.launch[chosen]
    told = _records(trace, rows, launch)
    asked = trace.collectives
    known = told >= 0
    kind = _kinds(trace, rows, told, launch)
    groups, group = _groups(trace, told)
    sizes = np.array([SIZES.get(text.lower(), _numbered(text)) for text in trace.texts], np.int64)

    def column(name: str) -> Ints:
        values: Ints = getattr(asked, name)
        return np.where(known, values[told], NONE) if len(values) else np.full(len(rows), NONE)

    elements = np.maximum(column("nelems_in"), column("nelems_out"))
    width = np.where(known, sizes[asked.dtype[told]], 0) if len(asked.dtype) else np.zeros(len(rows), np.int64)
    starts, ends = work.starts[chosen], work.ends[chosen]
    compute = union(work.starts[work.kind == COMPUTE], work.ends[work.kind == COMPUTE])
    busy = _within(compute, union(starts, ends))
    return Calls(
        kind=kind,
        start=starts + trace.base_ns,
        end=ends + trace.base_ns,
        step=member[chosen],
        group=group,
        seq=column("seq"),
        bytes=np.where((elements != NONE) & (width > 0), elements * width, _from_inputs(trace, rows)),
        size=column("group_size"),
        peer=_peer(column("source"), column("target"), trace.rank),
        stream=trace.events.track[rows].astype(np.int64),
        hidden=before(busy, ends) - before(busy, starts),
        computed=before(compute, starts),
        groups=groups,
        busy_starts=busy[0] + trace.base_ns,
        busy_ends=busy[1] + trace.base_ns,
    )


def _peer(source: Ints, target: Ints, rank: int | None) -> Ints:
    """Return the other side of a message: PyTorch records only that, others record both sides.

    >>> _peer(np.array([3, 2, 2]), np.array([NONE, 3, NONE]), 2).tolist() == [3, 3, 2]
    True
    """
    told = source != NONE
    if rank is not None:
        told &= (source != rank) | (target == NONE)
    return np.where(told, source, target)


def _records(trace: Trace, rows: Ints, launch: Ints) -> Ints:
    """Return each kernel's row in `trace.collectives`: its own, or that of the operator that launched it."""
    asked = trace.collectives
    told = np.full(len(rows), -1)
    if not len(asked.row) or not len(rows):
        return told
    named = np.flatnonzero(asked.name > 0)
    for keys, wanted in (
        (asked.row[named], rows),
        (trace.events.external[asked.row[named]], trace.events.external[rows]),
    ):
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        near = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
        hit = (keys[near] == wanted) & (wanted != NONE) & (told < 0) if len(keys) else np.zeros(len(rows), np.bool_)
        told[hit] = named[order[near[hit]]]
    operators = named[trace.events.category[asked.row[named]] == Category.OPERATOR]
    around = _around(trace, asked.row[operators], launch)
    return np.where((told < 0) & (around >= 0), np.append(operators, -1)[around], told)


def _kinds(trace: Trace, rows: Ints, told: Ints, launch: Ints) -> Ints:
    """Return the kind from the record, the backend's span around the launch, or the kernel's name.

    All-to-all is SendRecv to NCCL.
    """
    words = trace.events.name[rows].astype(np.int64)
    named = np.array([BACKEND.match(text) is not None for text in trace.texts], np.bool_)
    spans = trace.complete(Category.ANNOTATION, Category.OPERATOR)
    spans = spans[named[trace.events.name[spans]]]
    around = _around(trace, spans, launch)
    words = np.where(around >= 0, np.append(trace.events.name[spans], 0)[around], words)
    if len(trace.collectives.name):
        words = np.where(told >= 0, trace.collectives.name[told], words)
    place = {int(number): KINDS.index(kind_of(trace.texts[number])) for number in distinct(words)}
    return np.array([place[int(number)] for number in words], np.int64)


def _around(trace: Trace, spans: Ints, times: Ints) -> Ints:
    """Return the last event to begin before each time, if it still lasts then; -1 otherwise."""
    if not len(spans):
        return np.full(len(times), -1)
    order = np.argsort(trace.events.ts[spans], kind="stable")
    starts = trace.events.ts[spans[order]]
    at = np.searchsorted(starts, times, side="right") - 1
    lasts = (at >= 0) & (times != NONE) & (starts[at] + trace.events.dur[spans[order[at]]] >= times)
    return np.where(lasts, order[at], -1)


def _groups(trace: Trace, told: Ints) -> tuple[tuple[Group, ...], Ints]:
    asked = trace.collectives
    if not len(asked.row):
        return (Group("", "", ()),), np.zeros(len(told), np.int64)
    listed = _listed(trace)
    keys = [
        (int(asked.group[row]), int(asked.group_id[row]), int(asked.description[row]), int(asked.ranks[row])) if row >= 0
        else (0, NONE, 0, 0)
        for row in told
    ]  # fmt: skip
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    groups = []
    for name, number, description, ranks in places:
        word = trace.texts[name] or ("" if number == NONE else str(number))
        members = numbers_in(trace.texts[ranks]) or listed.get(word, ())
        groups.append(Group(word, trace.texts[description], members))
    return tuple(groups), np.array([places[key] for key in keys], np.int64)


def _listed(trace: Trace) -> dict[str, tuple[int, ...]]:
    """Return the members of groups that the file's header lists: events shorten long lists."""
    told = trace.header.get("distributedInfo")
    listed = told.get("pg_config") if isinstance(told, dict) else None
    return {
        str(group.get("pg_name")): tuple(rank for rank in group.get("ranks") or () if isinstance(rank, int))
        for group in (listed if isinstance(listed, list) else [])
        if isinstance(group, dict)
    }


def numbers_in(text: str) -> tuple[int, ...]:
    """Parse a list of ranks as the profiler writes it; empty if it was shortened.

    >>> numbers_in("[0, 4, 8]"), numbers_in("[0, 1, 2, ..., 511]")
    ((0, 4, 8), ())
    """
    if "..." in text or not re.fullmatch(r"\[[\d,\s]*\]", text):
        return ()
    return tuple(int(word) for word in re.findall(r"\d+", text))


def _from_inputs(trace: Trace, rows: Ints) -> Ints:
    """Return bytes of the first input of spans that record only that, as those of gloo; NONE elsewhere."""
    told = trace.operators
    if not len(told.row) or not len(rows):
        return np.full(len(rows), NONE)
    order = np.argsort(told.row, kind="stable")
    near = order[np.minimum(np.searchsorted(told.row[order], rows), len(order) - 1)]
    pairs = [
        (int(told.dims[at]), int(told.types[at])) if told.row[at] == row else (0, 0)
        for at, row in zip(near, rows, strict=True)
    ]
    sizes = {pair: _input_bytes(trace.texts[pair[0]], trace.texts[pair[1]]) for pair in set(pairs)}
    return np.array([sizes[pair] for pair in pairs], np.int64)


def _input_bytes(dims: str, types: str) -> int:
    """Return the bytes of the first input.

    >>> _input_bytes("[[3, 5]]", '["float"]'), _input_bytes("", "")
    (60, -9223372036854775808)
    """
    try:
        shape, word = json.loads(dims)[0], json.loads(types)[0].removeprefix("c10::").lower()
        return math.prod(shape) * (SIZES.get(word) or _numbered(word)) or NONE
    except (ValueError, LookupError, TypeError, AttributeError):
        return NONE


def _numbered(text: str) -> int:
    """Return the bytes of types that contain their width: Float8_e4m3fn, Int8, UInt16."""
    found = re.match(r"(?:float|u?int)(\d+)", text, re.IGNORECASE)
    return int(found[1]) // 8 if found else 0


def _within(merged: tuple[Ints, Ints], spans: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """Return the intersection of two sets of disjoint, sorted intervals."""
    if not len(merged[0]) or not len(spans[0]):
        return merged[0][:0], merged[1][:0]
    edges = np.sort(np.concatenate([*merged, *spans]))  # np.unique would hash values that are almost all distinct
    edges = edges[np.append(True, edges[1:] != edges[:-1])]
    keep = _covers(merged, edges[:-1]) & _covers(spans, edges[:-1])
    return union(edges[:-1][keep], edges[1:][keep])


def _covers(merged: tuple[Ints, Ints], times: Ints) -> NDArray[np.bool_]:
    at = np.searchsorted(merged[0], times, side="right")
    covered: NDArray[np.bool_] = (at > 0) & (merged[1][np.maximum(at - 1, 0)] > times)
    return covered
