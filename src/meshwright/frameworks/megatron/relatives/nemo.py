"""Write a plan for Megatron-Bridge (NeMo): a recipe and the Hydra overrides that make it train the plan.

A recipe has values of its own, so every choice of a plan is written, also those that are off. Names are fields of
megatron-bridge 0.3.1 and of the classes of megatron-core 0.16.1 that it builds on.
"""

from __future__ import annotations

from meshwright.frameworks.contract import Exported, Format, Inexpressible
from meshwright.frameworks.megatron import script
from meshwright.frameworks.megatron.arguments import Arguments, Words
from meshwright.frameworks.megatron.write import say
from meshwright.plans import Job, Plan

FILE = "pretrain_nemo.sh"
_RECIPES = {
    "llama2-7b": "llama2_7b", "llama3-8b": "llama3_8b", "llama3-70b": "llama3_70b", "llama3.1-8b": "llama31_8b",
    "llama3.1-70b": "llama31_70b", "llama3.3-70b": "llama31_70b", "llama3.1-405b": "llama31_405b",
    "llama3.2-1b": "llama32_1b", "llama3.2-3b": "llama32_3b", "gpt3-175b": "gpt3_175b",
    "qwen2.5-0.5b": "qwen25_500m", "qwen2.5-1.5b": "qwen25_1p5b", "qwen2.5-7b": "qwen25_7b",
    "qwen2.5-14b": "qwen25_14b", "qwen2.5-32b": "qwen25_32b", "qwen2.5-72b": "qwen25_72b", "qwen3-0.6b": "qwen3_600m",
    "qwen3-1.7b": "qwen3_1p7b", "qwen3-4b": "qwen3_4b", "qwen3-8b": "qwen3_8b", "qwen3-14b": "qwen3_14b",
    "qwen3-32b": "qwen3_32b", "qwen3-30b-a3b": "qwen3_30b_a3b", "qwen3-235b-a22b": "qwen3_235b_a22b",
    "deepseek-v2-lite": "deepseek_v2_lite", "deepseek-v3": "deepseek_v3", "kimi-k2": "kimi_k2",
}  # fmt: skip
_FAMILIES = {  # a recipe whose shape is overridden, for models without their own
    "gpt2": "gpt3_175b", "llama": "llama3_8b", "qwen2": "qwen25_7b", "qwen3": "qwen3_8b", "qwen3_moe": "qwen3_30b_a3b",
    "deepseek_v2": "deepseek_v2_lite", "deepseek_v3": "deepseek_v3", "kimi_k2": "kimi_k2",
}  # fmt: skip
_PRECISIONS = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
# Choices of a plan by argument, with the default of each.
_FIELDS: dict[str, tuple[str, str]] = {
    "tensor-model-parallel-size": ("model.tensor_model_parallel_size", "1"),
    "pipeline-model-parallel-size": ("model.pipeline_model_parallel_size", "1"),
    "num-virtual-stages-per-pipeline-rank": ("model.virtual_pipeline_model_parallel_size", "null"),
    "pipeline-model-parallel-layout": ("model.pipeline_model_parallel_layout", "null"),
    "microbatch-group-size-per-virtual-pipeline-stage": ("model.microbatch_group_size_per_vp_stage", "null"),
    "context-parallel-size": ("model.context_parallel_size", "1"),
    "cp-comm-type": ("model.cp_comm_type", "null"),
    "hierarchical-context-parallel-sizes": ("model.hierarchical_context_parallel_sizes", "null"),
    "sequence-parallel": ("model.sequence_parallel", "false"),
    "expert-model-parallel-size": ("model.expert_model_parallel_size", "1"),
    "expert-tensor-parallel-size": ("model.expert_tensor_parallel_size", "null"),
    "tp-comm-overlap": ("model.tp_comm_overlap", "false"),
    "recompute-granularity": ("model.recompute_granularity", "null"),
    "recompute-method": ("model.recompute_method", "null"),
    "recompute-num-layers": ("model.recompute_num_layers", "null"),
    "recompute-modules": ("model.recompute_modules", "null"),
    "cpu-offloading-num-layers": ("model.cpu_offloading_num_layers", "0"),
    "use-distributed-optimizer": ("ddp.use_distributed_optimizer", "false"),
    "overlap-grad-reduce": ("ddp.overlap_grad_reduce", "false"),
    "overlap-param-gather": ("ddp.overlap_param_gather", "false"),
    "num-distributed-optimizer-instances": ("ddp.num_distributed_optimizer_instances", "1"),
    "use-megatron-fsdp": ("ddp.use_megatron_fsdp", "false"),
    "data-parallel-sharding-strategy": ("ddp.data_parallel_sharding_strategy", "no_shard"),
    "use-tp-pp-dp-mapping": ("dist.use_tp_pp_dp_mapping", "false"),
    "micro-batch-size": ("train.micro_batch_size", "1"),
    "global-batch-size": ("train.global_batch_size", "1"),
    "seq-length": ("dataset.seq_length", "4096"),
    "optimizer": ("optimizer.optimizer", "adam"),
    "use-precision-aware-optimizer": ("optimizer.use_precision_aware_optimizer", "false"),
    "exp-avg-dtype": ("optimizer.exp_avg_dtype", "torch.float32"),
    "exp-avg-sq-dtype": ("optimizer.exp_avg_sq_dtype", "torch.float32"),
    "optimizer-cpu-offload": ("optimizer.optimizer_cpu_offload", "false"),
    "optimizer-offload-fraction": ("optimizer.optimizer_offload_fraction", "0.0"),
    "overlap-cpu-optimizer-d2h-h2d": ("optimizer.overlap_cpu_optimizer_d2h_h2d", "false"),
}
_SHAPE = {
    "num-layers": "num_layers", "hidden-size": "hidden_size", "ffn-hidden-size": "ffn_hidden_size",
    "num-attention-heads": "num_attention_heads", "num-query-groups": "num_query_groups", "kv-channels": "kv_channels",
    "rotary-base": "rotary_base", "norm-epsilon": "layernorm_epsilon", "num-experts": "num_moe_experts",
    "moe-router-topk": "moe_router_topk", "moe-ffn-hidden-size": "moe_ffn_hidden_size",
    "moe-shared-expert-intermediate-size": "moe_shared_expert_intermediate_size", "q-lora-rank": "q_lora_rank",
    "kv-lora-rank": "kv_lora_rank", "qk-head-dim": "qk_head_dim", "qk-pos-emb-head-dim": "qk_pos_emb_head_dim",
    "v-head-dim": "v_head_dim", "attention-dropout": "attention_dropout", "hidden-dropout": "hidden_dropout",
}  # fmt: skip
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp8": "torch.uint8"}


