"""Write a plan for verl: Hydra overrides for the actor, and equally for reference model and critic.

Names are as in the packaged YAML of verl 0.9.1 (verl/trainer/config/ppo_trainer.yaml and its parts). Reference model
settings that verl copies from the actor (`oc.select`) are not repeated.
"""

from __future__ import annotations

import shlex
from typing import Any

from meshwright.frameworks.contract import Exported, Format
from meshwright.frameworks.shared.launch_command import processes
from meshwright.frameworks.shared.nearest_plan import Draft
from meshwright.frameworks.shared.texts import script
from meshwright.frameworks.shared.uniform_plan import Uniform
from meshwright.plans import Job, Plan

_ACTOR = "actor_rollout_ref.actor"
_FILL = (
    "actor_rollout_ref.model.path and critic.model.path: the model's folder or name; data.train_files, data.val_files",
    "data.max_prompt_length: a quarter of the sequence is written; prompt and answer share the plan's length",
    "actor_rollout_ref.rollout.*: how answers are generated is no part of a training plan",
    "ppo_mini_batch_size counts prompts: divide it by rollout.n where a prompt has several answers",
)


def write(job: Job, plan: Plan) -> Exported:
    """Return a plan as a script that starts verl's PPO trainer."""
    draft = Draft.of(job, plan)
    strategy = draft.uniform.strategy
    cut = max(strategy.tp, strategy.ring, strategy.ep, draft.uniform.groups) > 1
    words = _megatron(draft) if cut else _fsdp(draft)
    nodes, each = processes(job, plan)
    common = _common(draft) | {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": each}
    lines = [shlex.quote(f"{name}={_value(value)}") for name, value in (words | common).items()]
    text = script("python3 -m verl.trainer.main_ppo", lines)
    return Exported({"verl.sh": text}, "sh verl.sh", draft.plan(), tuple(draft.missing), _FILL)


def _common(draft: Draft) -> dict[str, Any]:
    """Return batch, length and recompute; tokens per device are those of a micro-batch, cut over the sequence."""
    job, uniform = draft.job, draft.uniform
    micro = uniform.micro_batch(job)
    tokens = micro * job.seq_len // (uniform.strategy.ulysses * uniform.strategy.ring)
    table: dict[str, Any] = {
        "data.train_batch_size": job.global_batch,
        "data.max_prompt_length": max(job.seq_len // 4, 1),
        "data.max_response_length": job.seq_len - max(job.seq_len // 4, 1),
        f"{_ACTOR}.ppo_mini_batch_size": job.global_batch,
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": micro,
        f"{_ACTOR}.use_dynamic_bsz": True,
        f"{_ACTOR}.ppo_max_token_len_per_gpu": tokens,
        "actor_rollout_ref.model.enable_gradient_checkpointing": uniform.strategy.recompute == "full",
        "actor_rollout_ref.model.use_remove_padding": True,  # dynamic batches and Ulysses pack their samples
        "critic.ppo_max_token_len_per_gpu": tokens,
        "critic.model.enable_gradient_checkpointing": uniform.strategy.recompute == "full",
    }
    return table


def _fsdp(draft: Draft) -> dict[str, Any]:
    draft.only_schedules("1f1b")
    draft.only_recompute(("none", "full"))
    draft.only_zero((0, 2, 3))
    strategy = draft.uniform.strategy
    _usual(draft)
    size = -1
    if strategy.zero == 0:
        size = 1  # groups of one: nothing is sharded
    elif strategy.zero_group:
        size = strategy.zero_group
    table: dict[str, Any] = {"model_engine": "dp"}
    for place, engine in ((_ACTOR, "fsdp_config"), ("critic", "fsdp")):
        offload = draft.uniform.strategy.offload
        table |= {
            f"{place}.strategy": "fsdp2",
            f"{place}.{engine}.strategy": "fsdp2",
            f"{place}.{engine}.fsdp_size": size,
            f"{place}.{engine}.reshard_after_forward": strategy.zero == 3,
            f"{place}.{engine}.ulysses_sequence_parallel_size": strategy.ulysses,
            f"{place}.{engine}.param_offload": bool(offload.parameters),
            f"{place}.{engine}.optimizer_offload": bool(offload.optimizer),
        }
    return table | {
        f"{_ACTOR}.ulysses_sequence_parallel_size": strategy.ulysses,
        "critic.ulysses_sequence_parallel_size": strategy.ulysses,
        "actor_rollout_ref.ref.fsdp_config.param_offload": bool(strategy.offload.parameters),
    }


def _megatron(draft: Draft) -> dict[str, Any]:
    draft.only_schedules("1f1b", "interleaved")
    draft.only_recompute(("none", "selective", "full"))
    if draft.uniform.strategy.zero > 1:
        draft.say(f"zero={draft.uniform.strategy.zero}: Megatron's distributed optimizer (ZeRO-1)", zero=1)
    draft.whole_group()
    strategy = draft.uniform.strategy
    if strategy.ulysses > 1 and strategy.ring > 1:
        ring = strategy.ulysses * strategy.ring
        draft.say("ulysses and ring: one kind of context parallelism; a ring over both", ulysses=1, ring=ring)
    _usual(draft)
    strategy, uniform = draft.uniform.strategy, draft.uniform
    table: dict[str, Any] = {"model_engine": "megatron"}
    for place in (_ACTOR, "critic"):
        engine = f"{place}.megatron"
        table |= {
            f"{engine}.tensor_model_parallel_size": strategy.tp,
            f"{engine}.sequence_parallel": strategy.sp,
            f"{engine}.pipeline_model_parallel_size": uniform.groups,
            f"{engine}.context_parallel_size": strategy.ulysses * strategy.ring,
            f"{engine}.expert_model_parallel_size": strategy.ep,
            f"{engine}.expert_tensor_parallel_size": strategy.etp,
            f"{engine}.use_distributed_optimizer": strategy.zero == 1,
            f"{engine}.param_offload": bool(strategy.offload.parameters),
            f"{engine}.optimizer_offload": bool(strategy.offload.optimizer),
        }
        if uniform.schedule.virtual > 1:
            table[f"{engine}.virtual_pipeline_model_parallel_size"] = uniform.schedule.virtual
        table |= {f"{engine}.override_transformer_config.{name}": value for name, value in _recompute(draft).items()}
        more = f"+{engine}.override_transformer_config"  # fields of Megatron-Core's TransformerConfig
        if strategy.ulysses > 1:
            table[f"{more}.cp_comm_type"] = "a2a"
        if len(set(uniform.blocks)) > 1:
            table[f"{more}.pipeline_model_parallel_layout"] = _layout(uniform)
    return table


def _recompute(draft: Draft) -> dict[str, Any]:
    chosen = draft.uniform.strategy.recompute
    if chosen == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if chosen == "none":
        return {"recompute_granularity": None}
    experts = any(layer.experts for layer in draft.job.model.layers)
    line = "recompute=selective: Megatron repeats norms" + (" and experts' activations" if experts else "")
    if line not in draft.missing:
        draft.missing.append(line)
    modules = "[layernorm,moe_act]" if experts else "[layernorm]"
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def _layout(uniform: Uniform) -> str:
    """Return Megatron-Core's layout of a pipeline: E the embedding, t a block, L the loss; stages between bars."""
    stages = [f"t*{count}" if count else "" for count in uniform.blocks]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    return "|".join(stages)


def _usual(draft: Draft) -> None:
    """Set the usual choices: batches cut by tokens, and states offloaded between phases, whole or not at all."""
    draft.only_offload("optimizer", "parameters")
    draft.no_overlap_choices()
    draft.only_precision("bf16")
    draft.only_optimizer("adamw")


def _value(value: Any) -> str:
    return (
        {True: "True", False: "False", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)
    )


FORMAT = Format("verl", "verl", "", write)
