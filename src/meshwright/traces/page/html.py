"""An analysis as a self-contained HTML page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from meshwright.traces.analysis import Analysis
from meshwright.traces.page.document import document
from meshwright.traces.page.tables import TITLES, memory, modules, promised, shapes, stretches
from meshwright.traces.page.terminal import critical_lines, promised_lines
from meshwright.traces.page.timeline import WAITING, timeline
from meshwright.traces.page.window import ahead, interesting
from meshwright.traces.page.words import short_name
from meshwright.traces.rank.collectives import KINDS
from meshwright.traces.rank.kernel_classes import CLASSES
from meshwright.traces.reading import Trace, read_trace
from meshwright.traces.reading.cache.cache import read_cached

# Distinct for colour-blind readers; letters and labels say the same.
PART_COLOURS = {
    "compute": "#3b6ea8", "transfer": "#c4622d", "waiting": "#e0a458", "bubble": "#8e4585", "copies": "#7d7a2c",
    "host_bound": "#9aa3ad", "idle": "#c9cfd6",
}  # fmt: skip
KIND_COLOURS = (
    "#3b6ea8", "#2a8b8b", "#1f4e79", "#7d7a2c", "#5b8fc9", "#74a9cf", "#4d7c8a", "#6a8caf", "#a6bddb", "#87b5d6", "#8899aa",
)  # fmt: skip
MOST_STEPS, MOST_RANKS, MOST_ROWS = 200, 256, 50


def page(found: Analysis, *, cache: bool = True) -> str:
    """Return HTML with the diagnosis, ranks, steps, timeline and tables."""
    template = resources.files(__package__).joinpath("assets/analysis.html").read_text("utf-8")
    # "</" would end the script element early, wherever a name contains it.
    return template.replace("__DATA__", json.dumps(_data(found, cache), allow_nan=False).replace("</", "<\\/"))


def _data(found: Analysis, cache: bool) -> dict[str, Any]:
    told = document(found)
    window = interesting(found)
    rows: list[dict[str, Any]] = []
    if window:
        moved = {rank: ahead(found, place) for place, rank in enumerate(found.across.ranks)}
        rows = timeline(read_ranks(found, window.ranks, cache), found.across, window, moved)
    tables = (*promised(found), shapes(found), modules(found), stretches(found), memory(found))
    kernels = dict(zip(CLASSES, KIND_COLOURS, strict=True)) | {"copies": PART_COLOURS["copies"]}
    words = [kind.replace("_", "-") for kind in KINDS]
    exchange = {WAITING: PART_COLOURS["waiting"]} | dict.fromkeys(words, PART_COLOURS["transfer"])
    return {
        "title": told["title"],
        "step": told["step"],
        "shares": [[TITLES[name], share, PART_COLOURS[name]] for name, share in told["shares"].items()],
        "hidden": told["hidden"],
        "computing": list(told["computing"].items()),
        "findings": told["findings"],
        "steps": told["steps"][:MOST_STEPS],
        "ranks": [_rank(one) for one in told["ranks"][:MOST_RANKS]],
        "more_ranks": max(len(told["ranks"]) - MOST_RANKS, 0),
        "part_colours": [[TITLES[name], colour] for name, colour in PART_COLOURS.items()],
        "window": window.why if window else "",
        "span": (window.end - window.start) / 1e9 if window else 0,
        "timeline": rows,
        "colours": exchange | kernels,
        "collectives": told["collectives"],
        "critical": list(critical_lines(found)),
        "kernels": _together(told["ranks"], "kernels"),
        "operators": _together(told["ranks"], "operators"),
        "promised": list(promised_lines(found)),
        "grids": [vars(grid) for grid in tables if grid],
        "notes": told["notes"],
    }


def read_ranks(found: Analysis, ranks: Sequence[int], cache: bool) -> list[tuple[int, Trace]]:
    """Read the traces of some ranks again."""
    by_rank = {facts.rank: facts for facts in found.ranks}
    return [(rank, (read_cached if cache else read_trace)(by_rank[rank].path)) for rank in ranks]


def _rank(told: dict[str, Any]) -> dict[str, Any]:
    steps = told["steps"]
    whole = max(sum(steps["length"]), 1)
    present = max(sum(length > 0 for length in steps["length"]), 1)
    parts = [[TITLES[name], sum(steps[name]) / whole, PART_COLOURS[name]] for name in PART_COLOURS]
    return {
        "rank": told["rank"], "host": told["host"], "step": whole / present, "parts": parts,
        "lengths": steps["length"][:MOST_STEPS],
    }  # fmt: skip


def _together(ranks: list[dict[str, Any]], table: str) -> list[list[Any]]:
    """Return rows of all ranks by name: name, count, total, largest p99; the largest total first."""
    sums: dict[str, list[Any]] = {}
    for told in ranks:
        for row in told[table]:
            mine = sums.setdefault(row["name"], [short_name(row["name"], 90), 0, 0, 0.0])
            mine[1] += row["count"]
            mine[2] += row["total"]
            mine[3] = max(mine[3], row["p99"])
    whole = max(sum(row[2] for row in sums.values()), 1)
    return [[*row, row[2] / whole] for row in sorted(sums.values(), key=lambda row: -row[2])[:MOST_ROWS]]
