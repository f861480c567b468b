"""Read DeepSpeed's `ds_config.json` as a plan."""

from __future__ import annotations

from typing import Any

from meshwright.base.files import parse_json
from meshwright.errors import InputError, kind_of
from meshwright.frameworks.contract import Beside, Imported
from meshwright.frameworks.shared.config_fields import Fields, flat, job_of
from meshwright.plans import Plan

# Names that DeepSpeed 0.19.6 reads (runtime/constants.py and the classes of its sections) and that do not affect
# a plan; a trailing dot means everything below.
KNOWN = (
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "gradient_clipping",
    "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "sparse_gradients",
    "communication_data_type", "disable_allgather", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "dataloader_drop_last", "optimizer.params", "optimizer.legacy_fusion", "scheduler.", "bf16.", "fp16.", "amp.",
    "data_types.", "checkpoint.", "flops_profiler.", "comms_logger.", "tensorboard.", "wandb.", "csv_monitor.", "comet.",
    "autotuning.", "elasticity.", "aio.", "compile.", "compression_training.", "data_efficiency.",
    "curriculum_learning.", "progressive_layer_drop.", "eigenvalue.", "nebula.", "hybrid_engine.", "timers.",
    "torch_autocast.", "optimizer.params.", "activation_checkpointing.", "expert_parallel.",
    "tensor_parallel.", "use_data_before_expert_parallelism", "seq_parallel_communication_data_type", "pipeline.",
)  # fmt: skip
ZERO = (
    "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
    "allgather_partitions", "allgather_bucket_size", "load_from_fp32_weights", "elastic_checkpoint", "sub_group_size",
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
    "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
    "stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters", "legacy_stage1", "round_robin_gradients",
    "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients", "zeropp_loco_param", "mics_hierarchical_params_gather", "memory_efficient_linear",
    "pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings", "offload_param.", "zenflow.",
    "offload_optimizer.",
)  # fmt: skip
READ = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "tensor_parallel.autotp_size",
    "sequence_parallel_size", "data_parallel_size", "zero_optimization.stage", "zero_optimization.overlap_comm",
    "zero_optimization.mics_shard_size", "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device", "activation_checkpointing.cpu_checkpointing",
    "activation_checkpointing.partition_activations", "expert_parallel.enabled", "expert_parallel.autoep_size",
    "expert_parallel.expert_tensor_parallel_size", "fp16.enabled", "bf16.enabled", "optimizer.type",
    "optimizer.params.momentum",
)  # fmt: skip
_BATCH = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def read(text: str, file: str, beside: Beside) -> Imported:
    """Return a plan from DeepSpeed's configuration; `auto` (Transformers fills it in) counts as absent."""
    table = parse_json(text, file)
    if not isinstance(table, dict):
        raise InputError(f"holds {kind_of(table)}, expected an object", file=file)
    said = flat(table)
    fields = Fields({name: value for name, value in said.items() if value != "auto"}, file)
    assumed = [f"{name} is left to Transformers" for name, value in said.items() if value == "auto"]
    short, batch = _short(fields, beside, assumed)
    job = job_of(fields, beside, batch=batch, precision=_precision(fields), optimizer=_optimizer(fields))
    plan = Plan.of(short, job)
    unknown, unused = fields.rest((*KNOWN, *(f"zero_optimization.{name}" for name in ZERO)))
    return Imported(job, plan, unknown, unused, tuple(assumed))


