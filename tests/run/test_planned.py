"""What the planner answers for large models on few devices, run on small models of the same layers.

Memory that is too small for the model on its devices brings out what a planner has: stages, shards, repetition,
parameters, states and activations on the host, pipelines across kinds of devices.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import meshwright as mw
from tests.run.families import CONFIGS
from tests.run.parity import on_a_rank, plan_of, world_of
from tests.run.pool import pool

_LARGE = {
    "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000, "n_embd": 4096, "n_positions": 131072,
    "max_position_embeddings": 131072, "head_dim": 128, "moe_intermediate_size": 2048,
    "shared_expert_intermediate_size": 4096, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
JOBS = [  # model, devices, the part of their memory that there is, sequence
    ("tied-deep", "1xh100", 0.3, 2048),
    ("gpt2-deep", "1x1xa100-40gb+1x1xh100", 0.5, 8192),
    ("gpt2-deep", "2xh100", 0.12, 2048),
    ("gpt2-deep", "1xh100", 0.12, 8192),
    ("tied-deep", "4xh100", 0.08, 32768),
    ("deepseek-v3", "4xh100", 0.08, 32768),
    ("qwen3", "1x2xa100-40gb+1x2xh100", 1.0, 131072),
    ("tied-deep", "1x2xa100-40gb+1x2xh100", 0.5, 32768),
    ("tied-deep", "1x2xa100-40gb+1x2xh100", 0.2, 8192),
    ("moe-deep", "1x4xa100-80gb+1x2xh100", 0.12, 32768),
    ("mixtral", "2x4xa100-40gb", 0.5, 131072),
    ("mixtral", "4x2xrtx-4090", 1.0, 2048),
    ("deepseek-v3", "2x4xa100-40gb", 0.3, 32768),
    ("tied-deep", "4x2xrtx-4090", 0.08, 2048),
    ("llama-deep", "8xrtx-4090", 0.3, 131072),
    ("gpt2-deep", "4x2xrtx-4090", 0.5, 8192),
]  # fmt: skip


@cache
def planned(name: str, devices: str, part: float, seq_len: int) -> mw.Plan:
    config = {key: _LARGE.get(key, value) if value else value for key, value in CONFIGS[name].items()}
    cluster = mw.Cluster.preset(devices)
    groups = [replace(g, device=replace(g.device, memory=int(g.device.memory * part))) for g in cluster.groups]
    model = mw.Model.from_config(config, name=name)
    return mw.plan(mw.Job(model, replace(cluster, groups=tuple(groups)), global_batch=8, seq_len=seq_len))


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_losses_and_gradients_of_one_process(job: tuple[str, str, float, int]) -> None:
    plan = planned(*job)
    devices = 1 + max(rank for p in plan.pipelines for stage in p.stages for rank in stage.ranks)
    table: dict[str, Any] = {"world": devices, "pipelines": plan.to_table()["pipelines"]}
    small = plan_of(table, CONFIGS[job[0]])[1]
    for losses, expected, errors in pool(world_of(small)).run(on_a_rank, table, CONFIGS[job[0]], "packed"):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert {key: error for key, error in errors.items() if error > 1e-4} == {}


def test_the_plans_are_of_many_sorts() -> None:
    plans = [planned(*job) for job in JOBS]
    pipelines = [pipeline for plan in plans for pipeline in plan.pipelines]
    spans = [span for pipeline in pipelines for stage in pipeline.stages for span in stage.spans]
    assert {0, 2, 3} <= {span.zero for span in spans}
    for axis in ("dp", "tp", "ulysses", "ring", "ep"):
        assert any(getattr(span, axis) > 1 for span in spans), axis
    assert {"none", "selective", "full"} < {span.recompute for span in spans}
    for name in ("activations", "optimizer", "parameters"):
        assert {0.0, 1.0} < {getattr(span.offload, name) for span in spans}, name
    assert any(span.offload.parameters and span.zero == 0 for span in spans)
    assert any(len(plan.pipelines) > 1 for plan in plans)
    assert {"1f1b", "zero-bubble", "zbv", "dualpipev"} <= {pipeline.schedule.name for pipeline in pipelines}
    assert any(len({len(stage.ranks) for stage in pipeline.stages}) > 1 for pipeline in pipelines)
