"""Decisions by size and bandwidth: one gradient, with nothing to overlap with, at costs measured on the spot."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, isqrt, log2
from typing import Any

from meshwright.compression.auto.choose import Costs, Decision, decide, priced
from meshwright.compression.auto.inputs import Cost, Facts, Link, Unit, Way, usual
from meshwright.compression.auto.microbenchmark import Rehearsal
from meshwright.compression.planning.scaled_costs import Scaled, rehearsable, topology
from meshwright.compression.preflight import Tell
from meshwright.compression.sync.layout import Piece, pieces
from meshwright.compression.threads import one_thread

SIZES = tuple(4 << power for power in range(10, 25, 2))  # bytes of float32: 4 KiB to 64 MiB
MBITS = (10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4, 1e5)

TIMES = 7  # runs of each strategy: no later observation corrects these costs, as in a running job


@dataclass(frozen=True)
class Cell:
    """Decision for one gradient on one link."""

    bytes: int
    mbit: float
    way: Way
    pieces: int
    sent: int  # bytes that each rank sends
    seconds: float
    plain: float  # seconds of plain sums
    steps: float  # steps to the same loss, relative to exact sums

    @property
    def speed_up(self) -> float:
        """Speed-up of training to the same loss, additional steps included."""
        return self.plain / (self.seconds * self.steps)

    def to_table(self) -> dict[str, Any]:
        choice = self.way.choice
        return {
            "bytes": self.bytes,
            "mbit": self.mbit,
            "way": short(self.way),
            "topology": topology(self.way),
            "piece": choice.piece,
            "pieces": self.pieces,
            "sent_bytes": self.sent,
            "seconds": self.seconds,
            "plain_seconds": self.plain,
            "steps": self.steps,
            "speed_up": self.speed_up,
        }


def short(way: Way) -> str:
    """Return a short name of a strategy.

    >>> sorted({short(way) for way in usual()})[:5]
    ['fp16', 'int2', 'int4', 'int8', 'none']
    """
    kind = way.choice.codec
    if kind is None:
        return "none"
    return f"{kind.name} {kind.options['rank']}" if "rank" in kind.options else str(kind.name)


def link_of(processes: int, mbit: float, latency: float) -> Link:
    """Return a link on which every rank sends `mbit` Mbit/s, with `latency` seconds per message and no core time.

    An adapter moves the bytes; sockets would make compression pay a little more. The all-reduce has the latency of a
    tree.

    >>> link_of(4, 8, 1e-3)
    Link(messages=Cost(byte=1e-06, latency=0.001, work=0.0, work_byte=0.0), reduce=Cost(byte=1e-06, latency=0.004, \
work=0.0, work_byte=0.0))
    """
    byte = 8e-6 / mbit
    return Link(Cost(byte, latency), Cost(byte, latency * 2 * ceil(log2(processes))))


@dataclass
class Grid:
    """Decisions for a number of ranks, each with a number of cores."""

    processes: int
    latency: float = 1e-4
    cores: float = field(default_factory=lambda: float(len(os.sched_getaffinity(0))))
    ways: tuple[Way, ...] = field(default_factory=usual)
    costs: Costs | None = None

    def __post_init__(self) -> None:
        self.ways = rehearsable(self.ways, self.processes)
        self._costs: Costs = self.costs or Scaled(Rehearsal(self.processes, times=TIMES))

    def row(self, size: int, mbits: Sequence[float]) -> list[Cell]:
        """Decide for one gradient of `size` bytes, a square matrix, on links of several bandwidths."""
        side = isqrt(size // 4)
        return [self._cell(((side, side),), mbit) for mbit in mbits]

    def rows(self, sizes: Sequence[int], mbits: Sequence[float], tell: Tell) -> Iterator[list[Cell]]:
        """Yield rows size by size, timed by one thread."""
        with one_thread():
            for done, size in enumerate(sizes):
                tell(f"timing {size >> 10:,} KiB", done, len(sizes))
                yield self.row(size, mbits)

    def _cell(self, shapes: tuple[tuple[int, ...], ...], mbit: float) -> Cell:
        unit = Unit(0, shapes)
        facts = Facts((0.0,), (unit,), self.processes, link_of(self.processes, mbit, self.latency), self.cores)
        best = decide(facts, self.ways, self._costs)
        (way,) = best.ways
        exact = next(one for one in self.ways if one.exact)
        plain = priced(facts, [exact], self._costs).times.step
        sent = sent_by(self._costs, best, facts)
        return Cell(
            4 * unit.numbers,
            mbit,
            way,
            len(pieces(way.choice, Piece(0, unit.counts))),
            sent,
            best.times.step,
            plain,
            best.steps,
        )


def sent_by(costs: Costs, decision: Decision, facts: Facts) -> int:
    """Return the bytes that each rank sends in a step."""
    pairs = zip(facts.units, decision.ways, strict=True)
    return sum(leg.sent for unit, way in pairs for strand in costs(way, unit.shapes) for leg in strand)


def explained(processes: int, mbit: float | None, latency: float, tell: Tell) -> dict[str, Any]:
    """Return the whole grid, and every size at one bandwidth, as facts."""
    grid = Grid(processes, latency)
    asked = () if mbit is None else (mbit,)
    rows = list(grid.rows(SIZES, (*MBITS, *asked), tell))
    return {
        "processes": processes,
        "latency_seconds": latency,
        "cores": grid.cores,
        "sizes": list(SIZES),
        "mbits": list(MBITS),
        "grid": [[cell.to_table() for cell in row[: len(MBITS)]] for row in rows],
        "mbit": mbit,
        "table": [row[-1].to_table() for row in rows if asked],
    }
