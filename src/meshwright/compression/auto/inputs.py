"""Inputs of a decision: strategies, gradients in the order in which they become ready, links and cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshwright.compression.codec import codec, unusual
from meshwright.compression.sync.layout import Choice
from meshwright.errors import InputError

SMALL = 1 << 15  # numbers: smaller gradients join their neighbours, so that there are few messages


@dataclass(frozen=True)
class Way:
    """Strategy for a gradient, and its cost: the steps to the same loss, relative to exact sums.

    `docs/compress.md` lists them for the usual strategies (benchmarks/compress_convergence.py).
    """

    choice: Choice
    steps: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.choice, Choice):
            raise InputError(f"is {self.choice!r}", field="choice", valid="Choice(codec('int8'), 'scatter')")
        if not self.steps >= 1:
            raise InputError(f"is {self.steps}", field="steps", valid="1 or more, against exact sums")

    @property
    def name(self) -> str:
        """Name of the strategy.

        >>> Way(Choice(codec("powersgd", rank=8))).name, Way(Choice()).name, Way(Choice(codec("int8"), "ring")).name
        ('powersgd rank=8 gather', 'none', 'int8 ring')
        """
        kind = self.choice.codec
        if kind is None:
            return "none"
        told = [f"{key}={value}" for key, value in unusual(kind).items()]
        return " ".join([kind.name, *told, self.choice.topology])

    @property
    def exact(self) -> bool:
        """Return True if nothing is lost."""
        return self.choice.codec is None

    @property
    def near(self) -> bool:
        """Return True if every number keeps at least 16 bits."""
        return self.exact or self.choice.codec.name in ("fp16", "bf16")


def usual() -> tuple[Way, ...]:
    """Return strategies that reach the loss of exact sums within 2 % (with error feedback), by their cost in steps."""
    ways = [Way(Choice())]
    for name, steps in (("fp16", 1.0), ("int8", 1.0), ("int4", 1.02), ("int2", 1.08)):
        made = codec(name)
        ways += [Way(Choice(made, "scatter", piece), steps) for piece in (1 << 20, 1 << 22)]
        ways += [Way(Choice(made, topology), steps) for topology in ("gather", "ring")]
    for rank, steps in ((32, 1.06), (16, 1.12), (8, 1.33)):
        made = codec("powersgd", rank=rank)
        ways += [Way(Choice(made, topology), steps) for topology in ("gather", "scatter")]
    return tuple(ways)


@dataclass(frozen=True)
class Auto:
    """Settings of automatic decisions, which are revised when links or the times of gradients change.

    >>> Auto(guard=0)
    Traceback (most recent call last):
    ...
    meshwright.errors.InputError: guard: is 0 (valid: more than 0, or none)
    """

    ways: tuple[Way, ...] = field(default_factory=usual)
    guard: float | None = None  # maximum relative error of the aggregated gradient, |sent - exact| / |exact|
    every: int | None = None  # steps between revisions; None: about two seconds of steps

    def __post_init__(self) -> None:
        if not self.ways:
            raise InputError("is empty", field="ways", valid="one or more")
        if self.guard is not None and not self.guard > 0:
            raise InputError(f"is {self.guard}", field="guard", valid="more than 0, or none")
        if self.guard is not None and not any(way.exact for way in self.ways):
            raise InputError("no way is exact", field="ways", valid="Way(Choice()) among them, where there is a guard")
        for way in self.ways:
            if not isinstance(way, Way):
                raise InputError(
                    f"has {way!r}", field="ways", valid="Way(Choice(codec('int8')), steps=1.0), one or more"
                )
        if self.every is not None and self.every < 2:
            raise InputError(f"is {self.every}", field="every", valid="2 steps or more, or none")


@dataclass(frozen=True)
class Cost:
    """Cost of a round of messages by its bytes: on the link, on this rank's cores, and as latency."""

    byte: float  # seconds of the link per byte that a rank sends
    latency: float = 0.0  # seconds per round
    work: float = 0.0  # seconds of a core per byte: of threads and of the system, which move bytes
    work_byte: float = 0.0


@dataclass(frozen=True)
class Link:
    """Link between ranks that all send at once: for messages to all others, and for a backend's all-reduce.

    >>> Link(Cost(1e-6), Cost(2e-6)).slower(2).messages.byte
    2e-06
    """

    messages: Cost
    reduce: Cost

    def slower(self, times: float) -> Link:
        """Return the link with `times` as many seconds per byte."""
        kinds = (replace(cost, byte=cost.byte * times) for cost in (self.messages, self.reduce))
        return Link(*kinds)


@dataclass(frozen=True)
class Unit:
    """Adjacent gradients of a bucket with one strategy: a large one and the small ones after it, or equal ones."""

    bucket: int
    shapes: tuple[tuple[int, ...], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(_numbers(shape) for shape in self.shapes)

    @property
    def numbers(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True)
class Facts:
    """One training step, as a decision sees it."""

    ready: tuple[float, ...]  # for each bucket: seconds that a core has computed since the last synchronisation
    units: tuple[Unit, ...]
    members: int  # number of ranks
    link: Link
    cores: float  # per rank of a machine


def units(buckets: Sequence[Sequence[tuple[int, ...]]]) -> tuple[Unit, ...]:
    """Return the gradients' shapes, bucket by bucket, as units.

    >>> [unit.counts for unit in units([[(8,), (256, 256), (256,), (256, 256), (8,)], [(4,)]])]
    [(8, 65536, 256, 65536, 8), (4,)]
    """
    found: list[Unit] = []
    for place, shapes in enumerate(buckets):
        own: list[list[tuple[int, ...]]] = []
        size = 0  # total of the large gradients in the last unit
        for shape in shapes:
            numbers = _numbers(shape)
            if own and (numbers < SMALL or size in (0, numbers)):
                own[-1].append(shape)
            else:
                own.append([shape])
            if numbers >= SMALL:
                size = numbers
            elif len(own[-1]) == 1:
                size = 0
        found += [Unit(place, tuple(one)) for one in own]
    return tuple(found)


def _numbers(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count
