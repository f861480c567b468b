"""Traces of a job to an analysis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from meshwright.errors import InputError
from meshwright.observe.analysis import Analysis
from meshwright.observe.finding import VALID, Place, one_per_rank, sources
from meshwright.observe.gathering import Broken, Tell, gather
from meshwright.observe.job.across import across
from meshwright.observe.job.against_plan import compare
from meshwright.observe.job.critical import critical_paths
from meshwright.observe.job.records import read_records, study
from meshwright.observe.job.stragglers import stragglers
from meshwright.observe.rank.snapshot import read_snapshot
from meshwright.plan import Plan

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
    """What the traces of a job say: folders or files; by `workers` processes, or on the cluster of Ray at an address."""
    if workers is not None and workers < 1:
        raise InputError(f"is {workers}", field="workers", valid="a number of processes, 1 or more")
    given = sources(paths)
    found, broken = gather(given.traces, workers=workers, ray=ray, cache=cache, tell=tell)
    snapshots, not_read = _each(given.snapshots, lambda path: (str(path), read_snapshot(path)))
    records, not_studied = _each(given.records, lambda path: study(read_records(path)))
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
        promised=compare(ranks, plan, side_by_side) if plan else None,
        paths=critical_paths(ranks, side_by_side),
        snapshots=snapshots,
        records=records,
    )


def _each(files: Sequence[Path], read: Callable[[Path], T]) -> tuple[tuple[T, ...], list[Broken]]:
    """What was read, and what could not be."""
    found, broken = [], []
    for file in files:
        try:
            found.append(read(file))
        except InputError as error:
            error.file = ""
            broken.append(Broken(str(file), str(error)))
    return tuple(found), broken
