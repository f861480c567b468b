"""Export a step as a Chrome or Perfetto trace: computation, communication and waiting of each device group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.cost.estimate import Estimate
from meshwright.cost.layers.passes import Part
from meshwright.cost.layers.stage import StageTime
from meshwright.cost.step.pipeline import Event
from meshwright.cost.step.step import PipelineTime

# Parts of an action's time, in the order they are drawn.
PARTS = (
    "recompute",
    "compute",
    "tp",
    "ring",
    "ulysses",
    "ep",
    "zero",
    "offload",
    "swap",
    "relayout",
    "waiting",
    "host",
)
NAMES = {
    "compute": "compute", "recompute": "recompute", "tp": "tensor parallel", "ring": "ring attention",
    "ulysses": "Ulysses", "ep": "expert parallel", "zero": "ZeRO", "offload": "offload", "swap": "swap",
    "host": "waiting for the host", "send": "send to the next stage", "gradients": "gradients",
    "optimizer": "optimizer", "bubble": "bubble",
    "relayout": "relayout between spans", "waiting": "waiting for the slowest device",
}  # fmt: skip
ACTIONS = {"F": "forward", "B": "backward", "I": "backward (inputs)", "W": "backward (weights)"}


def chrome_trace(estimate: Estimate) -> dict[str, Any]:
    """Return the whole step in Chrome's trace format; times in microseconds.

    There is one process per pipeline and device group, with three rows:

    - actions of the schedule
    - parts of their time, exposed communication included
    - communication overlapped with computation
    """
    events: list[dict[str, Any]] = []
    process = 0
    for pipeline in estimate.pipelines:
        for group in range(pipeline.timeline.groups):
            events += _names(process, estimate.memory[process].devices)
            events += _group(process, group, pipeline)
            process += 1
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step_seconds": estimate.step_seconds}}


def _names(process: int, devices: str) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", process, 0, f"devices {devices}")
    for thread, name in enumerate(("schedule", "device", "hidden communication")):
        yield _meta("thread_name", process, thread, name)


def _meta(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _group(process: int, group: int, pipeline: PipelineTime) -> Iterator[dict[str, Any]]:
    now = 0.0
    for event in (event for event in pipeline.timeline.events if event.group == group):
        if event.start > now + 1e-12:
            yield _slice(process, 1, NAMES["bubble"], "bubble", now, event.start)
        name = f"{ACTIONS[event.kind]} {event.micro_batch}"
        facts = {"stage": event.stage, "micro_batch": event.micro_batch}
        yield _slice(process, 0, name, ACTIONS[event.kind], event.start, event.end, facts)
        yield from _inside(process, event, pipeline.stages[event.stage])
        now = event.end
    for what, seconds in (("gradients", pipeline.exposed[group]), ("optimizer", pipeline.optimizer[group])):
        if seconds:
            yield _slice(process, 1, NAMES[what], what, now, now + seconds)
            now += seconds
    if rest := pipeline.seconds - now:
        yield _slice(process, 1, NAMES["waiting"], "waiting", now, now + rest)
    if under := pipeline.covered[group]:
        end = pipeline.timeline.ends[group]
        yield _slice(process, 2, NAMES["gradients"], "gradients", max(end - under, 0.0), end)


def _inside(process: int, event: Event, time: StageTime) -> Iterator[dict[str, Any]]:
    """Yield the parts of one action, one after the other; overlapped communication beside them."""
    when = "forward" if event.kind == "F" else "backward"
    now = event.start
    for part, seconds in action_parts(time.spent, when, event.kind, time.weight_gradient):
        end = min(now + seconds, event.end)
        name = f"{when} {NAMES[part]}" if part == "compute" else NAMES[part]
        yield _slice(process, 1, name, part, now, end)
        now = end
    if event.end > now + 1e-12:
        yield _slice(process, 1, NAMES["send"], "send", now, event.end)
    now = event.start
    for part in PARTS:
        seconds = time.hidden.get((when, part), 0.0)
        if seconds > 0 and event.kind != "W":
            yield _slice(process, 2, NAMES[part], part, now, min(now + seconds, event.end))
            now = min(now + seconds, event.end)


def action_parts(spent: Mapping[Part, float], when: str, kind: str, weight: float) -> Iterator[tuple[str, float]]:
    """Yield (part, seconds) of one action; zero-bubble schedules run weight gradients separately."""
    for part in PARTS:
        seconds = spent.get((when, part), 0.0)
        if kind == "W":
            seconds = weight if part == "compute" else 0.0
        elif kind == "I" and part == "compute":
            seconds = max(seconds - weight, 0.0)
        if seconds > 1e-9:
            yield part, seconds


def _slice(
    process: int, thread: int, name: str, kind: str, start: float, end: float, facts: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "name": name, "cat": kind, "ph": "X", "pid": process, "tid": thread, "ts": start * 1e6,
        "dur": (end - start) * 1e6, "args": facts or {},
    }  # fmt: skip
