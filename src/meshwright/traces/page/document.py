"""An analysis as one document of plain values, for --json and the page. Times are nanoseconds."""

from __future__ import annotations

from typing import Any

from meshwright.traces.analysis import Analysis
from meshwright.traces.job.steps import PARTS
from meshwright.traces.page.diagnosis import computing, diagnose, shares_of
from meshwright.traces.page.plain import plain
from meshwright.traces.page.terminal import head, notes
from meshwright.traces.rank.facts import RankFacts
from meshwright.traces.rank.operators.operators import Shaped

MOST = 100  # rows of each table of a rank


def document(found: Analysis) -> dict[str, Any]:
    """Return the document of an analysis.

    >>> import meshwright as mw
    >>> sorted(document(mw.analyze("tests/data/traces/param/dlrm_8rank", cache=False)))[:4]
    ['clocks', 'collectives', 'computing', 'critical_paths']
    """
    shares = shares_of(found)
    across = found.across
    return {
        "title": head(found),
        "step": shares.step,
        "shares": shares.parts,
        "hidden": shares.hidden,
        "computing": dict(computing(found)),
        "findings": plain(diagnose(found)),
        "steps": [int(number) for number in across.parts.numbers],
        "ranks": [_rank(found, place, facts) for place, facts in enumerate(found.ranks)],
        "collectives": plain(across.table),
        "clocks": {"ahead_ns": plain(across.clocks.offset), "drift": plain(across.clocks.drift)},
        "stragglers": plain(found.stragglers),
        "critical_paths": [plain(path) | {"segments": plain(path.segments[:MOST])} for path in found.paths[:MOST]],
        "plan": plain(found.promised),
        "records": plain(found.records),
        "snapshots": plain(found.snapshots),
        "stages": list(across.pipeline.stage),
        "skipped": plain(found.broken),
        "notes": list(notes(found)),
    }


def _rank(found: Analysis, place: int, facts: RankFacts) -> dict[str, Any]:
    parts = found.across.parts
    return {
        "rank": facts.rank,
        "file": facts.path,
        "host": facts.host,
        "device": facts.device_name,
        "events": facts.events,
        "steps": {
            "length": plain(parts.length[place]),
            **{name: plain(getattr(parts, name)[place]) for name in (*PARTS, "hidden")},
        },
        "kernels": plain(facts.kernels[:MOST]),
        "operators": plain(facts.operators[:MOST]),
        "costs": {
            "flops": facts.costs.flops,
            "device": facts.costs.device,
            "operators": plain(facts.costs.table[:MOST]),
            "shapes": [_shaped(row) for row in facts.costs.shaped[:MOST]],
        },
        "modules": plain(facts.modules),
        "memory": plain(facts.memory),
        "launches": plain(facts.devices[0].launches) if facts.devices else None,
    }


def _shaped(row: Shaped) -> dict[str, Any]:
    rates = {"flops_per_second": row.flops_per_second, "bytes_per_second": row.bytes_per_second}
    return {**plain(row), **rates}
