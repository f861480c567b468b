"""Read the pipeline of a torchtitan configuration: layers of each stage, and the schedule by name or table."""

from __future__ import annotations

import os
from typing import Any

from meshwright.base.files import read_text
from meshwright.errors import shorten
from meshwright.frameworks.shared.config_fields import Fields
from meshwright.frameworks.shared.uniform_plan import stages_of
from meshwright.frameworks.torchtitan.known import SCHEDULES
from meshwright.models import Model
from meshwright.plans import Job, Plan
from meshwright.plans.action_table import action_table
from meshwright.plans.schedule import Schedule

_P = "parallelism."
_PARTS = _P + "module_fqns_per_model_part"
_NAMES = {word.lower(): ours for ours, word in SCHEDULES.items()}


def piped(fields: Fields, job: Job, short: dict[str, Any]) -> Plan:
    """Return the plan of degrees and choices with its stages; without a pipeline the fields have no effect."""
    written = str(fields.raw(_P + "pipeline_parallel_schedule", "1F1B"))
    name = written.lower()  # PyTorch's lookup ignores case
    table = fields.raw(_P + "pipeline_parallel_schedule_csv", "")
    parts, _ = fields.raw(_PARTS), fields.raw(_P + "pipeline_parallel_layers_per_stage")
    groups = short.pop("pp")
    if groups == 1:
        return Plan.of(short | {"pp": 1}, job)
    if not table and name not in _NAMES:
        raise fields.wrong(
            _P + "pipeline_parallel_schedule", f"is {shorten(written, 40)}", ", ".join(SCHEDULES.values())
        )
    single = name in {"gpipe", "1f1b"}
    counts = _dealt_by_itself(fields, job.model, groups, single) if parts is None else _named(fields, job.model, parts)
    if len(counts) % groups:
        raise fields.wrong(_PARTS, f"has {len(counts)} parts, not a multiple of the {groups} groups of the pipeline")
    if any(count < 0 for count in counts) or not all(counts[1:-1]):
        raise fields.wrong(_PARTS, f"parts of {', '.join(map(str, counts))} layers", "one or more, between the ends")
    virtual = len(counts) // groups
    short = short | {
        "stages": [{"layers": layers} for layers in stages_of(job.model, tuple(counts))],
        "virtual": virtual,
    }
    if table:
        return _tabled(fields, job, short, os.path.join(os.path.dirname(fields.file), str(table)))
    return Plan.of(short | {"schedule": _NAMES[name]}, job)


def _named(fields: Fields, model: Model, parts: Any) -> list[int]:
    """Return the layers of each part; together they are the model's in order."""
    lists = isinstance(parts, list) and all(isinstance(part, list) for part in parts)
    if not lists or not all(isinstance(name, str) for part in parts for name in part):
        raise fields.wrong(_PARTS, "is no list of lists of names", "[['tok_embeddings', 'layers.0'], ...]")
    layers = [name for part in parts for name in part if name.startswith("layers.")]
    if layers != [f"layers.{i}" for i in range(len(model.blocks))]:
        problem = f"names {len(layers)} layers, not layers.0 to layers.{len(model.blocks) - 1} of {model.name} in order"
        raise fields.wrong(_PARTS, problem)
    return [sum(name.startswith("layers.") for name in part) for part in parts]


def _dealt_by_itself(fields: Fields, model: Model, groups: int, single: bool) -> list[int]:
    blocks, virtual = len(model.blocks), 1 if single else 2
    ends = [fields.whole(f"{_P}pipeline_parallel_{end}_stage_less_layers", 1, least=0) for end in ("first", "last")]
    for name, weight in zip(("first", "last"), ends, strict=True):
        if weight > blocks:
            raise fields.wrong(f"{_P}pipeline_parallel_{name}_stage_less_layers", f"is {weight}, of {blocks} layers")
    each = _P + "pipeline_parallel_layers_per_stage"
    if fields.raw(each) is not None:
        virtual = max(-(-(blocks + sum(ends)) // fields.whole(each, 1)) // groups, 1)
    return dealt(blocks, groups * virtual, ends)


def dealt(blocks: int, stages: int, ends: list[int]) -> list[int]:
    """Return the layers as torchtitan divides them.

    Embedding and head count as several blocks (distributed/pipeline_parallel.py).

    >>> dealt(32, 4, [1, 1])
    [8, 9, 8, 7]
    """
    each, extra = divmod(blocks + sum(ends), stages)
    counts = [each + (stage < extra) for stage in range(stages)]
    counts[0] -= ends[0]
    counts[-1] -= ends[1]
    return counts


def _tabled(fields: Fields, job: Job, short: dict[str, Any], path: str) -> Plan:
    """Return a plan with the schedule of an action table beside the configuration, by its name if it has one."""
    lines = read_text(path).splitlines()
    rows = tuple(tuple(cell.strip() for cell in line.split(",") if cell.strip()) for line in lines)
    virtual = short["virtual"]
    ours = action_table(Schedule(name="zero-bubble"), len(short["stages"]) // virtual, short["micro_batches"])
    if virtual == 1 and rows == tuple(tuple(f"{s}{kind}{m}" for s, kind, m in row) for row in ours):
        return Plan.of(short | {"schedule": "zero-bubble"}, job)
    document = Plan.of(short | {"schedule": "1f1b" if virtual == 1 else "interleaved"}, job).to_table()
    document["pipelines"][0]["schedule"] = {"name": "custom", "virtual": virtual, "table": [list(row) for row in rows]}
    return Plan.of(document, job, file=path)
