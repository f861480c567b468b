"""Every collective and message of a rank: what was asked, when it ran, and how much of it was hidden."""

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
# How libraries, PyTorch and kernels spell a collective; the first that matches names it.
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
BACKEND = re.compile(r"^[nrhm]ccl:")  # what torch.distributed calls that span
_SPELLED = {kind: re.compile(spelling, re.IGNORECASE) for kind, spelling in SPELLINGS.items()}
SIZES = {"float": 4, "int": 4, "long": 8, "double": 8, "half": 2, "bfloat16": 2, "short": 2, "byte": 1, "char": 1,
         "bool": 1, "complexfloat": 8, "complexdouble": 16}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Calls:
    """One row per call, by start. Texts of groups are in `groups`; times are nanoseconds since the epoch."""

    kind: Ints  # place in KINDS
    start: Ints  # when this rank arrived: its kernel began
    end: Ints
    step: Ints  # place among the rank's windows, -1 for none
    group: Ints  # place in `groups`
    seq: Ints  # the group's own number of the call, NONE where the profiler does not write it
    bytes: Ints  # of the whole buffer, as bandwidths are counted: the larger of input and output; NONE where not known
    size: Ints  # ranks in the group, NONE where not known
    peer: Ints  # the other rank of a message, NONE where not known
    stream: Ints
    hidden: Ints  # nanoseconds of it during which something computed
    computed: Ints  # nanoseconds of computing since the recording began, when it starts: what lies between two calls
    groups: tuple[Group, ...]
    # When computing ran during calls, as disjoint intervals in order: what part of a wait was hidden can be asked later.
    busy_starts: Ints
    busy_ends: Ints

    def __len__(self) -> int:
        return len(self.kind)

    def computing(self, starts: Ints, ends: Ints) -> Ints:
        """How much of each interval, which must lie within calls, something computed."""
        merged = (self.busy_starts, self.busy_ends)
        return before(merged, ends) - before(merged, starts)


@dataclass(frozen=True)
class Group:
    """A process group as the profiler names it."""

    name: str  # "" where it does not
    description: str
    ranks: tuple[int, ...]  # () where they are not told


def kind_of(text: str) -> str:
    """The collective that a kernel or an operator is called after.

    >>> kind_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)"), kind_of("_allgather_base"), kind_of("nccl:recv 3<-2")
    ('all_reduce', 'all_gather', 'recv')
    """
    return next((kind for kind, spelling in _SPELLED.items() if spelling.search(text)), KINDS[-1])


def calls_of(trace: Trace, work: Work, member: Ints) -> Calls:
    """Calls of one device. `member` says to which step each piece of work belongs."""
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
    """The other side of a message: PyTorch tells it alone, others tell both.

    >>> _peer(np.array([3, 2, 2]), np.array([NONE, 3, NONE]), 2).tolist() == [3, 3, 2]
    True
    """
    told = source != NONE
    if rank is not None:
        told &= (source != rank) | (target == NONE)
    return np.where(told, source, target)


def _records(trace: Trace, rows: Ints, launch: Ints) -> Ints:
    """The row of `trace.collectives` that tells of each kernel: its own, or that of the operator it was launched in."""
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
    """By the record, by the backend's span around the launch, by the kernel's name: all-to-all is SendRecv to NCCL."""
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
    """The place among some events of the last to begin before each time, if it then still lasted; -1 otherwise."""
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
    """Members of groups that the file's header lists: events shorten long lists."""
    told = trace.header.get("distributedInfo")
    listed = told.get("pg_config") if isinstance(told, dict) else None
    return {
        str(group.get("pg_name")): tuple(rank for rank in group.get("ranks") or () if isinstance(rank, int))
        for group in (listed if isinstance(listed, list) else [])
        if isinstance(group, dict)
    }


def numbers_in(text: str) -> tuple[int, ...]:
    """A list of ranks as the profiler writes it; none where it was shortened.

    >>> numbers_in("[0, 4, 8]"), numbers_in("[0, 1, 2, ..., 511]")
    ((0, 4, 8), ())
    """
    if "..." in text or not re.fullmatch(r"\[[\d,\s]*\]", text):
        return ()
    return tuple(int(word) for word in re.findall(r"\d+", text))


def _from_inputs(trace: Trace, rows: Ints) -> Ints:
    """Bytes of the first input of spans that tell only that, as those of gloo do; NONE elsewhere."""
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
    """
    >>> _input_bytes("[[3, 5]]", '["float"]'), _input_bytes("", "")
    (60, -9223372036854775808)
    """
    try:
        shape, word = json.loads(dims)[0], json.loads(types)[0].removeprefix("c10::").lower()
        return math.prod(shape) * (SIZES.get(word) or _numbered(word)) or NONE
    except (ValueError, LookupError, TypeError, AttributeError):
        return NONE


def _numbered(text: str) -> int:
    """Bytes of types that say their width: Float8_e4m3fn, Int8, UInt16."""
    found = re.match(r"(?:float|u?int)(\d+)", text, re.IGNORECASE)
    return int(found[1]) // 8 if found else 0


def _within(merged: tuple[Ints, Ints], spans: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """What of disjoint, sorted intervals lies within others."""
    if not len(merged[0]) or not len(spans[0]):
        return merged[0][:0], merged[1][:0]
    edges = np.sort(np.concatenate([*merged, *spans]))  # np.unique would hash what is all but distinct
    edges = edges[np.append(True, edges[1:] != edges[:-1])]
    keep = _covers(merged, edges[:-1]) & _covers(spans, edges[:-1])
    return union(edges[:-1][keep], edges[1:][keep])


def _covers(merged: tuple[Ints, Ints], times: Ints) -> NDArray[np.bool_]:
    at = np.searchsorted(merged[0], times, side="right")
    covered: NDArray[np.bool_] = (at > 0) & (merged[1][np.maximum(at - 1, 0)] > times)
    return covered