def write(job: Job, plan: Plan) -> Exported:
    """Return a script that starts the recipe with every override."""
    if job.precision not in _PRECISIONS:
        raise Inexpressible(f"recipes train in {', '.join(_PRECISIONS)}, not in {job.precision}")
    said = say(job, plan)
    arguments = {name: words for group in said.groups.values() for name, words in group.items()}
    recipe, own = _recipe(job)
    lines = [f"{key}={value}" for key, value in overrides(job, arguments, said.uniform.schedule.virtual, own).items()]
    nodes = script.nodes_of(job, said.plan)
    start = f"BRIDGE=~/Megatron-Bridge NODE_RANK=0 MASTER_ADDR=node0 bash {FILE}"
    text = script.head(
        job, "A recipe of Megatron-Bridge", ["Start it on every node, with its own NODE_RANK:", f"  {start}"]
    )
    text += [
        "BRIDGE=${BRIDGE:-Megatron-Bridge}  # a checkout of NVIDIA-NeMo/Megatron-Bridge",
        *script.launch_variables(nodes),
    ]
    text += [f"RECIPE=${{RECIPE:-{recipe}}}", "DATASET=${DATASET:-llm-pretrain-mock}", ""]
    text += ["OVERRIDES=(", *(f"    {script.quoted(line)}" for line in lines), ")", ""]
    launch = script.torchrun("$BRIDGE/scripts/training/run_recipe.py", ["OVERRIDES"])
    text += [line.replace('.py" ', '.py" --recipe "$RECIPE" --dataset "$DATASET" ') for line in launch]
    to_fill = ["data: DATASET=llm-pretrain and dataset.blend=... behind the script; llm-pretrain-mock makes data up"]
    if not own:
        to_fill.append(f"RECIPE: {job.model.name} has none of its own; the shape is written over that of {recipe}")
    files = {FILE: "\n".join(text) + "\n", "plan.json": said.plan.to_json()}
    return Exported(files, start, said.plan, said.missing, tuple(to_fill))


def _recipe(job: Job) -> tuple[str, bool]:
    """Return a recipe, and True if it is of this very model."""
    known = _RECIPES.get(job.model.reference) if isinstance(job.model.reference, str) else None
    family = _FAMILIES.get(job.model.family)
    if known is None and family is None:
        raise Inexpressible(f"Megatron-Bridge has no recipe like a {job.model.family} model")
    return f"{known or family}_pretrain_config", known is not None


def overrides(job: Job, arguments: Arguments, virtual: int, own: bool) -> dict[str, str]:
    """Return key to value, in the order that people read."""
    found = {key: _value(name, arguments.get(name), usual) for name, (key, usual) in _FIELDS.items()}
    found["model.virtual_pipeline_model_parallel_size"] = str(virtual) if virtual > 1 else "null"
    found["model.seq_length"] = found["dataset.seq_length"]
    found["model.cpu_offloading"] = str("cpu-offloading-num-layers" in arguments).lower()
    ahead = virtual > 1 and "no-overlap-p2p-communication" not in arguments
    found |= {"model.overlap_p2p_comm": str(ahead).lower(), "model.batch_p2p_comm": str(not ahead).lower()}
    found["optimizer.use_distributed_optimizer"] = found["ddp.use_distributed_optimizer"]
    found["dist.use_megatron_fsdp"] = found["ddp.use_megatron_fsdp"]
    if "ckpt-format" in arguments:
        found["checkpoint.ckpt_format"] = arguments["ckpt-format"][0]
    found["mixed_precision"] = _PRECISIONS[job.precision]
    found["comm_overlap"] = "null"  # it would override the plan's overlap with the recipe's
    if not own:
        found |= {f"model.{field}": arguments[name][0] for name, field in _SHAPE.items() if name in arguments}
    return found


def _value(name: str, words: Words | None, usual: str) -> str:
    if words is None:
        return usual
    if not words:
        return "true"
    if name in {"hierarchical-context-parallel-sizes", "recompute-modules"}:
        return f"[{','.join(words)}]"
    if name.endswith("-dtype"):
        return _DTYPES[words[0]]
    return f'"{words[0]}"' if name == "pipeline-model-parallel-layout" else words[0]


FORMAT = Format("nemo", "Megatron-Bridge (NeMo)", "megatron", write)
