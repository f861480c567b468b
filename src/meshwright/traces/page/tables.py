"""Tables of a report as text, for terminals and pages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.base.units import size
from meshwright.traces.analysis import Analysis
from meshwright.traces.job.steps import PARTS
from meshwright.traces.page.words import percent, printable, ranks_text, seconds, short_name

TITLES = {
    "compute": "compute", "transfer": "exposed transfer", "waiting": "waiting for ranks", "bubble": "pipeline bubble",
    "copies": "copies", "host_bound": "host-bound idle", "idle": "other idle",
}  # fmt: skip
ROWS = 10  # of a table: --json, --html and --sql have all


@dataclass(frozen=True)
class Grid:
    """Table whose first columns hold text, the others numbers."""

    title: str
    words: tuple[str, ...]
    numbers: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    @staticmethod
    def of(title: str, words: Sequence[str], numbers: Sequence[str]) -> Grid:
        return Grid(title, tuple(words), tuple(numbers))

    def add_row(self, *cells: str) -> None:
        self.rows.append(tuple(map(printable, cells)))


def collectives(found: Analysis) -> Grid | None:
    """Return the table of collectives by group, kind and size."""
    rows = found.across.table
    if not rows:
        return None
    ranks = max(len(found.ranks), 1)
    table = Grid.of(
        "Collectives (mean per rank)",
        ["group", "kind", "size of a call"],
        ["calls", "time", "waiting", "transfer", "exposed", "GB/s bus", "best"],
    )
    for row in rows[:ROWS]:
        sizes = "?" if row.at_least is None else f"< {size(row.below)}" if row.below else f">= {size(row.at_least)}"
        split = [seconds(row.waiting / ranks), seconds(row.transfer / ranks)] if row.partial < row.calls else ["?", "?"]
        exposed = seconds((row.exposed_waiting + row.exposed_transfer + row.exposed_bubble) / ranks)
        speeds = [f"{value:.3g}" if value and value >= 0.01 else "?" for value in (row.busbw, row.best_busbw)]
        table.add_row(
            row.group, row.kind, sizes, f"{row.calls:,}", seconds(row.total / ranks), *split, exposed, *speeds
        )
    return table


def kernels(found: Analysis) -> Grid | None:
    """Return the table of the longest kernels, over all ranks."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for facts in found.ranks:
        for kernel in facts.kernels:
            mine = sums[kernel.name]
            mine[0] += kernel.count
            mine[1] += kernel.total
            mine[2] = max(mine[2], kernel.p99)
    if not sums:
        return None
    whole = max(sum(total for _, total, _ in sums.values()), 1)
    table = Grid.of("Kernels (all ranks)", ["kernel"], ["count", "total", "share", "mean", "p99"])
    for name, (count, total, p99) in sorted(sums.items(), key=lambda item: -item[1][1])[:ROWS]:
        cells = [f"{int(count):,}", seconds(total), percent(total / whole), seconds(total / count), seconds(p99)]
        table.add_row(short_name(name), *cells)
    return table


def by_rank(found: Analysis) -> Grid | None:
    """Return the table of ranks, those with the longest steps first if there are many."""
    parts = found.across.parts
    if len(found.ranks) < 2:
        return None
    means = parts.length.sum(axis=1) / parts.present.sum(axis=1).clip(1)
    order = sorted(range(len(found.ranks)), key=lambda place: -means[place])
    chosen = sorted(order[:ROWS]) if len(order) > ROWS else range(len(order))
    title = f"Ranks ({ROWS} with the longest steps of {len(order)})" if len(order) > ROWS else "Ranks"
    table = Grid.of(title, ["rank", "host"], ["step", *(TITLES[name] for name in PARTS)])
    for place in chosen:
        whole = max(int(parts.length[place].sum()), 1)
        cells = [percent(int(getattr(parts, name)[place].sum()) / whole) for name in PARTS]
        table.add_row(str(found.ranks[place].rank), found.ranks[place].host[:24] or "?", seconds(means[place]), *cells)
    return table


