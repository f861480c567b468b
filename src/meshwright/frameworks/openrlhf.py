"""Write a plan for OpenRLHF as flags of its trainers.

Names are as in OpenRLHF 0.11.2 (openrlhf/cli/train_sft.py; train_ppo_ray.py takes the same `--ds.` flags for its
actor). It runs DeepSpeed, with AutoTP and ring attention.
"""

from __future__ import annotations

from meshwright.frameworks.contract import Exported, Format
from meshwright.frameworks.shared.launch_command import processes
from meshwright.frameworks.shared.nearest_plan import Draft
from meshwright.frameworks.shared.texts import script
from meshwright.plans import Job, Plan

_FILL = ("--model.model_name_or_path and --data.dataset, with --data.input_key: your model and data",)


def write(job: Job, plan: Plan) -> Exported:
    """Return a plan as a script that starts supervised fine-tuning."""
    draft = Draft.of(job, plan)
    _narrow(draft)
    uniform, strategy = draft.uniform, draft.uniform.strategy
    flags = {
        "--train.batch_size": draft.job.global_batch,
        "--train.micro_batch_size": uniform.micro_batch(draft.job),
        "--data.max_len": draft.job.seq_len,
        "--ds.zero_stage": strategy.zero,
        "--ds.param_dtype": draft.job.precision,
        "--ds.tensor_parallel_size": strategy.tp,
        "--ds.ring_attn_size": strategy.ring,
        "--optim": {"adamw": "adam"}.get(draft.job.optimizer, draft.job.optimizer),
    }
    switches = {
        "--ds.packing_samples": strategy.ring > 1,  # ring attention asks for it (train_sft.py)
        "--ds.adam_offload": bool(strategy.offload.optimizer),
        "--ds.overlap_comm": uniform.overlap.gradients,
        "--model.gradient_checkpointing_enable": strategy.recompute == "full",
    }
    words = [f"{name} {value}" for name, value in flags.items()] + [name for name, on in switches.items() if on]
    nodes, each = processes(job, plan)
    text = script(f"deepspeed --num_nodes {nodes} --num_gpus {each} --module openrlhf.cli.train_sft", words)
    return Exported({"openrlhf.sh": text}, "sh openrlhf.sh", draft.plan(), tuple(draft.missing), _FILL)


def _narrow(draft: Draft) -> None:
    draft.whole_heads()
    draft.without("pp", "ulysses")
    draft.only_schedules("1f1b")
    strategy = draft.uniform.strategy
    draft.without_experts()
    draft.without_sp("AutoTP has no sequence parallelism")
    draft.only_recompute(("none", "full"))
    draft.only_offload("optimizer")
    if draft.uniform.strategy.offload.optimizer and not strategy.zero:
        draft.say("zero=0: ZeRO-1 instead, without which the optimizer stays on the device", zero=1)
    draft.whole_group()
    draft.one_overlap("overlap: one switch for gradients and parameters (--ds.overlap_comm)")
    draft.only_precision("bf16", "fp16")
    draft.only_optimizer("adamw", "muon")


FORMAT = Format("openrlhf", "OpenRLHF", "", write)
