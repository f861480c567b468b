"""Traces of a job to an analysis."""

from __future__ import annotations

import os
from collections.abc import Sequence

from meshwright.errors import InputError
from meshwright.observe.analysis import Analysis
from meshwright.observe.finding import VALID, one_per_rank, trace_files
from meshwright.observe.gathering import Tell, gather
from meshwright.observe.job.across import across
from meshwright.observe.job.critical import critical_paths
from meshwright.observe.job.stragglers import stragglers
from meshwright.plan import Plan

Place = str | os.PathLike[str]


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
    found, broken = gather(trace_files(paths), workers=workers, ray=ray, cache=cache, tell=tell)
    if not found:
        first = broken[0]
        more = f" (and {len(broken) - 1} more files like it)" if len(broken) > 1 else ""
        raise InputError(f"{first.why}{more}", file=first.path, valid="" if "(valid:" in first.why else VALID)
    ranks, notes = one_per_rank(found)
    side_by_side = across(ranks)
    return Analysis(
        ranks=ranks,
        broken=tuple(broken),
        notes=notes,
        plan=plan,
        across=side_by_side,
        stragglers=stragglers(ranks, side_by_side),
        paths=critical_paths(ranks, side_by_side),
    )
