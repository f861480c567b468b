"""Measure links: all ranks send messages to all others at once, and the slowest counts."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.compression.auto.inputs import Cost, Link
from meshwright.compression.sync.transport.message import Envelope, Stamp
from meshwright.compression.sync.transport.wire import Transfer, Wire

_SMALL = 256  # bytes of a message so short that its length does not matter
_LONG_ENOUGH = 0.1  # seconds after which start-up and bursts of a shaped link do not matter
_SIZES = tuple(1 << power for power in (17, 19, 21, 23))  # bytes that a rank sends
_BURST = 1 << 20  # bytes
_TIMES = 5


@dataclass(frozen=True)
class _Seen:
    """Measurement of one round on the slowest rank."""

    wall: float
    work: float  # seconds of cores


Submit = Callable[[Sequence[Iterator[Transfer]]], Any]  # runs strands as those of gradients are run, and waits for them


def measured(wire: Wire, cores: float, submit: Submit) -> Link:
    """Measure the link on all ranks at once; takes about a second, on slow links a few."""
    if wire.size == 1:
        return Link(Cost(0.0), Cost(0.0))
    size = _long_enough(wire, submit)
    messages = _fitted(wire, size, cores, submit)
    return Link(messages, messages)  # exact sums are messages, too


def _long_enough(wire: Wire, submit: Submit) -> int:
    """Return the bytes that occupy the link long enough to measure its speed."""
    _seen(wire, _SMALL, submit)
    for size in _SIZES:
        if _seen(wire, size, submit).wall > _LONG_ENOUGH:
            break
    return size


def probe_of(link: Link) -> int:
    """Return the bytes of a probe for a link of about this speed; at least the burst of a shaped link.

    >>> from meshwright.compression.auto.inputs import Cost
    >>> [probe_of(Link(Cost(8e-6 / mbit), Cost(0.0))) for mbit in (10, 200, 100_000)]
    [1048576, 2500000, 8388608]
    """
    return round(min(max(_LONG_ENOUGH / link.messages.byte, _BURST), _SIZES[-1]))


def probed(wire: Wire, size: int, submit: Submit) -> float:
    """Return the seconds of a round of `size` bytes per rank, with nothing else in transfer."""
    return _seen(wire, size, submit).wall


def _fitted(wire: Wire, size: int, cores: float, submit: Submit) -> Cost:
    small = [_seen(wire, _SMALL, submit) for _ in range(_TIMES)]
    fixed, work = (statistics.median(values) for values in zip(*((one.wall, one.work) for one in small), strict=True))
    large = _seen(wire, size, submit)
    work_byte = max(large.work - work, 0.0) / size
    byte = max(large.wall - fixed, large.wall / 4) / size
    return Cost(byte, max(fixed - work / min(1.0, cores), 0.0), work, work_byte)


def told(wire: Wire, stamp: Stamp, values: Sequence[float], count: int) -> list[float]:
    """Return the first rank's values on all ranks; the others' are ignored. Waits with the wire's limit."""
    box = Envelope(8 * count)
    if wire.place == 0:
        box.numbers(torch.float64).copy_(torch.tensor(values, dtype=torch.float64))
        wire.swap(stamp, [(place, box) for place in wire.others], []).wait()
    else:
        wire.swap(stamp, [], [(0, box)]).wait()
    found: list[float] = box.numbers(torch.float64).tolist()
    return found


def neighbours(wire: Wire) -> int:
    """Return how many ranks share this machine's cores, including this one."""
    names: list[Any] = [None] * wire.size
    dist.all_gather_object(names, _machine(), group=wire.group)
    return names.count(_machine())


def _machine() -> str:
    """Return the machine's identity: its containers share its cores, whatever their names are."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()


def _round(wire: Wire, sent: int) -> Iterator[Transfer]:
    """Send and receive `sent` bytes in all on every rank."""
    each = max(sent // (wire.size - 1), 64)
    boxes = [(place, Envelope(each)) for place in wire.others]
    out = Envelope(each)
    yield wire.swap(Stamp(0, 0, 0), [(place, out) for place in wire.others], boxes)


def _seen(wire: Wire, size: int, submit: Submit) -> _Seen:
    dist.barrier(group=wire.group)
    wall, work = time.perf_counter(), time.process_time()
    submit([_round(wire, size)])
    found = torch.tensor([time.perf_counter() - wall, time.process_time() - work], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=wire.group)
    return _Seen(*found.tolist())