def _short(fields: Fields, beside: Beside, assumed: list[str]) -> tuple[dict[str, Any], int | None]:
    tp = max(fields.whole("tensor_parallel.autotp_size", 1, least=0), 1)
    ulysses = fields.whole("sequence_parallel_size", 1)
    devices = beside.cluster.devices
    if devices % (tp * ulysses):
        name = "sequence_parallel_size" if ulysses > 1 else "tensor_parallel.autotp_size"
        raise fields.wrong(
            name, f"tp {tp} x Ulysses {ulysses} does not divide {devices} devices of {beside.cluster.name}"
        )
    dp = devices // (tp * ulysses)
    if "data_parallel_size" in fields:
        product = f"{devices} devices / ({tp} x {ulysses})"
        fields.agree("data_parallel_size", fields.whole("data_parallel_size", dp), product, dp)
    batch, steps = _batch(fields, beside, dp, assumed)
    zero = fields.whole("zero_optimization.stage", 0, least=0)
    if zero > 3:
        raise fields.wrong("zero_optimization.stage", f"is {zero}", "0, 1, 2, 3")
    hidden = fields.flag("zero_optimization.overlap_comm", zero == 3)  # DeepSpeed's default (zero/config.py)
    short: dict[str, Any] = {"dp": dp, "tp": tp, "ulysses": ulysses, "sp": False, "zero": zero}
    short |= {"zero_group": _group(fields, dp * ulysses), "micro_batches": steps}
    short |= {"overlap": {"gradients": hidden, "parameters": hidden}}
    return short | _memory(fields, assumed) | _experts(fields), batch


def _batch(fields: Fields, beside: Beside, dp: int, assumed: list[str]) -> tuple[int, int]:
    """Return global batch and steps.

    Of batch, micro-batch and steps, two give the third, and three must agree.
    """
    said = {name: fields.whole(name, 1) if name in fields else 0 for name in _BATCH}
    batch, micro, steps = said.values()
    batch = batch or (beside.batch or 0) * (not (micro and steps))
    if batch and micro and steps and batch != micro * steps * dp:
        other = f"train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps} x {dp} replicas"
        fields.agree("train_batch_size", batch, other, micro * steps * dp)
    if not batch and not micro:
        raise InputError("the configuration does not hold the global batch", file=fields.file, field="--batch")
    if not batch:
        steps = steps or 1
        return micro * steps * dp, steps
    if batch % (dp * (micro or 1) * (steps or 1)):
        problem = f"{batch} is not a multiple of {dp} replicas x {micro or steps or 1}"
        raise fields.wrong("train_batch_size", problem, f"a multiple of {dp * (micro or steps or 1)}")
    if not micro and not steps:
        steps = 1
        assumed.append("gradient_accumulation_steps is not said: 1, as DeepSpeed does")
    return batch, steps or batch // (micro * dp)


def _group(fields: Fields, replicas: int) -> int:
    """Return the size of the group over which MiCS cuts states, if smaller than all replicas."""
    group = fields.whole("zero_optimization.mics_shard_size", -1, least=-1)
    return group if 0 < group < replicas else 0


def _memory(fields: Fields, assumed: list[str]) -> dict[str, Any]:
    recompute = any(name.startswith("activation_checkpointing") for name in fields.values)
    if not recompute:
        assumed.append("recompute: the model decides, not the configuration; none is taken")
    parked = fields.flag("activation_checkpointing.cpu_checkpointing")
    fields.raw("activation_checkpointing.partition_activations")
    offload = {"activations": float(parked)}
    for name, field in (("optimizer", "offload_optimizer"), ("parameters", "offload_param")):
        device = fields.word(f"zero_optimization.{field}.device", "none", ("none", "cpu", "nvme"))
        if device == "nvme":
            assumed.append(f"zero_optimization.{field}: on NVMe; taken as host memory")
        offload[name] = float(device != "none")
    return {"recompute": "full" if recompute else "none", "offload": offload}


def _experts(fields: Fields) -> dict[str, Any]:
    if not fields.flag("expert_parallel.enabled"):
        return {}
    inside = fields.whole("expert_parallel.expert_tensor_parallel_size", 1)
    return {"ep": fields.whole("expert_parallel.autoep_size", 1), "etp": inside}


def _precision(fields: Fields) -> str:
    half, brain = fields.flag("fp16.enabled"), fields.flag("bf16.enabled")
    if half and brain:
        raise fields.wrong("fp16.enabled", "is true, and so is bf16.enabled", "one of the two")
    return "fp16" if half else "bf16" if brain else "fp32"


def _optimizer(fields: Fields) -> str:
    kind = str(fields.raw("optimizer.type", "AdamW")).lower()
    if kind == "sgd":
        return "sgd-momentum" if fields.raw("optimizer.params.momentum") else "sgd"
    # One-bit Adam, CPU Adam and their like keep Adam's two moments; so does LAMB.
    return {"muon": "muon"}.get(kind, "adamw")
