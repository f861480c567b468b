"""Which files of a folder are traces, and which of several files speaks for a rank."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.errors import InputError
from meshwright.observe.rank.facts import RankFacts
from meshwright.observe.traces import Note

ENDINGS = (".json", ".json.gz", ".json.zst")
VALID = f"a folder with traces, or files that end in {', '.join(ENDINGS)}"


def trace_files(places: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """Traces in folders (and folders in them), and files as they are named; in the order of their numbers."""
    given = [places] if isinstance(places, str | os.PathLike) else list(places)
    if not given:
        raise InputError("nothing to analyze", field="paths", valid=VALID)
    found: dict[Path, None] = {}
    for place in map(Path, given):
        if not place.exists():
            raise InputError("no such file or folder", file=str(place), valid=VALID)
        found |= dict.fromkeys(_within(place) if place.is_dir() else [place])
    if not found:
        raise InputError("holds no traces", file=", ".join(map(str, given)), valid=VALID)
    return tuple(found)


def _within(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.name.lower().endswith(ENDINGS) and path.is_file())
    return sorted((path for path in files if ".meshwright" not in path.name), key=in_order)


def in_order(path: Path) -> list[tuple[int, int, str]]:
    """As people count: rank2 before rank10.

    >>> sorted([Path("rank10.json"), Path("rank2.json")], key=in_order)[0].name
    'rank2.json'
    """
    words = re.split(r"(\d+)", str(path))
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in words]


def one_per_rank(found: Iterable[RankFacts]) -> tuple[tuple[RankFacts, ...], tuple[Note, ...]]:
    """Ranks in order, one file each: of several the one that was recorded last. What no file tells is counted through."""
    notes: list[Note] = []
    by_rank: dict[int, RankFacts] = {}
    nameless: list[RankFacts] = []
    for facts in sorted(found, key=lambda facts: in_order(Path(facts.path))):
        if facts.rank is None:
            nameless.append(facts)
        elif (other := by_rank.get(facts.rank)) is None:
            by_rank[facts.rank] = facts
        else:
            first, last = sorted((other, facts), key=_begun)
            notes.append(
                Note(f"left out: {first.path}: {last.path} is of rank {facts.rank} too, and was recorded later")
            )
            by_rank[facts.rank] = last
    for facts in nameless:
        free = next(rank for rank in range(len(by_rank) + 1) if rank not in by_rank)
        if len(nameless) + len(by_rank) > 1:
            notes.append(Note(f"{facts.path} does not tell its rank: taken as {free}"))
        by_rank[free] = replace(facts, rank=free, rank_from="order of files")
    return tuple(by_rank[rank] for rank in sorted(by_rank)), tuple(notes)


def _begun(facts: RankFacts) -> int:
    return facts.base_ns + (int(facts.devices[0].windows.edges[0]) if facts.devices else 0)
