"""Write an estimate as an HTML page: the pipeline's timeline, the parts of the step, and the memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from meshwright.base.units import size
from meshwright.cost.chrome_trace import ACTIONS, NAMES
from meshwright.cost.estimate import CONVENTION, Estimate
from meshwright.plans import Pipeline
from meshwright.plans.picture import strategy_text
from meshwright.plans.stored_estimate import MEMORY_PARTS

# Actions of the schedule, distinct for colour-blind readers.
_COLOURS = {
    "F": "#3b6ea8", "B": "#c4622d", "I": "#d98f5f", "W": "#8e4585", "gradients": "#3a7d44", "optimizer": "#7d7a2c",
}  # fmt: skip
_TIME = {
    "forward compute": "#3b6ea8", "backward compute": "#c4622d", "recompute": "#a83b3b", "pipeline bubble": "#9aa3ad",
    "gradients": "#3a7d44", "optimizer": "#7d7a2c",
}  # fmt: skip
_OTHER = "#2a8b8b"
MOST_EVENTS = 60_000  # drawn on the page; of a longer timeline the middle is left out


def page(estimate: Estimate, notes: Sequence[str] = ()) -> str:
    """Return one self-contained HTML file that opens from the file system."""
    template = resources.files(__package__).joinpath("assets/estimate.html").read_text("utf-8")
    # "</" would end the script element early, wherever a name contains it.
    return template.replace("__DATA__", json.dumps(_data(estimate) | {"notes": list(notes)}).replace("</", "<\\/"))


def job_text(estimate: Estimate) -> str:
    """Return the priced job in one line."""
    job = estimate.job
    return f"{job.global_batch:,} samples of {job.seq_len:,} tokens, {job.precision}, {job.optimizer}"


def plan_text(estimate: Estimate) -> str:
    """Return the priced plan in one line: every pipeline, and the number of different strategies."""
    pipelines = estimate.plan.pipelines
    if len(pipelines) == 1:
        return _pipeline_text(pipelines[0])
    return " | ".join(f"{pipeline.batch:,} samples: {_pipeline_text(pipeline)}" for pipeline in pipelines)


def _pipeline_text(pipeline: Pipeline) -> str:
    groups = len(pipeline.stages) // pipeline.schedule.virtual
    strategies = list(dict.fromkeys(strategy_text(span) for stage in pipeline.stages for span in stage.spans))
    more = f" and {len(strategies) - 1} other way" + "s" * (len(strategies) > 2) if len(strategies) > 1 else ""
    words = [(strategies[0] or "one device") + more]
    if groups > 1:
        virtual = f", {pipeline.schedule.virtual} stages each" if pipeline.schedule.virtual > 1 else ""
        words.append(f"{groups} device groups{virtual}, {pipeline.schedule.name}")
    words.append(f"{pipeline.micro_batches} micro-batch" + ("es" if pipeline.micro_batches > 1 else ""))
    return "; ".join(words)


def _data(estimate: Estimate) -> dict[str, Any]:
    table = estimate.to_table()
    subtitle = f"{job_text(estimate)}; {plan_text(estimate)}; {estimate.runtime.title}"
    worst = max(estimate.memory, key=lambda row: row.total / row.capacity)
    return {
        "title": f"{table['model']} on {table['cluster']}",
        "subtitle": subtitle,
        "convention": CONVENTION,
        "step_seconds": estimate.step_seconds,
        "facts": [
            ["step", f"{estimate.step_seconds:.3g} s", False],
            ["tokens/s/device", f"{estimate.tokens_per_second_per_device:,.0f}", False],
            ["MFU", f"{estimate.mfu:.1%}", False],
            ["HFU", f"{estimate.hfu:.1%}", False],
            ["peak memory", f"{size(worst.total)} of {size(worst.capacity)}", not estimate.fits],
        ],
        "legend": [[ACTIONS[kind], _COLOURS[kind]] for kind in _kinds(estimate)]
        + [[NAMES[what], _COLOURS[what]] for what in ("gradients", "optimizer")],
        "colours": _COLOURS,
        "groups": _groups(estimate),
        "time": _time(estimate),
        "memory": [_memory(row) for row in estimate.memory],
        "memory_legend": [[name.replace("_", " "), colour] for name, _, colour in MEMORY_PARTS],
    }


def _kinds(estimate: Estimate) -> list[str]:
    return list(dict.fromkeys(event.kind for p in estimate.pipelines for event in p.timeline.events))


def _groups(estimate: Estimate) -> list[dict[str, Any]]:
    found, place = [], 0
    for pipeline in estimate.pipelines:
        events = pipeline.timeline.events
        each = max(MOST_EVENTS // max(pipeline.timeline.groups, 1), 2)
        for group in range(pipeline.timeline.groups):
            mine = [e for e in events if e.group == group]
            if len(mine) > each:
                mine = mine[: each // 2] + mine[-each // 2 :]
            drawn = [
                [e.kind, round(e.start, 9), round(e.end, 9), f"{ACTIONS[e.kind]} {e.micro_batch}, stage {e.stage}"]
                for e in mine
            ]
            now = pipeline.timeline.ends[group]
            for what, seconds in (("gradients", pipeline.exposed[group]), ("optimizer", pipeline.optimizer[group])):
                drawn.append([what, now, now + seconds, NAMES[what]])
                now += seconds
            found.append({"name": f"devices {estimate.memory[place].devices}", "events": drawn})
            place += 1
    return found


def _time(estimate: Estimate) -> list[dict[str, Any]]:
    rows = []
    for name, seconds in sorted(estimate.breakdown.items(), key=lambda item: -item[1]):
        label = f"{seconds:.3g} s  {seconds / estimate.step_seconds:.1%}"
        if under := estimate.hidden.get(name):
            label += f" (+ {under:.3g} s hidden)"
        shown = NAMES.get(name, name)
        rows.append({"name": shown, "parts": [[label, max(seconds, 0.0), _TIME.get(name, _OTHER)]], "label": label})
    return rows


def _memory(row: Any) -> dict[str, Any]:
    parts = [[f"{name}: {size(getattr(row, name))}", getattr(row, name), c] for name, _, c in MEMORY_PARTS]
    label = f"{size(row.total)} of {size(row.capacity)}"
    if row.short_by:
        label += f", short by {size(row.short_by)}"
    if row.host:
        label += f" + {size(row.host)} on the host"
    whole = max(row.capacity, row.total)
    return {"name": f"devices {row.devices}", "parts": parts, "label": label, "whole": whole, "bad": bool(row.short_by)}
