"""Analyse the traces of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from meshwright.errors import InputError
from meshwright.traces import calm_numpy  # noqa: F401 (before what imports numpy)
from meshwright.traces.analysis import Analysis
from meshwright.traces.find_traces import VALID, Place, one_per_rank, sources
from meshwright.traces.gather_ranks import Broken, Tell, gather
from meshwright.traces.job.across import Across, across
from meshwright.traces.job.critical_path import critical_paths
from meshwright.traces.job.stragglers.stragglers import stragglers

if TYPE_CHECKING:
    from meshwright.plans import Plan
    from meshwright.traces.job.plan.against_plan import Against
    from meshwright.traces.job.stragglers.operation_records import RecordedJob
    from meshwright.traces.rank.facts import RankFacts
    from meshwright.traces.rank.memory.snapshot import Snapshot

T = TypeVar("T")


def analyze(
    paths: Place | Sequence[Place],
    *,
    plan: Plan | None = None,
    workers: int | None = None,
    ray: str | None = None,
    cache: bool = True,
    tell: Tell = lambda done, of: None,
) -> Analysis:
    """Analyse the traces in folders or files, with `workers` processes or on the Ray cluster at an address."""
    if workers is not None and workers < 1:
        raise InputError(f"is {workers}", field="workers", valid="a number of processes, 1 or more")
    given = sources(paths)
    found, broken = gather(given.traces, workers=workers, ray=ray, cache=cache, tell=tell)
    snapshots, not_read = _each(given.snapshots, _snapshot)
    records, not_studied = _each(given.records, _recorded)
    broken += not_read + not_studied
    if not (found or snapshots or records):
        first = broken[0]
        more = f" (and {len(broken) - 1} more files like it)" if len(broken) > 1 else ""
        raise InputError(f"{first.why}{more}", file=first.path, valid="" if "(valid:" in first.why else VALID)
    ranks, notes = one_per_rank(found)
    side_by_side = across(ranks)
    return Analysis(
        ranks=ranks,
        broken=tuple(broken),
        notes=notes,
        across=side_by_side,
        stragglers=stragglers(ranks, side_by_side),
        promised=_promised(ranks, plan, side_by_side) if plan else None,
        paths=critical_paths(ranks, side_by_side),
        snapshots=snapshots,
        records=records,
    )


# Rarely used modules are imported on demand: a question about one trace takes less than a second.


def _snapshot(path: Path) -> tuple[str, tuple[Snapshot, ...]]:
    from meshwright.traces.rank.memory.snapshot import read_snapshot

    return str(path), read_snapshot(path)


def _recorded(path: Path) -> RecordedJob:
    from meshwright.traces.job.stragglers.operation_records import read_records, study

    return study(read_records(path))


def _promised(ranks: tuple[RankFacts, ...], plan: Plan, side_by_side: Across) -> Against:
    from meshwright.traces.job.plan.against_plan import compare

    return compare(ranks, plan, side_by_side)


def _each(files: Sequence[Path], read: Callable[[Path], T]) -> tuple[tuple[T, ...], list[Broken]]:
    """Read every file; return the results, and the files that could not be read."""
    found, broken = [], []
    for file in files:
        try:
            found.append(read(file))
        except InputError as error:
            error.file = ""
            broken.append(Broken(str(file), str(error)))
    return tuple(found), broken
