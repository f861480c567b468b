"""torchtitan's configuration as a plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.export.contract import Beside, Imported
from meshwright.export.fields import Fields, job_of
from meshwright.export.sharding import Grid, zero_of
from meshwright.export.torchtitan.known import CONVERTERS, PRESETS, SCHEDULES
from meshwright.export.torchtitan.model import flavor_of
from meshwright.export.torchtitan.source import table_of
from meshwright.export.uniform import stages_of
from meshwright.files import read_text
from meshwright.model import Model
from meshwright.plan import Job, Plan
from meshwright.plan.actions import action_table
from meshwright.plan.schedule import Schedule, ScheduleName

# Sections that say nothing about a plan (torchtitan/trainer.py, Trainer.Config), and fields of those that do.
KNOWN = (
    "module", "hf_assets_path", "dump_folder", "profiler.", "metrics.", "tokenizer.", "dataloader.", "optimizer.", "loss.",
    "lr_scheduler.", "checkpoint.", "comm.", "validator.", "debug.", "override.", "training.max_norm", "training.steps",
    "training.gc_freq", "training.gc_debug", "training.disable_cuda_graphs", "training.mixed_precision_reduce",
    "training.dtype", "parallelism.spmd_backend", "parallelism.enable_fsdp_symm_mem", "compile.", "activation_checkpoint.",
    "parallelism.context_parallel_load_balancer", "parallelism.context_parallel_ptrr_mask_key", "activation_checkpoint",
    "parallelism.pipeline_parallel_first_stage_less_layers", "parallelism.pipeline_parallel_last_stage_less_layers",
)  # fmt: skip
_SINGLE = {"GPipe", "1F1B"}
_P = "parallelism."


def read(text: str, file: str, beside: Beside) -> Imported:
    """A plan from a module, from flags, or from a saved configuration."""
    fields = Fields(table_of(text, file), file)
    assumed: list[str] = []
    model = _model(fields, beside)
    degrees = _degrees(fields, beside)
    batch, micro_batches = _batch(fields, beside, degrees, assumed)
    seq = fields.whole("training.seq_len", 2048) if "training.seq_len" in fields else None
    job = job_of(
        fields, beside, batch=batch, seq=seq, precision=_precision(fields), optimizer=_optimizer(fields), model=model
    )
    short = degrees | {"micro_batches": micro_batches, "recompute": _recompute(fields, assumed)}
    if fields.flag("training.enable_cpu_offload"):
        short["offload"] = {"optimizer": 1.0, "parameters": 1.0}
    if fields.flag("compile.enable_async_tensor_parallel"):
        short["overlap"] = {"tensor_chunks": degrees["tp"]}
    plan = _piped(fields, job, short, assumed)
    unknown, unused = fields.rest(KNOWN)
    return Imported(job, plan, unknown, unused, tuple(assumed))


def _model(fields: Fields, beside: Beside) -> Model | None:
    """The preset of a flavour; where several presets share it, the one that the user names."""
    flavor = fields.raw("model_spec")
    if flavor not in PRESETS or (beside.model and flavor_of(beside.model) == flavor):
        return None
    return Model.preset(PRESETS[flavor])


def _degrees(fields: Fields, beside: Beside) -> dict[str, Any]:
    devices = beside.cluster.devices
    tp, ring = fields.whole(_P + "tensor_parallel_degree", 1), fields.whole(_P + "context_parallel_degree", 1)
    pp, replicate = (
        fields.whole(_P + "pipeline_parallel_degree", 1),
        fields.whole(_P + "data_parallel_replicate_degree", 1),
    )
    shard = fields.whole(_P + "data_parallel_shard_degree", -1, least=-1)
    others = tp * ring * pp * replicate
    if shard < 0:
        shard = devices // others
    if others * shard != devices or not shard:
        product = (
            f"replicate {replicate} x shard {shard} x context {ring} x tensor {tp} x pipeline {pp} = {others * shard}"
        )
        raise fields.wrong(
            _P + "data_parallel_shard_degree", f"{product}, but {beside.cluster.name} has {devices} devices"
        )
    policy = fields.word(_P + "fsdp_reshard_after_forward", "default", ("default", "always", "never"))
    reshard: bool | None = policy == "always" or (policy == "default" and pp == 1)
    if policy == "default" and shard * ring == 1:
        reshard = None
    zero = zero_of(Grid(replicate, shard, reshard), ring)
    sp = fields.flag(_P + "enable_sequence_parallel", True) and tp > 1
    ep = fields.whole(_P + "expert_parallel_degree", 1)
    return {"dp": replicate * shard, "tp": tp, "sp": sp, "ring": ring, "pp": pp, "ep": ep, **zero}


def _batch(fields: Fields, beside: Beside, degrees: dict[str, Any], assumed: list[str]) -> tuple[int, int]:
    """The global batch, and micro-batches per step."""
    local, dp = fields.whole("training.local_batch_size", 8), degrees["dp"]
    total = fields.whole("training.global_batch_size", -1, least=-1)
    total = total if total > 0 else beside.batch or local * dp
    if total % (local * dp):
        problem = f"is {total}, not a multiple of local_batch_size {local} x {dp} replicas"
        raise fields.wrong("training.global_batch_size", problem, f"a multiple of {local * dp}")
    size = fields.whole(_P + "pipeline_parallel_microbatch_size", 1)
    if degrees["pp"] == 1:
        return total, total // (local * dp)
    if local % size:
        problem = f"is {size}, which does not divide local_batch_size {local}"
        raise fields.wrong(_P + "pipeline_parallel_microbatch_size", problem)
    if total > local * dp:
        assumed.append(f"the pipeline is filled {total // (local * dp)} times a step; a plan fills it once")
    return total, total // (size * dp)


def _precision(fields: Fields) -> str:
    if converter := fields.raw("converters"):
        names = {name: precision for precision, name in CONVERTERS.items()}
        if converter not in names:
            raise fields.wrong("converters", f"is {converter}", ", ".join(names))
        return names[converter]
    kinds = {"bfloat16": "bf16", "float32": "fp32"}
    return kinds[fields.word("training.mixed_precision_param", "bfloat16", kinds)]


def _optimizer(fields: Fields) -> str:
    return "adamw-16bit" if fields.raw("optimizer.implementation") == "fused_opt_states_bf16" else "adamw"


def _recompute(fields: Fields, assumed: list[str]) -> str:
    if fields.raw("activation_checkpoint", "selective") == "memory-budget":
        assumed.append("activation_checkpoint: a memory budget lets the compiler choose; selective is taken")
        return "selective"
    return fields.word("activation_checkpoint", "selective", ("none", "selective", "full"))


def _piped(fields: Fields, job: Job, short: dict[str, Any], assumed: list[str]) -> Plan:
    """Stages and schedule of a pipeline; without one they say nothing."""
    name = fields.raw(_P + "pipeline_parallel_schedule", "1F1B")
    table = fields.raw(_P + "pipeline_parallel_schedule_csv", "")
    per_stage = fields.raw(_P + "pipeline_parallel_layers_per_stage")
    parts = fields.raw(_P + "module_fqns_per_model_part")
    groups = short.pop("pp")
    if groups == 1:
        return Plan.of(short | {"pp": 1}, job)
    names = {word.lower(): ours for ours, word in SCHEDULES.items()}
    if not table and str(name).lower() not in names:
        raise fields.wrong(_P + "pipeline_parallel_schedule", f"is {name}", ", ".join(SCHEDULES.values()))
    if parts is None:
        virtual = 1 if name in _SINGLE else 2
        blocks = len(job.model.blocks)
        weights = [
            fields.whole(f"{_P}pipeline_parallel_{end}_stage_less_layers", 1, least=0) for end in ("first", "last")
        ]
        if per_stage:
            virtual = -(-(blocks + sum(weights)) // int(per_stage)) // groups
        counts = _dealt(blocks, groups * max(virtual, 1), weights)
    else:
        counts = [_layers(fields, part) for part in parts]
    if len(counts) % groups or sum(counts) != len(job.model.blocks):
        problem = f"{sum(counts)} layers in {len(counts)} parts, for {len(job.model.blocks)} layers and {groups} groups"
        raise fields.wrong(_P + "module_fqns_per_model_part", problem)
    stages = [{"layers": layers} for layers in stages_of(job.model, tuple(counts))]
    schedule: ScheduleName = names.get(str(name).lower(), "1f1b")  # type: ignore[assignment]
    virtual = len(counts) // groups
    if table:
        return _tabled(fields, job, short | {"stages": stages}, virtual, str(table))
    return Plan.of(short | {"stages": stages, "schedule": schedule, "virtual": virtual}, job)


def _layers(fields: Fields, part: Any) -> int:
    if not isinstance(part, list) or not all(isinstance(name, str) for name in part):
        raise fields.wrong(_P + "module_fqns_per_model_part", "is no list of lists of names")
    return sum(name.startswith("layers.") for name in part)


def _dealt(blocks: int, stages: int, weights: list[int]) -> list[int]:
    """How torchtitan deals layers out by itself: the embedding and the head count as layers (pipeline_parallel.py)."""
    first, last = weights
    each, extra = divmod(blocks + first + last, stages)
    counts = [each + (stage < extra) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    return counts


def _tabled(fields: Fields, job: Job, short: dict[str, Any], virtual: int, path: str) -> Plan:
    """A schedule from a table of actions beside the configuration; one that has a name is called by it."""
    where = os.path.join(os.path.dirname(fields.file), path)
    rows = tuple(
        tuple(cell.strip() for cell in row.split(",") if cell.strip()) for row in read_text(where).splitlines()
    )
    groups = len(short["stages"]) // virtual
    if Path(where).suffix != ".csv":
        raise InputError("is no table of actions", file=where)
    ours = action_table(Schedule(name="zero-bubble"), groups, short["micro_batches"])
    named = tuple(tuple(f"{stage}{kind}{m}" for stage, kind, m in row) for row in ours)
    if virtual == 1 and rows == named:
        return Plan.of(short | {"schedule": "zero-bubble", "virtual": 1}, job)
    stand_in = "1f1b" if virtual == 1 else "interleaved"
    document = Plan.of(short | {"schedule": stand_in, "virtual": virtual}, job).to_table()
    document["pipelines"][0]["schedule"] = {"name": "custom", "virtual": virtual, "table": [list(row) for row in rows]}
    return Plan.of(document, job, file=where)
