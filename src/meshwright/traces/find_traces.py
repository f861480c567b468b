"""Find the traces in a folder, and choose one of several files of a rank."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.errors import InputError
from meshwright.traces.rank.facts import RankFacts
from meshwright.traces.reading import Note

ENDINGS = (".json", ".json.gz", ".json.zst")
SNAPSHOT, RECORDS = ".pickle", ".parquet"
VALID = f"a folder with traces, or files that end in {', '.join(ENDINGS)}"
Place = str | os.PathLike[str]


@dataclass(frozen=True)
class Sources:
    """Files to read, in the order of their numbers."""

    traces: tuple[Path, ...]
    snapshots: tuple[Path, ...]  # of the allocator's memory (torch.cuda.memory._dump_snapshot)
    records: tuple[Path, ...]  # operations of a whole job, as StragglerAnalysis publishes them


def sources(places: Place | Sequence[Place]) -> Sources:
    """Return the files in folders (recursively), and files that are named directly."""
    given = [places] if isinstance(places, str | os.PathLike) else list(places)
    if not given:
        raise InputError("nothing to analyze", field="paths", valid=VALID)
    found: dict[Path, None] = {}
    for place in map(Path, given):
        if not place.exists():
            raise InputError("no such file or folder", file=str(place), valid=VALID)
        found |= dict.fromkeys(_within(place) if place.is_dir() else [place])
    snapshots = tuple(path for path in found if path.name.endswith(SNAPSHOT))
    records = tuple(path for path in found if path.name.endswith(RECORDS))
    traces = tuple(path for path in found if path not in snapshots and path not in records)
    if not found:
        raise InputError("holds no traces", file=", ".join(map(str, given)), valid=VALID)
    return Sources(traces, snapshots, records)


def _within(folder: Path) -> list[Path]:
    """Return traces and snapshots by their endings; Parquet only if it holds records, never our own cache."""
    every = [
        path for path in folder.rglob("*") if ".meshwright" not in str(path.relative_to(folder)) and path.is_file()
    ]
    wanted = [path for path in every if path.name.lower().endswith((*ENDINGS, SNAPSHOT))]
    recorded = {path.parent for path in every if path.name.endswith(RECORDS)}
    if recorded:
        from meshwright.traces.job.stragglers.operation_records import find_records
    return sorted([*wanted, *(path for parent in recorded for path in find_records(parent))], key=in_order)


def in_order(path: Path) -> list[tuple[int, int, str]]:
    """Return a sort key in human order: rank2 before rank10.

    >>> sorted([Path("rank10.json"), Path("rank2.json")], key=in_order)[0].name
    'rank2.json'
    """
    words = re.split(r"(\d+)", str(path))
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in words]


def one_per_rank(found: Iterable[RankFacts]) -> tuple[tuple[RankFacts, ...], tuple[Note, ...]]:
    """Return one file per rank, in order: of several the latest. Files without a rank are numbered through."""
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
                Note(f"left out: {first.path}: {last.path} is of rank {facts.rank} too; the later recording is taken")
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
