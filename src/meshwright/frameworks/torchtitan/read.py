"""Read torchtitan's configuration as a plan."""

from __future__ import annotations

from typing import Any

from meshwright.frameworks.contract import Beside, Imported
from meshwright.frameworks.shared.config_fields import Fields, job_of
from meshwright.frameworks.shared.fsdp import Grid, zero_of
from meshwright.frameworks.torchtitan.known import CONVERTERS, PRESETS
from meshwright.frameworks.torchtitan.model import flavor_of
from meshwright.frameworks.torchtitan.pipeline import piped
from meshwright.frameworks.torchtitan.source import table_of
from meshwright.models import Model

# Sections without effect on a plan (torchtitan/trainer.py, Trainer.Config), and such fields of other sections.
KNOWN = (
    "module", "hf_assets_path", "dump_folder", "profiler.", "metrics.", "tokenizer.", "dataloader.", "optimizer.", "loss.",
    "lr_scheduler.", "checkpoint.", "comm.", "validator.", "debug.", "override.", "training.max_norm", "training.steps",
    "training.gc_freq", "training.gc_debug", "training.disable_cuda_graphs", "training.mixed_precision_reduce",
    "training.dtype", "parallelism.spmd_backend", "parallelism.enable_fsdp_symm_mem", "compile.", "activation_checkpoint.",
    "parallelism.context_parallel_load_balancer", "parallelism.context_parallel_ptrr_mask_key", "activation_checkpoint",
    "parallelism.pipeline_parallel_first_stage_less_layers", "parallelism.pipeline_parallel_last_stage_less_layers",
)  # fmt: skip
READ = (
    "model_spec", "converters", "activation_checkpoint", "training.local_batch_size", "training.global_batch_size",
    "training.seq_len", "training.mixed_precision_param", "training.enable_cpu_offload", "optimizer.implementation",
    "compile.enable_async_tensor_parallel", "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree", "parallelism.fsdp_reshard_after_forward",
    "parallelism.tensor_parallel_degree", "parallelism.enable_sequence_parallel", "parallelism.context_parallel_degree",
    "parallelism.expert_parallel_degree", "parallelism.pipeline_parallel_degree",
    "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule_csv",
    "parallelism.pipeline_parallel_microbatch_size", "parallelism.pipeline_parallel_layers_per_stage",
    "parallelism.module_fqns_per_model_part",
)  # fmt: skip
_P = "parallelism."


def read(text: str, file: str, beside: Beside) -> Imported:
    """Return a plan from a module, from flags, or from a saved configuration."""
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
    plan = piped(fields, job, short)
    unknown, unused = fields.rest(KNOWN)
    return Imported(job, plan, unknown, unused, tuple(assumed))


def _model(fields: Fields, beside: Beside) -> Model | None:
    """Return the preset of a flavour; if several share it, the one that the user names."""
    flavor = fields.raw("model_spec")
    if not isinstance(flavor, tuple) or flavor not in PRESETS or (beside.model and flavor_of(beside.model) == flavor):
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
    """Return the global batch, and micro-batches per step."""
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
    if converter := str(fields.raw("converters", "")):
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
