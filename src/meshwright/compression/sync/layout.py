"""Cut a bucket of gradients into pieces, each with its choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from meshwright.compression.topologies import TOPOLOGIES
from meshwright.errors import InputError

_LOW_RANK = 16  # factor of a piece's size over other codecs
_ALIGN = 32  # numbers: cuts inside a gradient must lie between packed words


@dataclass(frozen=True)
class Choice:
    """Choice for a gradient: a codec (None: exact sums), a topology, and the size of pieces.

    >>> Choice(topology="rings")
    Traceback (most recent call last):
    ...
    meshwright.errors.InputError: topology: is 'rings' (valid: gather, scatter, ring, tree)
    """

    codec: Any = None
    topology: str = "gather"
    piece: int = 1 << 20  # 4 MiB of float32: occupies a link for longer than a message takes to start

    def __post_init__(self) -> None:
        if self.codec is not None and not callable(getattr(self.codec, "batch", None)):
            raise InputError(f"is {self.codec!r}", field="codec", valid="codec('int8'), or none")
        if self.topology not in TOPOLOGIES:
            raise InputError(f"is {self.topology!r}", field="topology", valid=", ".join(TOPOLOGIES))
        if self.piece < _ALIGN:
            raise InputError(f"is {self.piece}", field="piece", valid=f"{_ALIGN} numbers or more")


@dataclass(frozen=True)
class Piece:
    """Adjacent numbers of a bucket: whole gradients, or parts of some."""

    start: int
    counts: tuple[int, ...]  # numbers of each gradient in it

    @property
    def stop(self) -> int:
        return self.start + sum(self.counts)

    @property
    def numbers(self) -> int:
        return sum(self.counts)


def spans(counts: Sequence[int], choices: Sequence[Choice]) -> list[tuple[Choice, Piece]]:
    """Group adjacent gradients of one choice.

    >>> one, other = Choice(), Choice(topology="ring")
    >>> [(piece.start, piece.counts) for _, piece in spans([5, 6, 7], [one, one, other])]
    [(0, (5, 6)), (11, (7,))]
    """
    if len(counts) != len(choices):
        raise InputError(f"{len(choices)} choices for {len(counts)} gradients", field="choice", valid="one for each")
    found: list[tuple[Choice, Piece]] = []
    start = 0
    for count, choice in zip(counts, choices, strict=True):
        if found and found[-1][0] == choice:
            found[-1] = (choice, Piece(found[-1][1].start, (*found[-1][1].counts, count)))
        else:
            found.append((choice, Piece(start, (count,))))
        start += count
    return found


def cut(piece: Piece, parts: int) -> list[Piece]:
    """Cut into parts of nearly equal size (some empty if there are too few numbers).

    >>> [(part.start, part.counts) for part in cut(Piece(100, (40, 100)), 2)]
    [(100, (40, 56)), (196, (44,))]
    """
    each = -(-piece.numbers // (parts * _ALIGN)) * _ALIGN
    edges = [min(i * each, piece.numbers) for i in range(parts)] + [piece.numbers]
    return [_between(piece, low, high) for low, high in pairwise(edges)]


def pieces(choice: Choice, span: Piece) -> list[Piece]:
    """Cut adjacent gradients into pieces that are encoded and sent together.

    Exact sums go all at once. Thin factors of many numbers share a message, since they are short.

    >>> from meshwright.compression import codec
    >>> span = Piece(0, (1 << 21, 100))
    >>> [len(pieces(Choice(one), span)) for one in (None, codec("int8"), codec("powersgd"))]
    [1, 3, 1]
    """
    if choice.codec is None:
        found = [span]
    elif choice.codec.rounds > 1:
        found = grouped(span, _LOW_RANK * choice.piece)
    else:
        found = cut(span, -(-span.numbers // choice.piece))
    return [piece for piece in found if piece.numbers]


def grouped(piece: Piece, numbers: int) -> list[Piece]:
    """Group whole gradients into parts of about `numbers` numbers, for codecs that need whole gradients.

    >>> [part.counts for part in grouped(Piece(0, (40, 100, 7, 7)), 50)]
    [(40,), (100,), (7, 7)]
    """
    found: list[list[int]] = []
    for count in piece.counts:
        if found and sum(found[-1]) + count <= numbers:
            found[-1].append(count)
        else:
            found.append([count])
    starts = [piece.start + sum(sum(before) for before in found[:i]) for i in range(len(found))]
    return [Piece(start, tuple(counts)) for start, counts in zip(starts, found, strict=True)]


def _between(piece: Piece, low: int, high: int) -> Piece:
    """Return the numbers `low` to `high` of a piece."""
    counts, at = [], 0
    for count in piece.counts:
        shared = min(at + count, high) - max(at, low)
        if shared > 0:
            counts.append(shared)
        at += count
    return Piece(piece.start + low, tuple(counts))
