"""Write a plan for AReaL: the backend string of an engine, in the YAML that holds it.

An example is `megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)`. The grammar is that of AReaL 1.0.4 (areal/api/alloc_mode.py,
ALLOCATION_GRAMMAR). Names of fields are those of areal/api/cli_args.py (TrainEngineConfig, MicroBatchSpec,
FSDPEngineConfig, MegatronEngineConfig, ClusterSpecConfig).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.frameworks.contract import Exported, Format
from meshwright.frameworks.shared.launch_command import processes
from meshwright.frameworks.shared.nearest_plan import Draft
from meshwright.frameworks.shared.texts import yaml
from meshwright.frameworks.shared.uniform_plan import dealt
from meshwright.plans import Job, Plan
from meshwright.plans.strategy import Strategy

_FILL = (
    "experiment_name, trial_name, actor.path, tokenizer_path, train_dataset.path: of your experiment",
    "rollout.backend: how answers are generated is no part of a training plan",
)


def write(job: Job, plan: Plan) -> Exported:
    """Return a plan as AReaL's YAML, to be merged into an experiment's."""
    draft = Draft.of(job, plan)
    strategy = draft.uniform.strategy
    megatron = max(strategy.ring, strategy.ep, strategy.etp, draft.uniform.groups) > 1
    _narrow(draft, megatron)
    backend = megatron_backend(draft.uniform.strategy, draft.uniform.groups) if megatron else _fsdp_backend(draft)
    nodes, each = processes(job, plan)
    table = {"cluster": {"n_nodes": nodes, "n_gpus_per_node": each}, "actor": _actor(draft, backend, megatron)}
    table["train_dataset"] = {"batch_size": draft.job.global_batch, "max_length": draft.job.seq_len}
    command = "python3 train.py --config areal.yaml"
    return Exported({"areal.yaml": yaml(table)}, command, draft.plan(), tuple(draft.missing), _FILL)


def _narrow(draft: Draft, megatron: bool) -> None:
    if megatron:
        draft.only_schedules("1f1b", "interleaved")
        strategy = draft.uniform.strategy
        if strategy.ulysses > 1:
            draft.say(
                "ulysses: Megatron's context parallelism is a ring", ulysses=1, ring=strategy.ulysses * strategy.ring
            )
        if strategy.zero != 1:
            draft.say(f"zero={strategy.zero}: Megatron's distributed optimizer (ZeRO-1)", zero=1)
        draft.only_recompute(("none", "full"))
        draft.only_offload()
        _even(draft)
    else:
        draft.whole_heads()
        draft.only_schedules("1f1b")
        draft.only_zero((3,))
        draft.only_recompute(("none", "full"))
        both = draft.uniform.strategy.offload
        draft.only_offload(*(("optimizer", "parameters") if both.optimizer and both.parameters else ()))
    draft.whole_group()
    strategy = draft.uniform.strategy
    if strategy.tp > 1 and not strategy.sp:
        draft.say("sp: on with tensor parallelism", sp=True)
    draft.no_overlap_choices()
    draft.only_precision("bf16", "fp16", "fp32")
    draft.only_optimizer("adamw")


def _even(draft: Draft) -> None:
    """Megatron deals blocks out evenly where nothing else is said, and this is all AReaL says."""
    blocks = draft.uniform.blocks
    even = dealt(sum(blocks), len(blocks))
    if blocks != even:
        draft.missing.append(f"stages of {', '.join(map(str, blocks))} blocks: dealt evenly")
        draft.uniform = replace(draft.uniform, blocks=even)


def megatron_backend(strategy: Strategy, groups: int) -> str:
    """Return the string of Megatron's engine; experts fold over the same devices.

    >>> megatron_backend(Strategy(dp=4, tp=2, ring=2, ep=2, etp=4), 2)
    'megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)'
    """
    degrees = f"d{strategy.dp}p{groups}t{strategy.tp}" + (f"c{strategy.ring}" if strategy.ring > 1 else "")
    if strategy.ep == strategy.etp == 1:
        return f"megatron:{degrees}"
    experts = f"d{strategy.expert_replicas}p{groups}t{strategy.etp}e{strategy.ep}"
    return f"megatron:(attn:{degrees}|ffn:{experts})"


def _fsdp_backend(draft: Draft) -> str:
    """Return the string of FSDP's engine, whose context parallelism is Ulysses."""
    strategy = draft.uniform.strategy
    parts = {"d": strategy.dp, "t": strategy.tp, "c": strategy.ulysses}
    return "fsdp:" + "".join(f"{name}{degree}" for name, degree in parts.items() if name == "d" or degree > 1)


def _actor(draft: Draft, backend: str, megatron: bool) -> dict[str, Any]:
    job, uniform = draft.job, draft.uniform
    full = uniform.strategy.recompute == "full"
    kinds = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    table: dict[str, Any] = {
        "backend": backend,
        "dtype": kinds[job.precision],
        "gradient_checkpointing": full,
        "mb_spec": {"n_mbs": uniform.micro_batches, "max_tokens_per_mb": uniform.micro_batch(job) * job.seq_len},
    }
    if not megatron:
        return table | {"fsdp": {"offload_params": bool(uniform.strategy.offload.parameters)}}
    again = ("full", "uniform", 1) if full else (None, None, None)
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    engine: dict[str, Any] = dict(zip(names, again, strict=True))
    if uniform.schedule.virtual > 1:
        engine["virtual_pipeline_parallel_size"] = uniform.schedule.virtual
    return table | {"megatron": engine}


FORMAT = Format("areal", "AReaL", "", write)
