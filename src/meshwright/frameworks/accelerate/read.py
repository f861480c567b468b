"""Read Accelerate's configuration, YAML of two levels or JSON, as a plan."""

from __future__ import annotations

import re
from typing import Any

from meshwright.base.files import parse_json
from meshwright.errors import InputError, kind_of, shorten
from meshwright.frameworks.contract import Beside, Imported
from meshwright.frameworks.shared.config_fields import Fields, flat, job_of
from meshwright.frameworks.shared.fsdp import Grid, zero_of
from meshwright.plans import Plan

KNOWN = (
    "compute_environment", "debug", "main_training_function", "num_machines", "rdzv_backend", "same_network", "use_cpu",
    "machine_rank", "main_process_ip", "main_process_port", "gpu_ids", "enable_cpu_affinity", "downcast_bf16",
    "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_env", "tpu_vm", "commands", "command_file",
    "fsdp_config.fsdp_auto_wrap_policy", "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
    "fsdp_config.fsdp_state_dict_type", "fsdp_config.fsdp_cpu_ram_efficient_loading", "fsdp_config.fsdp_min_num_params",
    "fsdp_config.fsdp_backward_prefetch", "fsdp_config.fsdp_backward_prefetch_policy", "fsdp_config.fsdp_forward_prefetch",
    "fsdp_config.fsdp_use_orig_params", "fsdp_config.fsdp_sync_module_states", "dynamo_config.", "fp8_config.",
    "fsdp_config.fsdp_activation_checkpointing_offload", "parallelism_config.parallelism_config_cp_comm_strategy",
    "parallelism_config.parallelism_config_cp_backend", "parallelism_config.parallelism_config_sp_backend",
)  # fmt: skip
READ = (
    "distributed_type", "num_processes", "num_machines", "mixed_precision", "fsdp_config.fsdp_version",
    "fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward", "fsdp_config.fsdp_offload_params",
    "fsdp_config.fsdp_activation_checkpointing", "parallelism_config.parallelism_config_tp_size",
    "parallelism_config.parallelism_config_cp_size", "parallelism_config.parallelism_config_sp_size",
    "parallelism_config.parallelism_config_dp_replicate_size", "parallelism_config.parallelism_config_dp_shard_size",
)  # fmt: skip
_SHARDED = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
_F, _P = "fsdp_config.fsdp_", "parallelism_config.parallelism_config_"


def read(text: str, file: str, beside: Beside) -> Imported:
    """Return a plan from Accelerate's file; the user gives model, batch and length."""
    fields = Fields(flat(_table(text, file)), file)
    kind = fields.word("distributed_type", "", ("FSDP", "MULTI_GPU", "NO", "DEEPSPEED", "MEGATRON_LM"))
    if kind in {"DEEPSPEED", "MEGATRON_LM"}:
        name = {"DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"}[kind]
        raise fields.wrong("distributed_type", f"is {kind}", f"import that framework's own file (--from {name})")
    devices = beside.cluster.devices
    said = fields.whole("num_processes", devices)
    fields.agree("num_processes", said, f"the number of devices of {beside.cluster.name}", devices)
    assumed = ["batch sizes are the script's: micro-batches of 1 sample", "recompute: none unless FSDP does it"]
    short = _degrees(fields, devices) if kind == "FSDP" else {"dp": devices, "zero": 0}
    kinds = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}
    precision = kinds[fields.word("mixed_precision", "no", kinds)]
    job = job_of(fields, beside, batch=None, precision=precision)
    again = fields.flag(_F + "activation_checkpointing")
    host = float(fields.flag(_F + "offload_params"))
    short |= {"recompute": "full" if again else "none", "offload": {"optimizer": host, "parameters": host}}
    plan = Plan.of(short, job)
    unknown, unused = fields.rest(KNOWN)
    return Imported(job, plan, unknown, unused, tuple(assumed))


def _degrees(fields: Fields, devices: int) -> dict[str, Any]:
    fields.raw(_F + "version")  # FSDP1 and FSDP2 shard alike
    strategy = fields.raw(_F + "sharding_strategy", fields.raw(_F + "reshard_after_forward", True))
    strategy = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}.get(
        str(strategy), strategy
    )
    if strategy == "NO_SHARD":
        return {"dp": devices, "zero": 0}
    if not isinstance(strategy, bool) and str(strategy) not in _SHARDED:
        raise fields.wrong(_F + "reshard_after_forward", f"is {strategy}", f"true, false, {', '.join(_SHARDED)}")
    reshard = strategy if isinstance(strategy, bool) else _SHARDED[strategy]
    tp, ring = fields.whole(_P + "tp_size", 1), fields.whole(_P + "cp_size", 1)
    ulysses = fields.whole(_P + "sp_size", 1)
    by_node = fields.whole("num_machines", 1) if str(strategy).startswith("HYBRID") else 1  # FSDP1 shards inside a node
    replicate = fields.whole(_P + "dp_replicate_size", by_node)
    shard = fields.whole(_P + "dp_shard_size", devices // (replicate * tp * ring * ulysses) or 1)
    if replicate * shard * tp * ring * ulysses != devices:
        product = f"{replicate} x {shard} x {tp} x {ring} x {ulysses} = {replicate * shard * tp * ring * ulysses}"
        raise fields.wrong(_P + "dp_shard_size", f"dp_replicate x dp_shard x tp x cp x sp is {product}, not {devices}")
    zero = zero_of(Grid(replicate, shard, reshard), ring)
    return {"dp": replicate * shard, "tp": tp, "ring": ring, "ulysses": ulysses, "sp": False, **zero}


def _table(text: str, file: str) -> dict[str, Any]:
    if text.lstrip().startswith("{"):
        table = parse_json(text, file)
        if not isinstance(table, dict):
            raise InputError(f"holds {kind_of(table)}, expected an object", file=file)
        return table
    return _yaml(text, file)


def _yaml(text: str, file: str) -> dict[str, Any]:
    """Return names and plain values of YAML with one level of indentation, as Accelerate writes it."""
    table: dict[str, Any] = {}
    inside: dict[str, Any] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        bare = re.sub(r"(^|\s)#.*$", "", line).rstrip()
        if not bare or bare == "---":
            continue
        match = re.fullmatch(r"(\s*)([\w]+):(?:\s+(.*))?", bare)
        if not match:
            raise InputError(f"'{shorten(bare.strip(), 40)}' is not NAME: VALUE", file=file, line=number, column=1)
        indent, name, value = match.groups()
        where = table
        if indent:
            if inside is None:
                raise InputError(f"{name} is indented under nothing", file=file, line=number, column=1)
            where = inside
        if name in where:
            raise InputError(f"{name} appears twice", file=file, line=number, column=1)
        if value is None and not indent:
            inside = table[name] = {}
        else:
            where[name] = _scalar(value or "")
            inside = inside if indent else None
    return table


def _scalar(text: str) -> Any:
    plain = text.strip().strip("'\"")
    if plain != text.strip():
        return plain
    if plain.lower() in {"true", "false"}:
        return plain.lower() == "true"
    if re.fullmatch(r"-?\d{1,9}", plain):
        return int(plain)
    return None if plain in {"null", "~", ""} else plain
