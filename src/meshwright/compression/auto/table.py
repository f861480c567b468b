"""Decisions of a running job as a table for people, and as rules for a plan."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.base.units import size
from meshwright.compression.auto.controller import Controller
from meshwright.compression.auto.inputs import Way
from meshwright.compression.auto.predictions import Expectation
from meshwright.compression.auto.rules import rules
from meshwright.compression.sync.layout import Piece, pieces
from meshwright.errors import InputError
from meshwright.plans import Compression

_HEADINGS = ("bucket", "gradients", "numbers", "way", "parts", "sends")


def explained(pilot: Controller | None) -> str:
    """Return a table: the strategy of every bucket, its prediction and outcome, and its changes."""
    decided = _asked(pilot)
    rows: list[Sequence[str]] = [_HEADINGS]
    for unit, _, way in decided.now:
        row = (len(unit.shapes), f"{unit.numbers:,}", way.name, len(pieces(way.choice, Piece(0, unit.counts))))
        rows.append((str(unit.bucket), *map(str, row), size(decided.sent(unit, way))))
    if len(rows) == 1:
        return "no step has been synchronised yet"
    return "\n".join([*columns(rows), "", *_history(decided.history)])


def _history(history: Sequence[Expectation]) -> Iterator[str]:
    """Yield a line for every change, with its outcome until the next."""
    if not history:
        yield "nothing has been seen yet: decided by what links and codecs took when measured"
        return
    before: tuple[Way, ...] | None = None
    for place, look in enumerate(history):
        if look.decision.ways == before:
            continue
        before = look.decision.ways
        later = history[place:]
        held = [one.seen for one in later[: _unchanged(later)] if one.seen]
        came = f"{min(held):.4g} to {max(held):.4g} s seen" if held else "nothing seen yet"
        parts = ", ".join(f"{way.name} {part:.0%}" for way, part in shares(look).items())
        yield f"step {look.step}: {parts} of the numbers; {look.expected:.4g} s a step expected, {came}"
    yield f"last looked at in step {history[-1].step}"


def _unchanged(later: Sequence[Expectation]) -> int:
    return next((i for i, one in enumerate(later) if one.decision.ways != later[0].decision.ways), len(later))


def shares(look: Expectation) -> dict[Way, float]:
    """Return the share of numbers per strategy, largest first."""
    numbers: dict[Way, int] = {}
    for unit, way in zip(look.facts.units, look.decision.ways, strict=True):
        numbers[way] = numbers.get(way, 0) + unit.numbers
    whole = sum(numbers.values()) or 1
    return {way: count / whole for way, count in sorted(numbers.items(), key=lambda item: -item[1])}


def rules_of(pilot: Controller | None, names: Mapping[Any, str] | None, model: Any = None) -> tuple[Compression, ...]:
    """Return the decisions as a plan's rules. A layer with several strategies gets that of most of its numbers."""
    found: dict[str, dict[Way, int]] = {}
    for key, count, way in _gradients(_asked(pilot)):
        name = key if names is None else names.get(key)
        if not isinstance(name, str):
            raise InputError(f"a gradient of {count:,} numbers has no name", field="names", valid="one for each key")
        votes = found.setdefault(name, {})
        votes[way] = votes.get(way, 0) + count
    return rules({name: max(votes, key=lambda way: votes[way]) for name, votes in found.items()}, model)


def _gradients(pilot: Controller) -> Iterator[tuple[Hashable, int, Way]]:
    """Yield every gradient by its key, with its count of numbers and its strategy."""
    taken: dict[int, int] = {}  # for each bucket: gradients of the units before
    for unit, gradients, way in pilot.now:
        first = taken.get(unit.bucket, 0)
        taken[unit.bucket] = first + len(unit.shapes)
        keys = gradients.keys[first : first + len(unit.shapes)]
        yield from ((key, count, way) for key, count in zip(keys, unit.counts, strict=True))


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; numbers are aligned right.

    >>> columns([("name", "count"), ("a", "1,000"), ("bcdef", "7")])
    ['name   count', 'a      1,000', 'bcdef      7']
    """
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [all(word[:1].isdigit() for word in column[1:]) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            word.rjust(w) if to_right else word.ljust(w) for word, w, to_right in zip(row, wide, right, strict=True)
        ).rstrip()
        for row in rows
    ]


def _asked(pilot: Controller | None) -> Controller:
    if pilot is None:
        raise InputError("was given, not decided", field="choice", valid="meshwright.compression.auto.Auto()")
    return pilot
