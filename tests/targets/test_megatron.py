"""Exports held against megatron-core itself: its configuration classes, its layouts, its groups of ranks.

Arguments become fields as `core_transformer_config_from_args` of Megatron-LM makes them
(megatron/training/arguments.py, commit 000c4ac24f). What asks for Transformer Engine, which needs a GPU, is left at its
default: fused permutation, 8- and 4-bit formats, moments in fewer bits.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import meshwright as mw
from meshwright.frameworks.megatron.arguments import INTEGERS, NUMBERS, Arguments
from meshwright.frameworks.megatron.pipeline_layout import layout_text
from meshwright.frameworks.megatron.write import say
from meshwright.plans.spans import layer_range
from tests.frameworks.plans import jobs_and_plans
from tests.packages import installed

warnings.filterwarnings("ignore")
if not installed("megatron.core"):
    pytest.skip("megatron-core is not installed: make targets", allow_module_level=True)

NEEDS_ENGINE = {
    "moe-permute-fusion", "fp8-format", "fp8-recipe", "fp4-format", "fp4-recipe", "use-precision-aware-optimizer",
    "exp-avg-dtype", "exp-avg-sq-dtype", "optimizer-cpu-offload", "optimizer-offload-fraction",
    "overlap-cpu-optimizer-d2h-h2d", "moe-router-padding-for-fp8", "tp-comm-overlap",
}  # fmt: skip
RENAMED = {
    "num-experts": "num_moe_experts",
    "norm-epsilon": "layernorm_epsilon",
    "microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
    "num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
}
OFF = {"disable-bias-linear": "add_bias_linear", "no-overlap-p2p-communication": "overlap_p2p_comm"}
QUIET = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def arguments_of(job: mw.Job, plan: mw.Plan) -> Arguments:
    found = say(job, plan)
    assert found.missing == ()
    return {name: words for group in found.groups.values() for name, words in group.items() if name not in NEEDS_ENGINE}


def value(name: str, words: tuple[str, ...]) -> Any:
    if not words:
        return True
    if name == "window-size":
        return tuple(map(int, words[0].split(",")))
    if name in {"moe-layer-freq", "window-attn-skip-freq"}:
        return eval(words[0], {"__builtins__": {}})  # as `moe_freq_type` does
    if name in {"hierarchical-context-parallel-sizes"}:
        return list(map(int, words))
    if name in {"recompute-modules"}:
        return list(words)
    return int(words[0]) if name in INTEGERS else float(words[0]) if name in NUMBERS else words[0]


def fields_of(kind: type, said: Arguments) -> dict[str, Any]:
    """The arguments that are fields of a class."""
    names = {field.name for field in dataclasses.fields(kind)}
    made: dict[str, Any] = {}
    for name, words in said.items():
        field = RENAMED.get(name, name.replace("-", "_"))
        if name in OFF and OFF[name] in names:
            made[OFF[name]] = False
        elif field in names:
            made[field] = value(name, words)
    return made


def transformer(said: Arguments) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if "multi-latent-attention" in said else TransformerConfig
    made = fields_of(kind, said)
    made["num_query_groups"] = made.get("num_query_groups") if "group-query-attention" in said else None
    made["pipeline_dtype"] = torch.bfloat16
    if "swiglu" in said:
        made |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    made["cpu_offloading"] = bool(made.get("cpu_offloading_num_layers"))
    return kind(**made)


@QUIET
@given(jobs_and_plans())
def test_the_configuration_classes_take_it(pair: tuple[mw.Job, mw.Plan]) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    job, plan = pair
    said = arguments_of(job, plan)
    config, strategy = transformer(said), plan.pipelines[0].stages[0].spans[0]
    assert config.tensor_model_parallel_size == strategy.tp
    assert config.context_parallel_size == strategy.ulysses * strategy.ring
    assert bool(config.sequence_parallel) == strategy.sp
    assert config.expert_model_parallel_size == strategy.ep
    assert config.num_layers == len(job.model.blocks)
    if any(layer.experts for layer in job.model.layers):
        assert config.expert_tensor_parallel_size == strategy.etp
        dense = [layer.kind == "mlp" for layer in job.model.layers if layer.kind in {"mlp", "moe"}]
        every = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [1] * len(dense)
        assert [not expert for expert in every] == dense
    replicas = DistributedDataParallelConfig(**fields_of(DistributedDataParallelConfig, said))
    assert replicas.use_distributed_optimizer == (strategy.zero > 0 and job.optimizer != "muon")
    if strategy.zero_group:
        assert replicas.num_distributed_optimizer_instances == strategy.replicas // strategy.zero_group
    OptimizerConfig(**fields_of(OptimizerConfig, said))


@QUIET
@given(jobs_and_plans())
def test_its_stages_have_our_blocks(pair: tuple[mw.Job, mw.Plan]) -> None:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    job, plan = pair
    config = transformer(arguments_of(job, plan))
    pipeline = plan.pipelines[0]
    groups = len(pipeline.stages) // pipeline.schedule.virtual
    assert (config.virtual_pipeline_model_parallel_size or 1) == pipeline.schedule.virtual
    for i, stage in enumerate(pipeline.stages):
        names = [layer_range(job.model, span.layers) for span in stage.spans]
        ours = {job.model.layers[j].block for r in names for j in r} - {""}
        layout, rank, chunk = config.pipeline_model_parallel_layout, i % groups, i // groups
        if layout is None:
            theirs = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=rank)
        else:
            theirs = layout.layout[rank][chunk].count(LayerType.decoder)
        assert theirs == len(ours)


@QUIET
@given(jobs_and_plans())
def test_its_ranks_lie_where_our_devices_do(pair: tuple[mw.Job, mw.Plan]) -> None:
    from megatron.core.parallel_state import RankGenerator

    job, plan = pair
    said = arguments_of(job, plan)
    pipeline = plan.pipelines[0]
    span = pipeline.stages[0].spans[0]
    groups = len(pipeline.stages) // pipeline.schedule.virtual
    order = "tp-cp-ep-pp-dp" if "use-tp-pp-dp-mapping" in said else "tp-cp-ep-dp-pp"
    ranks = RankGenerator(tp=span.tp, ep=1, dp=span.dp, pp=groups, cp=span.ulysses * span.ring, order=order)
    for group in ranks.get_ranks("pp"):
        assert all(rank in pipeline.stages[i].ranks for i, rank in enumerate(group))
    stage = pipeline.stages[0].ranks
    for axis, degree in (("tp", span.tp), ("dp", span.dp)):
        groups_ = [group for group in ranks.get_ranks(axis) if group[0] in stage]
        assert all(len(group) == degree and set(group) <= set(stage) for group in groups_)
    for group in ranks.get_ranks("tp-cp"):
        if group[0] in stage:  # the devices of one replica
            assert len({span.replica(stage.index(rank)) for rank in group}) == 1
    for group in ranks.get_ranks("dp"):
        if group[0] in stage:
            assert [span.replica(stage.index(rank)) for rank in group] == list(range(span.dp))


@pytest.mark.parametrize(
    "blocks",
    [[19, 20, 20, 21], [0, 1, 2, 0], [1, 1], [3], [5, 5, 5, 5, 5, 7], [0, 40, 40, 0], [1, 2, 2, 2, 3, 3, 1, 0]],
)
def test_its_parser_reads_our_layouts(blocks: list[int]) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout as Layout

    stages = Layout.parse_str_to_list(layout_text(blocks))
    assert [[layer.name for layer in stage].count("decoder") for stage in stages] == blocks
    assert stages[0][0].name == "embedding"
    assert stages[-1][-1].name == "loss"