def shapes(found: Analysis) -> Grid | None:
    """Return the table of rates of operators with known shapes, on the first rank that has them."""
    facts = next((facts for facts in found.ranks if any(row.cost.flops for row in facts.costs.shaped)), None)
    if facts is None:
        return None
    table = Grid.of(
        f"Operators by shape (rank {facts.rank}{', ' + facts.costs.device if facts.costs.device else ''})",
        ["operator", "shapes"],
        ["calls", "time", "GFLOP/s", "GB/s", "of the best possible"],
    )
    for row in facts.costs.shaped[:ROWS]:
        best = f"{percent(row.share)} ({row.bound})" if row.share else "?"
        rates = [f"{row.flops_per_second / 1e9:,.0f}", f"{row.bytes_per_second / 1e9:.3g}"]
        table.add_row(row.name, row.dims[:60], f"{row.count:,}", seconds(row.time), *rates, best)
    return table


def modules(found: Analysis) -> Grid | None:
    """Return the table of device time by model part, on the first rank that has it."""
    facts = next((facts for facts in found.ranks if facts.modules.kinds), None)
    if facts is None:
        return None
    table = Grid.of(
        f"Parts of the model (rank {facts.rank}, by {facts.modules.source})",
        ["part"],
        ["calls", "forward", "backward", "share"],
    )
    for part in facts.modules.kinds[:ROWS]:
        name = "  " * (len(part.path) - 1) + part.path[-1]
        table.add_row(name, f"{part.calls:,}", seconds(part.forward), seconds(part.backward), percent(part.share))
    return table


def stretches(found: Analysis) -> Grid | None:
    """Return the table of the longest waits for the host, on the rank that waits most."""
    ranks = [facts for facts in found.ranks if facts.devices and facts.devices[0].device != "host"]
    if not ranks:
        return None
    facts = max(ranks, key=lambda facts: facts.devices[0].launches.idle)
    device = facts.devices[0]
    begun = int(device.windows.edges[0]) + facts.base_ns
    longest = sorted(device.launches.stretches, key=lambda stretch: -stretch.idle)[:5]
    if not longest:
        return None
    table = Grid.of(
        f"Launch-bound stretches (rank {facts.rank})", ["why"], ["from", "length", "idle", "kernels", "median kernel"]
    )
    for one in longest:
        filled = ", ".join(short_name(name, 30) for name, _ in one.filled_by[:3])
        why = f"slow issuing: {filled or 'no operator'}"
        if 2 * one.synchronised > one.idle:
            why = f"waits for the device in {one.waits_in}"
        share = percent(one.idle / max(one.end - one.start, 1))
        length, median = seconds(one.end - one.start), seconds(one.median)
        table.add_row(why, seconds(one.start - begun), length, share, f"{one.kernels:,}", median)
    return table


def memory(found: Analysis) -> Grid | None:
    """Return the table of memory holders at the highest peak of any rank."""
    told = [(facts, facts.memory) for facts in found.ranks if facts.memory]
    if not told:
        return None
    facts, held = max(told, key=lambda pair: pair[1].allocated)
    if not held.holders:
        return None
    before = f", {size(held.before)} of it from before the recording" if held.before > 0 else ""
    table = Grid.of(
        f"Memory (rank {facts.rank}, at most {size(held.allocated)} in use{before})",
        ["allocated by", "part of the model"],
        ["bytes", "blocks"],
    )
    for holder in held.holders[:ROWS]:
        table.add_row(holder.operator or "?", holder.part or "?", size(holder.bytes), f"{holder.blocks:,}")
    return table


def promised(found: Analysis) -> list[Grid]:
    """Return tables of the plan's prediction beside measurements: parts and classes, a column per side and group."""
    made = []
    for group in found.promised.groups if found.promised else ():
        title = f"Predicted and measured: group {group.group} of pipeline {group.pipeline} ({ranks_text(group.ranks)})"
        table = Grid.of(title, ["part of the step"], ["predicted", "measured", "measured / predicted"])
        pairs = [*((one.name, one) for one in group.parts), *((f"  {one.name}", one) for one in group.classes)]
        for name, pair in pairs:
            ratio = f"{pair.ratio:.2f}" if pair.ratio else "?"
            table.add_row(name, seconds(1e9 * pair.predicted), seconds(1e9 * pair.measured), ratio)
        if group.memory:
            both = size(group.memory.predicted), size(group.memory.measured)
            table.add_row("memory", *both, f"{group.memory.ratio:.2f}")
        made.append(table)
    return made[:ROWS]


def grids(found: Analysis) -> list[Grid]:
    every = (
        by_rank(found),
        collectives(found),
        kernels(found),
        shapes(found),
        modules(found),
        stretches(found),
        memory(found),
    )
    return [*promised(found), *(table for table in every if table is not None)]
