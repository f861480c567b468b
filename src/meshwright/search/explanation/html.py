"""HTML pages of a plan and of a sweep; both are self-contained and open from the file system.

The report is the estimate's page (timeline, parts of the step, memory) with the results of the search.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from importlib import resources
from typing import Any

from meshwright.base.units import GIB, size
from meshwright.cost.estimate import Estimate, estimate
from meshwright.cost.page import page, plan_text
from meshwright.plans import Plan, Span, group_of_stage
from meshwright.plans.picture import strategy_text
from meshwright.plans.spans import layer_range
from meshwright.plans.stored_estimate import MEMORY_PARTS
from meshwright.search.explanation.explain import Explanation
from meshwright.search.explanation.features import groups_of, spans_of
from meshwright.search.explanation.runners_up import RunnerUp
from meshwright.search.explanation.sweep import Point
from meshwright.search.planner import Answer

_COLOURS = [colour for _, _, colour in MEMORY_PARTS]  # distinct for colour-blind readers; letters carry the same
_TIMELINE = "<h2>One step, device group by device group"  # in the estimate's page: new parts go before it
_END = '<p class="dim" id="convention">'  # and after everything else
_RUNNER_TITLES = ("kind", "step", "slower", "memory", "loses on", "plan")


def report(
    answer: Answer, explanation: Explanation | None, runners: Sequence[RunnerUp], proof: str, notes: Sequence[str] = ()
) -> str:
    """Return the HTML of a plan from a search; its explanation is left out if the search was stopped."""
    above, below = _asset("plan.html").split("<!-- below -->")
    data = _data(answer, explanation, runners) | {"proof": proof}
    text = page(answer.estimate, notes).replace("<title>meshwright estimate", "<title>meshwright plan", 1)
    for mark, more in ((_TIMELINE, above), (_END, _filled(below, data))):
        before, found, after = text.partition(mark)
        if not found:
            raise AssertionError(f"the page of an estimate has no '{mark}'")
        text = before + more + mark + after
    return text


def sweep_page(points: Sequence[Point], price: float | None = None) -> str:
    """Return the HTML of a sweep: throughput against cost, and every row."""
    job = points[0].job
    unit = "device-hours" if price is None else "dollars"
    drawn = [
        {
            "x": point.device_hours * (1 if price is None else price),
            "y": point.tokens_per_second,
            "kind": "best" if point.worth_it else "other",
            "front": point.worth_it,
            "label": f"{_place(point)}\n{plan_text(point.best)}",
        }
        for point in points
        if point.best
    ]
    rows = [_sweep_row(point, price) for point in points]
    data = {
        "title": f"{job.model.name}: nodes, batches and sequences",
        "scatter": {"x": f"{unit} per billion tokens", "y": "tokens per second", "points": drawn},
        "titles": ["nodes", "devices", "batch", "seq", "tokens/s", "MFU", "memory", f"{unit}/B tokens", "plan"],
        "rows": rows,
    }
    return _filled(_asset("sweep.html"), data)


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(f"assets/{name}").read_text("utf-8")


def _filled(template: str, data: dict[str, Any]) -> str:
    """Return a template with its script and its data; "</" in a name would end the script element early."""
    whole = template.replace("__SCATTER__", _asset("scatter.js"))
    return whole.replace("__DATA__", json.dumps(data).replace("</", "<\\/"))


def _data(answer: Answer, explanation: Explanation | None, runners: Sequence[RunnerUp]) -> dict[str, Any]:
    model = answer.estimate.job.model
    marks = _marks(answer.plan)
    return {
        "chain": f"({model.layers[0].name} to {model.layers[-1].name}, {len(model.layers)} layers)",
        "layers": len(model.layers),
        "map": _map(answer.estimate, marks),
        "strategies": [[f"{letter} {text}", colour] for text, (letter, colour) in marks.items()],
        "explained": explanation is not None,
        "limit": f"limited by {explanation.limit.text}" if explanation else "",
        "stages": [stage.text for stage in explanation.stages] if explanation else [],
        "helps": _helps(explanation) if explanation else [],
        "runner_titles": _RUNNER_TITLES,
        "runners": [_runner_row(runner) for runner in runners],
        "scatter": _scatter(answer, runners),
        "document": answer.plan.to_json(),
    }


def _marks(plan: Plan) -> dict[str, tuple[str, str]]:
    """Return strategy -> (letter, colour)."""
    texts = dict.fromkeys(strategy_text(span) for span in spans_of(plan))
    symbols = string.ascii_uppercase + string.ascii_lowercase
    return {text: (symbols[i % len(symbols)], _COLOURS[i % len(_COLOURS)]) for i, text in enumerate(texts)}


def _map(found: Estimate, marks: dict[str, tuple[str, str]]) -> list[dict[str, Any]]:
    """Return a row per device group: its layers and their strategies."""
    rows: list[dict[str, Any]] = []
    for pipeline in found.plan.pipelines:
        first = len(rows)
        rows += [{"name": pipeline.stages[g].devices, "cells": []} for g in range(groups_of(pipeline))]
        for s, stage in enumerate(pipeline.stages):
            group = group_of_stage(pipeline.schedule, len(pipeline.stages), s)
            for span in stage.spans:
                rows[first + group]["cells"].append(_cell(found, span, s, marks))
    return rows


def _cell(found: Estimate, span: Span, stage: int, marks: dict[str, tuple[str, str]]) -> dict[str, Any]:
    layers, text = layer_range(found.job.model, span.layers), strategy_text(span)
    letter, colour = marks[text]
    shade = {"none": "", "full": "full"}.get(span.recompute, "some") if isinstance(span.recompute, str) else "some"
    title = f"stage {stage}: {span.layers}\n{text}"
    return {
        "start": layers.start, "count": len(layers), "letter": letter, "colour": colour, "shade": shade, "title": title,
    }  # fmt: skip


def _helps(explanation: Explanation) -> list[dict[str, Any]]:
    """Return rows as the estimate's page draws bars."""
    return [
        {"name": h.change, "parts": [[h.text, h.gain, _COLOURS[0]]], "label": h.text.removeprefix(f"{h.change}: ")}
        for h in explanation.helps
    ]


