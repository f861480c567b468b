"""An analysis as text: the diagnosis first, then tables, then everything that was left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.base.units import size
from meshwright.traces.analysis import Analysis
from meshwright.traces.job.steps import PARTS
from meshwright.traces.page.diagnosis import Shares, computing, diagnose, shares_of
from meshwright.traces.page.tables import TITLES, Grid
from meshwright.traces.page.words import percent, ranks_text, seconds
from meshwright.traces.rank.device_activity import HOST

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 60  # characters of the bar
KNOWN = 0.2  # share of computing: with FLOPs for less, a rate would mislead


def head(found: Analysis) -> str:
    """Return a line on what was read."""
    ranks = [facts.rank for facts in found.ranks if facts.rank is not None]
    if not ranks:
        return ", ".join(f"job {job.name}" for job in found.records) or "snapshots of memory"
    names = list(dict.fromkeys(facts.device_name for facts in found.ranks if facts.device_name))
    events, text = sum(facts.events for facts in found.ranks), sum(facts.text_bytes for facts in found.ranks)
    steps = len(found.across.parts.numbers)
    told = [f"{ranks_text(ranks)}"]
    world = max((facts.world_size or 0 for facts in found.ranks), default=0)
    if world > len(ranks):
        told[0] += f" of {world}"
    told += [f"{steps} step{'s' * (steps != 1)}", *names[:3], f"{events:,} event{'s' * (events != 1)}", size(text)]
    return ", ".join(told)


def bar(shares: Shares) -> str:
    """Return the step as a bar of letters, one letter for each part."""
    letters = dict(zip(PARTS, "CTWBMHI", strict=True))
    return "".join(letters[name] * round(shares.parts[name] * WIDTH) for name in PARTS)


def lines(found: Analysis) -> Iterator[str]:
    """Yield everything above the tables."""
    shares = shares_of(found)
    yield from _records(found)
    yield from _snapshots(found)
    if not found.ranks:
        return
    yield head(found)
    if not shares.step:
        yield "no work was recorded"
        return
    yield ""
    parts = [f"{TITLES[name]} {percent(shares.parts[name])}" for name in PARTS if shares.parts[name] >= 0.0005]
    what = (
        "a step takes, on average,"
        if found.across.parts.numbers[0] >= 0
        else "no steps were marked; the recording takes"
    )
    yield f"{what} {seconds(shares.step)}: {', '.join(parts)}"
    yield f"[{bar(shares)}]"
    if shares.hidden >= 0.0005:
        yield f"communication hidden behind computing: {percent(shares.hidden)} of the step"
    if classes := computing(found):
        yield "computing is " + ", ".join(f"{name} {percent(share)}" for name, share in classes if share >= 0.01)
    yield from _achieved(found)
    yield from _memory(found)
    yield from critical_lines(found)
    yield ""
    findings = diagnose(found)
    for number, finding in enumerate(findings, 1):
        yield f"{number}. {finding.what}"
        yield f"   -> {finding.advice}"
    promised = list(promised_lines(found))
    if promised:
        yield ""
    yield from promised
    if not findings:
        yield "Nothing but computing takes a noticeable part of the step."


def _clocks(found: Analysis) -> Iterator[str]:
    moved = [rank for rank, offset in zip(found.across.ranks, found.across.clocks.offset, strict=True) if offset]
    if moved:
        most = int(abs(found.across.clocks.offset).max())
        yield f"clocks of {ranks_text(moved)} were moved, by {seconds(most)} at most: collectives end together"
    sizes = {facts.world_size for facts in found.ranks if facts.world_size}
    if len(sizes) > 1:
        yield f"files tell of jobs of {' and '.join(map(str, sorted(sizes)))} ranks: are they of one job?"


def promised_lines(found: Analysis) -> Iterator[str]:
    """Yield lines with the plan's step beside the measured one, and suggestions."""
    if found.promised is None or not found.promised.groups:
        return  # the notes give the reason
    step = found.promised.step
    both = f"{seconds(1e9 * step.predicted)}; measured {seconds(1e9 * step.measured)}"
    yield f"the plan promised a step of {both} in the median ({step.ratio:.2f}x)"
    for text in found.promised.suggestions:
        yield f"   -> {text}"


