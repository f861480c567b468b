"""Write a plan for DeepSpeed as `ds_config.json`.

Field names are as DeepSpeed 0.19.6 reads them (runtime/config.py, runtime/zero/config.py,
runtime/tensor_parallel/config.py, module_inject/auto_ep_config.py).
"""

from __future__ import annotations

from typing import Any

from meshwright.base.files import pretty_json
from meshwright.frameworks.contract import Exported, Format
from meshwright.frameworks.deepspeed.read import READ, read
from meshwright.frameworks.shared.launch_command import processes
from meshwright.frameworks.shared.nearest_plan import Draft
from meshwright.plans import Job, Plan
from meshwright.plans.strategy import Strategy

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "muon": {"type": "Muon", "params": {"lr": 3e-4, "weight_decay": 0.1}},
    "sgd": {"type": "SGD", "params": {"lr": 3e-4}},
    "sgd-momentum": {"type": "SGD", "params": {"lr": 3e-4, "momentum": 0.9}},
}
_SCRIPT = "a training script that calls deepspeed.initialize(config='ds_config.json', ...), and its data"
_LR = "optimizer.params.lr: 0.0003 is written, for want of a learning rate in the plan"


def write(job: Job, plan: Plan) -> Exported:
    """Return a plan as DeepSpeed's configuration."""
    draft = Draft.of(job, plan)
    _narrow(draft)
    table = _table(draft)
    nodes, each = processes(job, plan)
    command = f"deepspeed --num_nodes {nodes} --num_gpus {each} train.py --deepspeed_config ds_config.json"
    files = {"ds_config.json": pretty_json(table, 60)}
    return Exported(files, command, draft.plan(), tuple(draft.missing), _to_fill(draft.uniform.strategy))


def _narrow(draft: Draft) -> None:
    """Drop what DeepSpeed cannot express, or does only by a model's own code."""
    draft.whole_heads()
    draft.without("ring", "pp")  # its pipeline is a PipelineModule of the user's, with ZeRO-1 at most
    strategy = draft.uniform.strategy
    if strategy.sp:
        draft.say("sp: AutoTP has no sequence parallelism; norms see the whole sequence", sp=False)
    if strategy.tp > 1 and strategy.ulysses > 1:  # runtime/engine.py: AutoTP and sequence groups exclude each other
        draft.without("tp")
    draft.only_recompute(("none", "full"))
    strategy = draft.uniform.strategy
    draft.only_offload(
        "optimizer",
        *(("parameters",) if strategy.zero == 3 else ()),
        *(("activations",) if strategy.recompute == "full" else ()),
    )
    if draft.uniform.strategy.offload.optimizer and not strategy.zero:
        draft.say("zero=0: ZeRO-1 instead, without which the optimizer stays on the device", zero=1)
    if strategy.zero != 3:  # MiCS cuts into groups, under ZeRO-3 only
        draft.whole_group()
    draft.only_schedules("1f1b")
    draft.only_precision("bf16", "fp16", "fp32")
    draft.only_optimizer(*OPTIMIZERS)
    on = str(draft.uniform.overlap.gradients).lower()
    draft.one_overlap(f"overlap: overlap_comm={on} for gradients and parameters alike")


def _table(draft: Draft) -> dict[str, Any]:
    job, uniform, strategy = draft.job, draft.uniform, draft.uniform.strategy
    table: dict[str, Any] = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": uniform.micro_batch(job),
        "gradient_accumulation_steps": uniform.micro_batches,
        "gradient_clipping": 1.0,
        "optimizer": OPTIMIZERS[job.optimizer],
        "zero_optimization": _zero(strategy) | {"overlap_comm": uniform.overlap.gradients},
    }
    if job.precision != "fp32":
        table[job.precision] = {"enabled": True}
    if strategy.ulysses > 1:  # both are read, to lay out the grid (deepspeed/__init__.py, initialize)
        table |= {"sequence_parallel_size": strategy.ulysses, "data_parallel_size": strategy.dp}
    if strategy.tp > 1:
        table["tensor_parallel"] = {"autotp_size": strategy.tp}
    if strategy.ep > 1 or strategy.etp > 1:
        table["expert_parallel"] = {
            "enabled": True,
            "autoep_size": strategy.ep,
            "expert_tensor_parallel_size": strategy.etp,
        }
    if strategy.recompute == "full":
        table["activation_checkpointing"] = {
            "partition_activations": False,
            "cpu_checkpointing": bool(strategy.offload.activations),
        }
    return table


def _zero(strategy: Strategy) -> dict[str, Any]:
    table: dict[str, Any] = {"stage": strategy.zero}
    if strategy.zero_group:
        table["mics_shard_size"] = strategy.zero_group
    if strategy.offload.optimizer:
        table["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if strategy.offload.parameters:
        table["offload_param"] = {"device": "cpu", "pin_memory": True}
    return table


def _to_fill(strategy: Strategy) -> tuple[str, ...]:
    lines = [_SCRIPT, _LR]
    if strategy.recompute == "full":
        lines.append("recomputation is the model's: model.gradient_checkpointing_enable() in the script")
    if strategy.zero_group:
        lines.append("MiCS: build the model inside deepspeed.zero.MiCS_Init(config_dict_or_path='ds_config.json')")
    if strategy.ulysses > 1:
        lines.append("Ulysses: register its attention in the script (UlyssesSPAttentionHF.register_with_transformers)")
    return tuple(lines)


FORMAT = Format("deepspeed", "DeepSpeed", "deepspeed", write, read, frozenset(READ))