def _runner_row(runner: RunnerUp) -> list[str]:
    found = runner.estimate
    step, memory = f"{found.step_seconds:.4g} s", size(found.peak_memory)
    return [runner.kind, step, runner.slower_text, memory, runner.loses, plan_text(found)]


def _scatter(answer: Answer, runners: Sequence[RunnerUp]) -> dict[str, Any]:
    """Return memory against throughput of every fully priced plan."""
    winner = answer.estimate
    plans = [("best", "the plan", winner)]
    plans += [("runner", runner.kind, runner.estimate) for runner in runners]
    known = [found.plan.pipelines for _, _, found in plans]
    others = [plan for plan in answer.others if plan.pipelines not in known]
    plans += [("other", "best for a while", estimate(winner.job, plan, winner.runtime)) for plan in others]
    places = [(found.peak_memory / GIB, found.tokens_per_second_per_device) for _, _, found in plans]
    points = [
        {
            "x": memory, "y": speed, "kind": kind,
            "front": not any(q != (memory, speed) and q[0] <= memory and q[1] >= speed for q in places),
            "label": f"{name}: {found.step_seconds:.4g} s, {size(found.peak_memory)}\n{plan_text(found)}",
        }
        for (kind, name, found), (memory, speed) in zip(plans, places, strict=True)
    ]  # fmt: skip
    return {"x": "memory on the fullest device, GiB", "y": "tokens per second and device", "points": points}


def _place(point: Point) -> str:
    return f"{point.nodes} nodes, batch {point.job.global_batch:,}, {point.job.seq_len:,} tokens"


def _sweep_row(point: Point, price: float | None) -> list[str]:
    place = [str(point.nodes), f"{point.devices:,}", f"{point.job.global_batch:,}", f"{point.job.seq_len:,}"]
    if not point.best:
        return [*place, "", "", "", "", point.problem]
    found = point.best
    cost = point.device_hours * (1 if price is None else price)
    reached = [f"{point.tokens_per_second:,.0f}", f"{found.mfu:.1%}", size(found.peak_memory), f"{cost:,.1f}"]
    return [*place, *reached, plan_text(found)]