def _records(found: Analysis) -> Iterator[str]:
    """Yield lines on jobs recorded as operations: their slow-down and its causes."""
    for job in found.records:
        yield f"job {job.name}: {job.workers} workers, {job.steps} steps of {job.measured:.3g} s"
        if job.cause == "worker":
            named = f"{ranks_text(job.ranks)} {'is' if len(job.ranks) == 1 else 'are'} slow"
            yield f"   {named}: it explains {percent(min(job.by_slowest, 1.0))} of a slow-down of {job.slowdown:.2f}x"
        elif job.cause == "stage":
            share = percent(min(job.by_last_stage, 1.0))  # without it other steps shrink as well: it may exceed 100 %
            shares = f"{share} of a slow-down of {job.slowdown:.2f}x goes with the last stage"
            yield f"   stage {job.stage} ({ranks_text(job.ranks)}) has more work than the others: {shares}"
        else:
            yield f"   no worker or stage stands out: a step is {job.slowdown:.2f}x what it would be if all were alike"
        worst = ", ".join(f"{kind} {slow:.2f}x" for kind, slow in job.by_kind[:3])
        yield f"   a step would take {job.ideal:.3g} s if all were alike; slow-down by operation: {worst}"


def _snapshots(found: Analysis) -> Iterator[str]:
    for path, devices in found.snapshots:
        for one in devices:
            yield f"{path}: device {one.device}, at most {size(one.peak)} in use of {size(one.reserved)} reserved; held by"
            yield from (f"   {size(held):>10}  {blocks:6,} blocks  {line}" for line, held, blocks in one.holders[:8])


def _achieved(found: Analysis) -> Iterator[str]:
    """Yield FLOP/s over steps, if shapes determine FLOPs; model FLOPs are those of all operators, recompute included."""
    flops = sum(facts.costs.flops for facts in found.ranks)
    whole = int(found.across.parts.length.sum())
    busy = sum(facts.costs.flops_time for facts in found.ranks)
    if flops and whole and busy > KNOWN * int(found.across.parts.compute.sum()):
        both = [
            f"{rate / 1e3:.3g} TFLOP/s" if rate >= 1e3 else f"{rate:.3g} GFLOP/s"
            for rate in (flops / whole, flops / max(busy, 1))
        ]
        yield f"operators of known shape do {both[0]} per rank, {both[1]} while they run"


def _memory(found: Analysis) -> Iterator[str]:
    told = [(facts.memory, facts.peak, facts.rank) for facts in found.ranks if facts.memory and facts.peak]
    if told:
        held, peak, rank = max(told, key=lambda one: one[0].allocated)
        reserved = f", {size(peak.reserved)} reserved," if peak.reserved >= 0 else ""
        yield f"memory: at most {size(held.allocated)} in use{reserved} within the recording (rank {rank})"


def critical_lines(found: Analysis) -> Iterator[str]:
    """Yield the longest step's critical path in words."""
    if len(found.ranks) < 2 or not found.paths:
        return
    path = max(found.paths, key=lambda path: path.length)
    ranks = [f"rank {rank} {percent(time / path.length)}" for rank, time in path.by_rank[:3]]
    what = [f"{name} {percent(time / path.length)}" for name, time in path.by_what[:4]]
    step = f"of step {path.step}" if path.step >= 0 else "of the recording"
    yield f"the critical path {step} runs through {', '.join(ranks)}; it is {', '.join(what)}"


def notes(found: Analysis) -> Iterator[str]:
    """Yield what was left out, changed or assumed; equal notes of several ranks together."""
    for broken in found.broken:
        yield f"skipped {broken.path}: {broken.why}"
    yield from found.promised.notes if found.promised else ()
    yield from dict.fromkeys(map(str, (*found.notes, *found.across.aligned.notes, *found.across.aligned.matched.notes)))
    yield from _clocks(found)
    same: dict[str, list[int]] = defaultdict(list)
    for facts in found.ranks:
        for note in facts.notes:
            same[str(note)].append(facts.rank or 0)
        if outside := sum(device.windows.outside for device in facts.devices):
            what = "operators ran" if facts.devices[0].device == HOST else "kernels and copies were launched"
            same[f"{outside:,} {what} outside of every marked step"].append(facts.rank or 0)
        if len(facts.devices) > 1:
            same[f"{len(facts.devices)} devices; the busiest is told, --sql has the events of all"].append(
                facts.rank or 0
            )
    for text, ranks in same.items():
        yield f"{ranks_text(ranks)}: {text}"


def table(grid: Grid) -> Table:
    """Return a table for rich."""
    from rich.table import Table

    made = Table(title=grid.title, title_justify="left", box=None, pad_edge=False)
    for word in grid.words:
        made.add_column(word, overflow="fold")
    for word in grid.numbers:
        made.add_column(word, justify="right")
    for row in grid.rows:
        made.add_row(*row)
    return made
