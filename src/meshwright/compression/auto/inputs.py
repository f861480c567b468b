"""What a decision is made of: ways to send, gradients in the order in which they become ready, links and cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshwright.compression.codec import codec, unusual
from meshwright.compression.sync.layout import Choice
from meshwright.errors import InputError

SMALL = 1 << 15  # numbers: gradients with fewer go the way of their neighbours, so that messages stay few


@dataclass(frozen=True)
class Way:
    """Something that may be done with a gradient, and what it costs in steps: how many are needed for the same loss,
    against exact sums. Which those are, `docs/compress.md` says for the usual ways (benchmarks/compress_convergence.py)."""

    choice: Choice
    steps: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.choice, Choice):
            raise InputError(f"is {self.choice!r}", field="choice", valid="Choice(codec('int8'), 'scatter')")
        if not self.steps >= 1:
            raise InputError(f"is {self.steps}", field="steps", valid="1 or more, against exact sums")

    @property
    def name(self) -> str:
        """
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
        """Whether nothing is lost."""
        return self.choice.codec is None

    @property
    def near(self) -> bool:
        """Whether every number keeps 16 bits at least."""
        return self.exact or self.choice.codec.name in ("fp16", "bf16")


def usual() -> tuple[Way, ...]:
    """LayerConfig that reach the loss of exact sums within 2 % (with error feedback), by what they cost in steps."""
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
    """Let a synchroniser decide, and decide again when links or gradients' times have changed.

    >>> Auto(guard=0)
    Traceback (most recent call last):
    ...
    meshwright.errors.InputError: guard: is 0 (valid: more than 0, or none)
    """

    ways: tuple[Way, ...] = field(default_factory=usual)
    guard: float | None = None  # most relative error of the aggregated gradient, |sent - exact| / |exact|
    every: int | None = None  # steps between looks at what has changed; none: about two seconds of them

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
    """What a round of messages takes by its bytes: of the link, of this process's cores, and until it is there besides."""

    byte: float  # seconds of the link per byte that a process sends
    latency: float = 0.0  # seconds besides
    work: float = 0.0  # seconds of a core: of threads and of the system, which move bytes
    work_byte: float = 0.0


@dataclass(frozen=True)
class Link:
    """Between processes that all send at once: messages to all others, and a backend's all-reduce where sums are its own.

    >>> Link(Cost(1e-6), Cost(2e-6)).slower(2).messages.byte
    2e-06
    """

    messages: Cost
    reduce: Cost

    def slower(self, times: float) -> Link:
        """The same link with so many times the seconds per byte."""
        kinds = (replace(cost, byte=cost.byte * times) for cost in (self.messages, self.reduce))
        return Link(*kinds)


@dataclass(frozen=True)
class Unit:
    """Adjacent gradients of a bucket that go one way: a large one and the small ones after it, or equal ones."""

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

    ready: tuple[float, ...]  # of each bucket: seconds that a core has computed since the step before was synchronised
    units: tuple[Unit, ...]
    members: int  # processes
    link: Link
    cores: float  # for each process of a machine


def units(buckets: Sequence[Sequence[tuple[int, ...]]]) -> tuple[Unit, ...]:
    """Gradients' shapes, bucket by bucket, as units.

    >>> [unit.counts for unit in units([[(8,), (256, 256), (256,), (256, 256), (8,)], [(4,)]])]
    [(8, 65536, 256, 65536, 8), (4,)]
    """
    found: list[Unit] = []
    for place, shapes in enumerate(buckets):
        own: list[list[tuple[int, ...]]] = []
        size = 0  # of the large gradients of the last unit
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
