"""Jobs of several ranks that never ran: a program per rank, simulated on one true clock, told as the profiler tells it.

A rank computes on one stream and communicates on others. Collectives end when the last rank has come and the data has
moved; a message when both ends are there. Times are nanoseconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.traces.rank.facts import RankFacts, digest
from tests.traces.traces_as_text import SCANNERS, read_text

BEGIN = 1_700_000_000_000_000_000  # of the job, nanoseconds since the epoch
STREAMS = {"compute": 7, "collective": 20, "other": 22, "send": 24, "recv": 28}


@dataclass(frozen=True)
class Compute:
    ns: int
    name: str = "sm90_gemm_bf16"


@dataclass(frozen=True)
class Host:
    """The host does not issue anything for so long."""

    ns: int


@dataclass(frozen=True)
class Collective:
    group: tuple[int, ...]
    ns: int  # of moving the data
    kind: str = "allreduce"
    elements: int = 1 << 20
    description: str = ""
    blocks: bool = True  # what follows waits for it; otherwise `Join` does
    stream: str = "collective"


@dataclass(frozen=True)
class Join:
    """Computing waits for everything that was begun."""


@dataclass(frozen=True)
class Send:
    to: int
    ns: int = 0


@dataclass(frozen=True)
class Recv:
    source: int
    ns: int = 0


@dataclass(frozen=True)
class Step:
    number: int


Op = Compute | Host | Collective | Join | Send | Recv | Step


@dataclass
class Event:
    name: str
    stream: str
    start: int
    end: int
    launch: int
    args: dict[str, Any]


@dataclass
class Rank:
    number: int
    program: Sequence[Op]
    at: int = 0  # the next operation
    now: int = 0  # when computing so far ends
    late: int = 0  # when the host issues the next
    free: dict[str, int] = field(default_factory=dict)  # when each stream of communication ends
    open: list[Event] = field(default_factory=list)  # begun, its end not known
    events: list[Event] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)  # number, when its first work was issued
    met: dict[Any, int] = field(default_factory=dict)  # how often this rank came to a meeting


def simulate(programs: Sequence[Sequence[Op]]) -> list[Rank]:
    ranks = [Rank(number, program) for number, program in enumerate(programs)]
    meetings: dict[Any, list[tuple[Rank, Event]]] = {}
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while rank.at < len(rank.program) and _advance(rank, rank.program[rank.at], meetings):
                rank.at += 1
                moved = True
    assert all(rank.at == len(rank.program) for rank in ranks), "the job hangs"
    return ranks


def _advance(rank: Rank, op: Op, meetings: dict[Any, list[tuple[Rank, Event]]]) -> bool:
    if isinstance(op, Compute):
        if any(event.args["blocks"] and event.end < 0 for event in rank.open):
            return False
        start = max(rank.now, rank.late, *(event.end for event in rank.open if event.args["blocks"]), 0)
        rank.open = [event for event in rank.open if not event.args["blocks"]]
        rank.events.append(Event(op.name, "compute", start, start + op.ns, _issued(rank, start), {}))
        rank.now = start + op.ns
    elif isinstance(op, Host):
        if any(event.end < 0 for event in rank.open):
            return False
        rank.late = max(rank.now, rank.late, *(event.end for event in rank.open), 0) + op.ns
    elif isinstance(op, Step):
        if any(event.end < 0 for event in rank.open):
            return False
        rank.now = max(rank.now, *(event.end for event in rank.open), 0)
        rank.open = []
        rank.steps.append((op.number, max(rank.now, rank.late)))
    elif isinstance(op, Join):
        if any(event.end < 0 for event in rank.open):
            return False
        rank.now = max(rank.now, *(event.end for event in rank.open), 0)
        rank.open = []
    else:
        return _meet(rank, op, meetings)
    return True


def _issued(rank: Rank, start: int) -> int:
    """Just in time where the host was late, otherwise long before, but within the step."""
    if rank.late and rank.late >= start:
        return start
    return max(rank.steps[-1][1] if rank.steps else 0, start - 50_000)


def _meet(rank: Rank, op: Collective | Send | Recv, meetings: dict[Any, list[tuple[Rank, Event]]]) -> bool:
    blocking = [event for event in rank.open if event.args["blocks"]]
    if any(event.end < 0 for event in blocking):
        return False
    stream = op.stream if isinstance(op, Collective) else "send" if isinstance(op, Send) else "recv"
    if any(event.stream == stream and event.end < 0 for event in rank.open):
        return False
    start = max(rank.now, rank.late, rank.free.get(stream, 0), *(event.end for event in blocking), 0)
    if isinstance(op, Collective):
        what: Any = (op.group, op.kind)
        size, blocks = len(op.group), op.blocks
        name, args = f"ncclDevKernel_{op.kind}_RING", _collective_args(op)
    else:
        size, blocks = 2, isinstance(op, Recv)
        sender, receiver = (rank.number, op.to) if isinstance(op, Send) else (op.source, rank.number)
        what = (sender, receiver)
        name, args = "ncclDevKernel_SendRecv", _message_args(op)
    turn = rank.met.get(what, 0)
    rank.met[what] = turn + 1
    args |= {"blocks": blocks, "turn": turn}
    event = Event(name, stream, start, -1, _issued(rank, start), args)
    rank.events.append(event)
    rank.open.append(event)
    there = meetings.setdefault((what, turn), [])
    there.append((rank, event))
    if len(there) == size:
        end = max(event.start for _, event in there) + op.ns
        for other, event in there:
            event.end = end
            other.free[event.stream] = end
    return True


def _collective_args(op: Collective) -> dict[str, Any]:
    return {
        "Collective name": op.kind,
        "In msg nelems": op.elements,
        "Out msg nelems": op.elements,
        "dtype": "BFloat16",
        "Group size": len(op.group),
        "Process Group Name": "g" + "_".join(map(str, op.group)),
        "Process Group Description": op.description,
        "Process Group Ranks": str(list(op.group)),
    }


def _message_args(op: Send | Recv) -> dict[str, Any]:
    told = {"Dst Rank": op.to} if isinstance(op, Send) else {"Src Rank": op.source}
    return {"Collective name": "send" if isinstance(op, Send) else "recv", "Process Group Name": "messages", **told}


def as_facts(
    ranks: Sequence[Rank],
    *,
    hosts: Callable[[int], str] = lambda rank: "",
    clock: Callable[[int, int], int] = lambda rank, time: time,
    keep: Callable[[str], bool] = lambda key: True,
    seq: bool = False,
) -> list[RankFacts]:
    """What a user's files say. `clock` is what a rank's clock shows at a true time; `keep` chooses args to tell."""
    return [digest(read_text(as_text(rank, len(ranks), hosts, clock, keep, seq), SCANNERS[-1]())) for rank in ranks]


def as_text(
    rank: Rank,
    world: int,
    hosts: Callable[[int], str],
    clock: Callable[[int, int], int],
    keep: Callable[[str], bool],
    seq: bool,
) -> str:
    def times(start: int, end: int) -> dict[str, float]:
        begin, stop = (clock(rank.number, time) for time in (start, end))
        return {"ts": begin / 1000, "dur": (stop - begin) / 1000}

    events: list[dict[str, Any]] = []
    for number, event in enumerate(rank.events):
        told = {key: value for key, value in event.args.items() if key not in ("blocks", "turn") and keep(key)}
        if seq and "Group size" in event.args:
            told["Seq"] = event.args["turn"]
        link = {"correlation": number + 1}
        stream, made = STREAMS[event.stream], told | link
        events.append(_event("kernel", event.name, 0, stream, times(event.start, event.end)) | {"args": made})
        launch = _event("cuda_runtime", "cudaLaunchKernel", 9, 9, times(event.launch, event.launch))
        events.append(launch | {"args": link})
    last = max(event.end for event in rank.events)
    ends = [start for _, start in rank.steps[1:]] + [last]
    for (number, start), end in zip(rank.steps, ends, strict=False):
        events.append(_event("user_annotation", f"ProfilerStep#{number}", 9, 9, times(start, end - 1)))
    info = {"rank": rank.number, "world_size": world}
    return json.dumps(
        {"baseTimeNanoseconds": BEGIN, "host_name": hosts(rank.number), "distributedInfo": info, "traceEvents": events}
    )


def _event(category: str, name: str, pid: int, tid: int, times: dict[str, float]) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times}


def data_parallel(
    ranks: int,
    steps: int,
    compute: Callable[[int, int], int] = lambda rank, step: 1_000_000,
    host: Callable[[int, int], int] = lambda rank, step: 0,
    transfer: int = 200_000,
    layers: int = 2,
    overlap: bool = False,
) -> list[list[Op]]:
    """Steps of `layers` products and a norm each, gradients reduced after each layer and joined at the end."""
    every = tuple(range(ranks))
    programs: list[list[Op]] = []
    for rank in every:
        program: list[Op] = []
        for step in range(steps):
            program.append(Step(step))
            for layer in range(layers):
                program.append(Compute(compute(rank, step)))
                if layer == 0 and host(rank, step):
                    program.append(Host(host(rank, step)))
                program.append(Compute(100_000, "layer_norm_kernel"))
                program.append(Collective(every, transfer, description="mesh_dp", blocks=not overlap))
            program.append(Join())
        programs.append(program)
    return programs


def pipelined(
    stages: int,
    batches: int,
    steps: int,
    schedule: str = "1f1b",
    forward: Callable[[int], int] = lambda stage: 1_000_000,
    backward: Callable[[int], int] = lambda stage: 2_000_000,
    transfer: int = 0,
    flush: bool = False,
    copies: int = 1,
) -> list[list[Op]]:
    """`copies` pipelines beside each other; rank = stage * copies + copy. A flush is a collective of all ranks."""
    every = tuple(range(stages * copies))
    programs: list[list[Op]] = []
    for rank in every:
        stage, program = rank // copies, list[Op]()
        for step in range(steps):
            program.append(Step(step))
            for what in order(schedule, stage, stages, batches):
                source, to = (rank - copies, rank + copies) if what == "F" else (rank + copies, rank - copies)
                if source in every:
                    program.append(Recv(source, transfer))
                ns = forward(stage) if what == "F" else backward(stage)
                program.append(Compute(ns, "sm90_gemm_forward" if what == "F" else "sm90_gemm_backward"))
                if to in every:
                    program.append(Send(to, transfer))
            if flush:
                program.append(Collective(every, 0, elements=1, description="default_pg"))
        programs.append(program)
    return programs


def order(schedule: str, stage: int, stages: int, batches: int) -> str:
    """
    >>> order("gpipe", 0, 2, 2), order("1f1b", 0, 2, 3), order("1f1b", 1, 2, 2)
    ('FFBB', 'FFBFBB', 'FBFB')
    """
    if schedule == "gpipe":
        return "F" * batches + "B" * batches
    warm = min(stages - stage - 1, batches)
    return "F" * warm + "FB" * (batches - warm) + "B" * warm
