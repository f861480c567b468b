"""Changes between two runs in words: the step first, then their causes, largest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.base.units import size
from meshwright.traces.job.difference import Change, Difference
from meshwright.traces.page.words import percent, seconds, short_name

ROWS = 10
PARTS = {"exposed": "exposed communication", "waiting": "other idle", "host_bound": "host-bound idle"}


def changes(found: Difference) -> Iterator[str]:
    """Yield the changes as lines of text.

    >>> from meshwright.traces.job.difference import difference
    >>> import meshwright as mw
    >>> run = mw.analyze("tests/data/traces/hta/a100_ddp_resnet_2rank_rank0.json.gz", cache=False)
    >>> print(*changes(difference(run.ranks, run.ranks)), sep="\\n")
    a step takes 220 ms, before 220 ms: no change beyond what steps differ by (3 and 3 steps of 1 and 1 ranks)
    """
    before, after = found.step.before, found.step.after
    if not before or not after:
        yield f"the run {'before' if not before else 'after'} has no steps and no work: there is nothing to compare"
        return
    told = f"({found.steps[0]} and {found.steps[1]} steps of {found.ranks[0]} and {found.ranks[1]} ranks)"
    moved = abs(found.step.change) > found.step.noise and before > 0
    verdict = "no change beyond what steps differ by"
    if moved:
        verdict = f"{percent(abs(found.step.change) / before)} {'slower' if found.step.change > 0 else 'faster'}"
    yield f"a step takes {seconds(after)}, before {seconds(before)}: {verdict} {told}"
    for title, rows in (
        ("parts of the step", found.parts),
        ("collectives", found.collectives),
        ("computing by class", found.classes),
        ("kernels", found.kernels),
        ("operators on the host", found.operators),
        ("memory", found.memory),
    ):
        yield from _table(title, rows)


def _table(title: str, rows: Sequence[Change]) -> Iterator[str]:
    if rows:
        yield f"{title}:"
    for row in rows[:ROWS]:
        show = size if row.what == "memory" else seconds
        counts = ""
        if row.count_before != row.count_after:
            counts = f", {row.count_before:.4g} -> {row.count_after:.4g} per step"
        sign = "+" if row.change > 0 else "-"
        both = f"({show(row.before)} -> {show(row.after)}{counts})"
        name = PARTS.get(row.name, row.name) if row.what == "part" else short_name(row.name)
        yield f"  {sign}{show(abs(row.change)):>10}  {row.verdict:6}  {name} {both}"
