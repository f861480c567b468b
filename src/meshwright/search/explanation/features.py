"""Choices of a plan in short: its degrees and switches over all its spans."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.plans import Pipeline, Plan, Span

_DEGREES = ("dp", "tp", "ulysses", "ring", "ep", "etp")


def spans_of(plan: Plan) -> Iterator[Span]:
    """Return every span of every stage of every pipeline."""
    return (span for pipeline in plan.pipelines for stage in pipeline.stages for span in stage.spans)


def groups_of(pipeline: Pipeline) -> int:
    """Return the number of device groups, also called the pipeline degree."""
    return len(pipeline.stages) // pipeline.schedule.virtual


def choices(plan: Plan) -> dict[str, str]:
    """Return name -> value; where stages or spans differ, every value that occurs.

    >>> plan = Plan.of({"model": "tiny-llama", "cluster": "4xh100", "global_batch": 8, "tp": 2, "pp": 2})
    >>> found = choices(plan)
    >>> found["pp"], found["tp"], found["recompute"], found["offload"]
    ('2', '2', 'none', 'none')
    """
    spans = list(spans_of(plan))
    pipelines = plan.pipelines
    found = {
        "devices": str(plan.devices),
        "pp": _every(groups_of(p) for p in pipelines),
        "schedule": _every(p.schedule.name if groups_of(p) > 1 else "none" for p in pipelines),
        "virtual": _every(p.schedule.virtual for p in pipelines),
        "micro_batches": _every(p.micro_batches for p in pipelines),
    }
    found |= {name: _every(getattr(span, name) for span in spans) for name in _DEGREES}
    found["sp"] = _every("on" if span.sp else "off" for span in spans)
    found["zero"] = _every(_zero(span) for span in spans)
    found["recompute"] = _every(recompute_text(span) for span in spans)
    found["offload"] = _every(_offload(span) for span in spans)
    found["swap"] = _every(_swap(span) for span in spans)
    return found


def recompute_text(span: Span) -> str:
    return span.recompute if isinstance(span.recompute, str) else "+".join(span.recompute)


def _zero(span: Span) -> str:
    return f"{span.zero} in groups of {span.zero_group}" if span.zero_group else str(span.zero)


def _offload(span: Span) -> str:
    parts = {name: getattr(span.offload, name) for name in ("activations", "optimizer", "parameters")}
    return " + ".join(f"{part:.0%} {name}" for name, part in parts.items() if part) or "none"


def _swap(span: Span) -> str:
    return f"{span.swap.activations:.0%} to stage {span.swap.to}" if span.swap else "none"


def _every(values: Iterator[object]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))
