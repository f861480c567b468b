"""Write a plan for Hugging Face Accelerate: the file of `accelerate launch`, FSDP2 with its grid of degrees.

Fields as Accelerate 1.15.0 reads them (commands/config/config_args.py, ClusterConfig; commands/launch.py;
parallelism_config.py). Batch sizes belong to the script: the command passes them as arguments of Transformers' Trainer.
"""

from __future__ import annotations

from typing import Any

from meshwright.frameworks.accelerate.read import READ, read
from meshwright.frameworks.contract import Exported, Format
from meshwright.frameworks.shared.fsdp import Grid, grid_of
from meshwright.frameworks.shared.launch_command import processes
from meshwright.frameworks.shared.nearest_plan import Draft
from meshwright.frameworks.shared.texts import yaml
from meshwright.plans import Job, Plan

_PREFIX = "parallelism_config_"
_FILL = (
    "train.py: a script of Transformers' Trainer, or one that takes the same arguments, with its model and data",
    "main_process_ip and machine_rank, on several nodes (or --main_process_ip and --machine_rank in the command)",
)


def write(job: Job, plan: Plan) -> Exported:
    """Return a plan as Accelerate's configuration."""
    draft = Draft.of(job, plan)
    draft.whole_heads()
    draft.without("pp", "ulysses")  # its Ulysses is DeepSpeed's, and takes that format
    draft.only_schedules("1f1b")
    strategy = draft.uniform.strategy
    draft.without_experts()
    draft.without_sp("the model's own plan of tensor parallelism decides; off")
    draft.only_recompute(("none", "full"))
    both = draft.uniform.strategy.offload
    draft.only_offload(*(("optimizer", "parameters") if both.optimizer and both.parameters else ()))
    draft.no_overlap_choices()
    draft.only_precision("bf16", "fp16", "fp32")
    draft.only_optimizer("adamw")
    grid = _grid(draft)
    if _plain_replicas(grid, strategy.tp * strategy.ring):
        _without_fsdp(draft)
    micro, steps = draft.uniform.micro_batch(draft.job), draft.uniform.micro_batches
    nodes, each = processes(job, plan)
    text = yaml(_table(draft, grid, nodes, nodes * each if nodes > 1 else each))
    command = "accelerate launch --config_file accelerate.yaml train.py"
    command += f" --per_device_train_batch_size {micro} --gradient_accumulation_steps {steps}"
    return Exported({"accelerate.yaml": text}, command, draft.plan(), tuple(draft.missing), _FILL[: 1 + (nodes > 1)])


def _grid(draft: Draft) -> Grid:
    """Return FSDP2's grid; unsharded replicas exclude tensor parallelism and a ring (parallelism_config.py)."""
    grid = grid_of(draft)
    strategy = draft.uniform.strategy
    if grid.reshard is None and strategy.dp == 1 and strategy.tp > 1:
        draft.say("zero=0: FSDP over one replica counts as ZeRO-2", zero=2)
    if grid.replicate > 1 and grid.shard == 1 and (strategy.tp > 1 or strategy.ring > 1):
        zero = max(strategy.zero, 2)
        draft.say(
            f"replicas that share nothing go with no other cut: ZeRO-{zero} over all of them", zero=zero, zero_group=0
        )
        grid = grid_of(draft)
    return grid


def _without_fsdp(draft: Draft) -> None:
    """Drop recompute and offload for unsharded replicas: only FSDP does them."""
    if draft.uniform.strategy.recompute == "full":
        draft.say("recompute=full: FSDP would do it, and nothing is sharded; the script may", recompute="none")
    draft.only_offload()


def _table(draft: Draft, grid: Grid, nodes: int, processes_: int) -> dict[str, Any]:
    strategy = draft.uniform.strategy
    table: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_GPU" if _plain_replicas(grid, strategy.tp * strategy.ring) else "FSDP",
        "main_training_function": "main",
        "mixed_precision": {"fp32": "no"}.get(draft.job.precision, draft.job.precision),
        "num_machines": nodes,
        "num_processes": processes_,
        "rdzv_backend": "static" if nodes == 1 else "c10d",
        "same_network": True,
        "use_cpu": False,
    }
    if table["distributed_type"] == "MULTI_GPU":
        return table
    table["fsdp_config"] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": bool(grid.reshard),
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": strategy.recompute == "full",
        "fsdp_offload_params": bool(strategy.offload.parameters),
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
    }
    sizes = {"dp_replicate": grid.replicate, "dp_shard": grid.shard, "tp": strategy.tp, "cp": strategy.ring}
    table["parallelism_config"] = {f"{_PREFIX}{name}_size": size for name, size in sizes.items()}
    return table


def _plain_replicas(grid: Grid, cut: int) -> bool:
    return grid.reshard is None and cut == 1


FORMAT = Format("accelerate", "Hugging Face Accelerate", "fsdp", write, read, frozenset(READ))
