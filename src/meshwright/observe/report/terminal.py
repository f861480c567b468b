"""An analysis as text: what decides the step first, tables after it, and everything that was left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from meshwright.observe.analysis import Analysis
from meshwright.observe.job.steps import PARTS
from meshwright.observe.report.diagnosis import Shares, computing, diagnose, shares_of
from meshwright.observe.report.words import percent, ranks_text, seconds, short_name
from meshwright.units import size

if TYPE_CHECKING:
    from rich.table import Table

TITLES = {
    "compute": "compute", "transfer": "exposed transfer", "waiting": "waiting for ranks", "bubble": "pipeline bubble",
    "copies": "copies", "host_bound": "host-bound idle", "idle": "other idle",
}  # fmt: skip
ROWS = 10  # of a table: the whole is in --json, --html and --sql
WIDTH = 60  # characters of the bar


def head(found: Analysis) -> str:
    """What was read."""
    ranks = [facts.rank for facts in found.ranks if facts.rank is not None]
    names = list(dict.fromkeys(facts.device_name for facts in found.ranks if facts.device_name))
    events, text = sum(facts.events for facts in found.ranks), sum(facts.text_bytes for facts in found.ranks)
    steps = len(found.across.parts.numbers)
    told = [f"{ranks_text(ranks)}"]
    world = max((facts.world_size or 0 for facts in found.ranks), default=0)
    if world > len(ranks):
        told[0] += f" of {world}"
    told += [f"{steps} step{'s' * (steps != 1)}", *names[:3], f"{events:,} events", size(text)]
    return ", ".join(told)


def bar(shares: Shares) -> str:
    """The step as a line of letters, one for each part."""
    letters = dict(zip(PARTS, "CTWBMHI", strict=True))
    return "".join(letters[name] * round(shares.parts[name] * WIDTH) for name in PARTS)


def lines(found: Analysis) -> Iterator[str]:
    """Everything above the tables."""
    shares = shares_of(found)
    yield head(found)
    if not shares.step:
        yield "no work was recorded"
        return
    yield ""
    parts = [f"{TITLES[name]} {percent(shares.parts[name])}" for name in PARTS if shares.parts[name] >= 0.0005]
    what = "a step takes" if found.across.parts.numbers[0] >= 0 else "no steps were marked; the recording takes"
    yield f"{what} {seconds(shares.step)}: {', '.join(parts)}"
    yield f"[{bar(shares)}]"
    if shares.hidden >= 0.0005:
        yield f"communication hidden behind computing: {percent(shares.hidden)} of the step"
    if classes := computing(found):
        yield "computing is " + ", ".join(f"{name} {percent(share)}" for name, share in classes if share >= 0.01)
    yield ""
    findings = diagnose(found)
    for number, finding in enumerate(findings, 1):
        yield f"{number}. {percent(finding.share)} of the step {finding.what}."
        yield f"   -> {finding.advice}"
    if not findings:
        yield "Nothing but computing takes a noticeable part of the step."


def notes(found: Analysis) -> Iterator[str]:
    """What was left out, changed or assumed; equal notes of several ranks together."""
    for broken in found.broken:
        yield f"skipped {broken.path}: {broken.why}"
    for note in (*found.notes, *found.across.aligned.notes, *found.across.aligned.matched.notes):
        yield str(note)
    same: dict[str, list[int]] = defaultdict(list)
    for facts in found.ranks:
        for note in facts.notes:
            same[str(note)].append(facts.rank or 0)
        outside = sum(device.windows.outside for device in facts.devices)
        if outside:
            same["work outside of every marked step, in no step's time"].append(facts.rank or 0)
    for text, ranks in same.items():
        yield f"{ranks_text(ranks)}: {text}"


def collectives(found: Analysis) -> Table | None:
    """Collectives by group, kind and size."""
    rows = found.across.table
    if not rows:
        return None
    ranks = max(len(found.ranks), 1)
    table = _table(
        "Collectives (mean per rank)",
        ["group", "kind", "size of a call"],
        ["calls", "time", "waiting", "transfer", "exposed", "GB/s bus", "best"],
    )
    for row in rows[:ROWS]:
        sizes = "?" if row.at_least is None else f"< {size(row.below)}" if row.below else f">= {size(row.at_least)}"
        split = [seconds(row.waiting / ranks), seconds(row.transfer / ranks)] if row.partial < row.calls else ["?", "?"]
        exposed = seconds((row.exposed_waiting + row.exposed_transfer) / ranks)
        speeds = [f"{value:.3g}" if value else "?" for value in (row.busbw, row.best_busbw)]
        table.add_row(
            row.group, row.kind, sizes, f"{row.calls:,}", seconds(row.total / ranks), *split, exposed, *speeds
        )
    return table


def kernels(found: Analysis) -> Table | None:
    """The kernels that take longest, over all ranks."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for facts in found.ranks:
        for kernel in facts.kernels:
            mine = sums[kernel.name]
            mine[0] += kernel.count
            mine[1] += kernel.total
            mine[2] = max(mine[2], kernel.p99)
    if not sums:
        return None
    whole = sum(total for _, total, _ in sums.values())
    table = _table("Kernels (all ranks)", ["kernel"], ["count", "total", "share", "mean", "p99"])
    for name, (count, total, p99) in sorted(sums.items(), key=lambda item: -item[1][1])[:ROWS]:
        cells = [f"{int(count):,}", seconds(total), percent(total / whole), seconds(total / count), seconds(p99)]
        table.add_row(short_name(name), *cells)
    return table


def by_rank(found: Analysis) -> Table | None:
    """Ranks, those with the longest steps first where there are many."""
    parts = found.across.parts
    if len(found.ranks) < 2:
        return None
    means = parts.length.sum(axis=1) / parts.present.sum(axis=1).clip(1)
    order = sorted(range(len(found.ranks)), key=lambda place: -means[place])
    chosen = sorted(order[:ROWS]) if len(order) > ROWS else range(len(order))
    title = f"Ranks ({ROWS} with the longest steps of {len(order)})" if len(order) > ROWS else "Ranks"
    table = _table(title, ["rank", "host"], ["step", *(TITLES[name] for name in PARTS)])
    for place in chosen:
        whole = max(int(parts.length[place].sum()), 1)
        cells = [percent(int(getattr(parts, name)[place].sum()) / whole) for name in PARTS]
        table.add_row(str(found.ranks[place].rank), found.ranks[place].host[:24] or "?", seconds(means[place]), *cells)
    return table


def tables(found: Analysis) -> list[Table]:
    return [table for table in (by_rank(found), collectives(found), kernels(found)) if table is not None]


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for word in words:
        table.add_column(word, overflow="fold")
    for word in numbers:
        table.add_column(word, justify="right")
    return table
