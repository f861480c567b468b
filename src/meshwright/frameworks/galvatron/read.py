"""Read Hetu-Galvatron's strategy file as a plan: spans of layers that differ."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import msgspec

from meshwright.base.files import parse_json
from meshwright.errors import InputError, kind_of, shorten
from meshwright.frameworks.contract import Beside, Imported
from meshwright.frameworks.shared.config_fields import Fields, job_of
from meshwright.frameworks.shared.uniform_plan import stages_of
from meshwright.plans import Job, Plan
from meshwright.plans.spans import device_text, layer_range, span_name
from meshwright.plans.strategy import Axis

DP_FIRST: tuple[Axis, ...] = ("dp", "tp", "ulysses", "ring")  # tp_consecutive_flags 0: replicas are adjacent
READ = (
    "pp_deg", "tp_sizes_enc", "tp_consecutive_flags", "cp_sizes_enc", "dp_types_enc", "use_sp", "checkpoint", "global_bsz",
    "chunks", "pp_division", "pipeline_type", "default_dp_type", "vtp", "vsp", "vcp", "embed_sdp", "ep_sizes_enc",
    "tp_of_ep_sizes_enc",
)  # fmt: skip
_Choices = tuple[tuple[str, Any], ...]
_ZERO = {"ddp": 0, "zero2": 2, "zero3": 3}
_PIPELINES = {"gpipe": "gpipe", "pipedream_flush": "1f1b"}


def read(text: str, file: str, beside: Beside) -> Imported:
    """Return a plan from a strategy file; the user gives the model and the sequence length."""
    table = parse_json(text, file)
    if not isinstance(table, dict):
        raise InputError(f"holds {kind_of(table)}, expected an object", file=file)
    fields = Fields(table, file)
    batch = fields.whole("global_bsz", 0) if "global_bsz" in fields else None
    job = job_of(fields, beside, batch=batch)
    assumed = ["precision and sequence parallelism are command-line arguments: bf16, and on with tensor parallelism"]
    plan = _plan(fields, job, beside.cluster.devices, sequence=True)
    return Imported(job, plan, fields.left(), (), tuple(assumed))


def plan_of_layers(job: Job, table: dict[str, Any], devices: int, sequence: bool = True) -> Plan:
    """Return the plan of a strategy file for a job on `devices` devices."""
    return _plan(Fields(table, ""), job, devices, sequence)


def _plan(fields: Fields, job: Job, devices: int, sequence: bool) -> Plan:
    pp, chunks = fields.whole("pp_deg", 1), fields.whole("chunks", 1)
    fields.raw("global_bsz")
    blocks = len(job.model.blocks)
    if devices % pp:
        raise fields.wrong("pp_deg", f"{pp} does not divide the {devices} devices of {job.cluster.name}")
    each = devices // pp
    by_layer = _by_layer(job, _layers(fields, blocks, each), _ends(fields, each), sequence)
    divided = _row(fields, "pp_division", [blocks // pp] * (pp - 1) + [blocks - blocks // pp * (pp - 1)], pp)
    if sum(divided) != blocks:
        raise fields.wrong(
            "pp_division", f"deals out {sum(divided)} layers; {job.model.name} has {blocks}", str(blocks)
        )
    kind = fields.word("pipeline_type", "gpipe", _PIPELINES)
    stages = [
        {"devices": device_text(list(range(i * each, i * each + each))), "spans": _spans(job, layers, by_layer)}
        for i, layers in enumerate(stages_of(job.model, tuple(divided)))
    ]
    pipeline = {"batch": job.global_batch, "micro_batches": chunks, "stages": stages}
    pipeline["schedule"] = {"name": _PIPELINES[kind]}
    return Plan.of({"job": msgspec.to_builtins(job.written()), "pipelines": [pipeline]}, job, fields.file)


def _spans(job: Job, text: str, by_layer: list[_Choices]) -> list[dict[str, Any]]:
    """Return runs of layers with an equal strategy."""
    spans, first = [], layer_range(job.model, text).start
    for strategy, run in groupby(by_layer[i] for i in layer_range(job.model, text)):
        count = len(list(run))
        spans.append({"layers": span_name(job.model, range(first, first + count)), **dict(strategy)})
        first += count
    return spans


def _layers(fields: Fields, blocks: int, each: int) -> list[dict[str, Any]]:
    """Return the strategy of every block."""
    one = [1] * blocks
    tp, cp = _row(fields, "tp_sizes_enc", one, blocks), _row(fields, "cp_sizes_enc", one, blocks)
    adjacent, sharded = (
        _row(fields, "tp_consecutive_flags", one, blocks),
        _row(fields, "dp_types_enc", [0] * blocks, blocks),
    )
    ulysses, again = _row(fields, "use_sp", [0] * blocks, blocks), _row(fields, "checkpoint", [0] * blocks, blocks)
    ep, inside = _row(fields, "ep_sizes_enc", one, blocks), _row(fields, "tp_of_ep_sizes_enc", one, blocks)
    default = _ZERO[fields.word("default_dp_type", "ddp", _ZERO)]
    return [
        _strategy(fields, "tp_sizes_enc", each, tp[i], cp[i], bool(ulysses[i]), 3 if sharded[i] else default)
        | {"ep": ep[i], "etp": inside[i], "recompute": "full" if again[i] else "none"}
        | ({} if adjacent[i] or tp[i] == 1 or ulysses[i] else {"order": DP_FIRST})
        for i in range(blocks)
    ]


def _ends(fields: Fields, each: int) -> dict[str, Any]:
    """Return the strategy of embedding and head."""
    tp, cp, ulysses = fields.whole("vtp", 1), fields.whole("vcp", 1), fields.flag("vsp")
    default = _ZERO[fields.word("default_dp_type", "ddp", _ZERO)]
    return _strategy(fields, "vtp", each, tp, cp, ulysses, 3 if fields.flag("embed_sdp") else default)


def _strategy(fields: Fields, name: str, each: int, tp: int, cp: int, ulysses: bool, zero: int) -> dict[str, Any]:
    if tp < 1 or cp < 1 or each % (tp * cp):
        raise fields.wrong(name, f"{tp} x context {cp} does not divide the {each} devices of a stage")
    own, heads = (1, tp) if ulysses else (tp, 1)
    return {"dp": each // (tp * cp), "tp": own, "ulysses": heads, "ring": cp, "sp": own > 1, "zero": zero}


def _by_layer(job: Job, layers: list[dict[str, Any]], ends: dict[str, Any], sequence: bool) -> list[_Choices]:
    """Return the strategy of every layer; embedding and head take the recompute of the block beside them."""
    index = {name: i for i, name in enumerate(job.model.blocks)}
    found = []
    for i, layer in enumerate(job.model.layers):
        near = layers[0] if i < len(job.model.layers) // 2 else layers[-1]
        shared = {name: near[name] for name in ("ep", "etp", "recompute")}
        own = layers[index[layer.block]] if layer.block else ends | shared
        own = own | {"sp": own["sp"] and sequence}
        found.append(tuple(own.items()))
    return found


def _row(fields: Fields, name: str, default: list[int], count: int) -> list[int]:
    """Return numbers joined by commas, one per layer or stage."""
    if name not in fields:
        fields.raw(name)
        return default
    value = fields.raw(name)
    try:
        numbers = [int(part) for part in str(value).split(",")]
    except ValueError:
        raise fields.wrong(name, f"'{shorten(str(value), 40)}' is no row of numbers joined by commas") from None
    if len(numbers) != count:
        raise fields.wrong(name, f"has {len(numbers)} numbers", f"{count}, joined by commas")
    return numbers
