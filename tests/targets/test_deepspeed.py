"""DeepSpeed's own parser accepts what is exported to it, and reads from it what we mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.packages import installed

if not installed("deepspeed"):
    pytest.skip("deepspeed is not installed: make targets", allow_module_level=True)

import deepspeed
from deepspeed.runtime import config as ds
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.contract import Beside
from meshwright.frameworks.deepspeed.read import KNOWN, ZERO
from meshwright.frameworks.registry import export, read
from meshwright.models import Model
from tests.targets.plans import DENSE, PLANS, made


class Grid:
    """What a Megatron-like user hands to DeepSpeed: how many replicas there are."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas

    def get_data_parallel_world_size(self) -> int:
        return self.replicas


def parsed(table: dict[str, Any], replicas: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ds.dist, "get_rank", lambda: 0)
    return ds.DeepSpeedConfig(table, mpu=Grid(replicas))


@pytest.mark.parametrize("name", PLANS)
def test_its_parser_reads_what_is_meant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job, plan = made(name)
    exported = export(job, plan, "deepspeed")
    table = json.loads(exported.files["ds_config.json"])
    (pipeline,) = exported.plan.pipelines
    span = pipeline.stages[0].spans[0]
    config = parsed(table, span.dp, monkeypatch)  # asserts batch = micro-batch x steps x replicas
    assert config.train_batch_size == job.global_batch
    assert config.gradient_accumulation_steps == pipeline.micro_batches
    assert config.zero_optimization_stage == span.zero
    assert config.zero_config.overlap_comm == exported.plan.overlap.gradients
    assert max(config.tensor_parallel_config.autotp_size, 1) == span.tp
    assert (config.expert_parallel_config.autoep_size, config.expert_parallel_config.expert_tensor_parallel_size) == (
        span.ep,
        span.etp,
    )
    assert max(config.mics_shard_size, 0) == span.zero_group
    host = config.zero_config.offload_optimizer
    assert bool(host and host.device == "cpu") == bool(span.offload.optimizer)
    assert bool(config.zero_config.offload_param) == bool(span.offload.parameters)
    assert (config.bfloat16_config.enabled, config.float16_config.enabled) == (
        exported.plan.job.precision == "bf16",
        exported.plan.job.precision == "fp16",
    )
    assert config.optimizer_name.lower() == {"adamw": "adamw", "muon": "muon"}[exported.plan.job.optimizer]


def test_its_parser_refuses_what_we_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}
    with pytest.raises(AssertionError, match="train_batch_size is not equal"):
        parsed(table, 16, monkeypatch)
    beside = Beside(Cluster.preset(DENSE["cluster"]), Model.preset("llama3-8b"))
    with pytest.raises(InputError, match=r"is 64, but .* is 192"):
        read(json.dumps(table), "deepspeed", "ds.json", beside)


def test_names_that_say_nothing_about_a_plan_are_its_names() -> None:
    theirs = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    assert {name.removesuffix(".") for name in ZERO} <= theirs | set(DeepSpeedZeroConfig.model_fields)
    sources = "".join(path.read_text() for path in Path(deepspeed.__file__).parent.rglob("*.py"))
    listed = {name.partition(".")[0] for name in KNOWN}
    assert {name for name in listed if f"'{name}'" not in sources and f'"{name}"' not in sources} == set()
