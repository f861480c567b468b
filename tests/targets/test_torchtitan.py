"""torchtitan's own classes accept what is exported to it, and mean by it what we mean."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.packages import installed

if not installed("torchtitan"):
    pytest.skip("torchtitan is not installed: make targets", allow_module_level=True)

import torch
from torch.distributed.pipelining.schedules import _Action, get_schedule_class
from torchtitan.components.quantization import float8
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part
from torchtitan.trainer import Trainer

from meshwright.clusters import Cluster
from meshwright.frameworks.contract import Beside
from meshwright.frameworks.registry import export, read
from meshwright.frameworks.torchtitan.known import CONFIGS, FLAVORS, LONGEST
from meshwright.frameworks.torchtitan.pipeline import dealt
from meshwright.models import Model
from tests.targets.plans import PLANS, made


@pytest.fixture
def eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that multiplies in 8 bits is asked for when a configuration is made; none is needed to look at it."""
    monkeypatch.setattr(float8, "has_cuda_capability", lambda major, minor: True)


def loaded(folder: Path, files: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration as torchtitan's command line makes it."""
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("plan_config", None)
    return ConfigManager().parse_args(["--module", "plan_config", "--config", "plan"])


@pytest.mark.parametrize("name", PLANS)
def test_its_classes_accept_the_export(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eight_bits: None
) -> None:
    job, plan = made(name)
    exported = export(job, plan, "torchtitan")
    config = loaded(tmp_path, exported.files, monkeypatch)
    meant = exported.plan
    (pipeline,) = meant.pipelines
    span = pipeline.stages[0].spans[0]
    dims = ParallelDims.from_config(config.parallelism, plan.devices)  # checks that the degrees fill the devices
    groups = len(pipeline.stages) // pipeline.schedule.virtual
    assert (dims.dp_replicate * dims.dp_shard, dims.tp, dims.cp, dims.pp, dims.ep) == (
        span.dp, span.tp, span.ring, groups, span.ep)  # fmt: skip
    assert dims.dp_shard * dims.cp * dims.tp % dims.ep == 0
    shards = dims.dp_shard * dims.cp
    assert span.shards(span.replicas) == (shards if span.zero else span.replicas)
    # What trainer.py derives from the batch.
    steps = config.training.global_batch_size // (config.training.local_batch_size * span.dp)
    per_flush = config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
    assert steps * (per_flush if groups > 1 else 1) == pipeline.micro_batches
    assert config.training.seq_len == job.seq_len
    kinds = {"none": "NoneType", "selective": "SelectiveAC.Config", "full": "FullAC.Config"}
    assert type(config.activation_checkpoint).__qualname__ == kinds[str(span.recompute)]
    config.model_spec.model.update_from_config(config=config)  # its checks of heads, widths, ties
    with torch.device("meta"):
        model = config.model_spec.model.build()
    assert sum(p.numel() for p in model.parameters()) == job.model.parameters
    if groups > 1:
        assert get_schedule_class(config.parallelism.pipeline_parallel_schedule)
        parts = config.parallelism.module_fqns_per_model_part
        named = [module for part in parts for module in part]
        assert named == ["tok_embeddings", *(f"layers.{i}" for i in range(len(model.layers))), "norm", "lm_head"]
        assert len(parts) == len(pipeline.stages)


def test_a_schedule_without_a_name_is_a_table_of_its_actions(tmp_path: Path) -> None:
    job, plan = made("zero-bubble")
    text = export(job, plan, "torchtitan").files["schedule.csv"]
    rows = [[_Action.from_str(cell) for cell in row.split(",")] for row in text.splitlines()]
    assert len(rows) == 4
    assert all(len(row) == 3 * plan.pipelines[0].micro_batches for row in rows)


@pytest.mark.parametrize("name", FLAVORS)
def test_flavors_are_the_presets(name: str) -> None:
    module, flavor = FLAVORS[name]
    spec = importlib.import_module(f"torchtitan.models.{module}").model_registry(flavor)
    model = Model.preset(name)
    assert len(spec.model.layers) == len(model.blocks)
    assert spec.model.max_seq_len == LONGEST[module]
    with torch.device("meta"):
        built = spec.model.build()
    assert sum(p.numel() for p in built.parameters()) == model.parameters


@pytest.mark.parametrize("name", CONFIGS)
def test_its_own_configurations_are_known(name: str, eight_bits: None) -> None:
    said = CONFIGS[name]
    registry = importlib.import_module(f"torchtitan.models.{said['model_spec'][0]}.config_registry")
    config = getattr(registry, name)()
    assert (config.model_spec.name, config.model_spec.flavor) == said["model_spec"]
    defaults = Trainer.Config()
    for section in ("training", "parallelism", "compile"):
        values, usual = getattr(config, section), getattr(defaults, section)
        for field in fields(values):
            value = getattr(values, field.name)
            if value != getattr(usual, field.name) and field.name not in {"steps", "components"}:
                assert said[f"{section}.{field.name}"] == value, field.name
    assert type(config.activation_checkpoint).__qualname__.lower().startswith(said["activation_checkpoint"])


def test_every_field_of_its_configuration_is_known() -> None:
    """A file that says all of torchtitan's defaults has no unknown names."""
    defaults, words = Trainer.Config(), []
    for section in fields(defaults):
        value = getattr(defaults, section.name)
        if section.name in {"model_spec", "activation_checkpoint"} or not hasattr(value, "__dataclass_fields__"):
            continue
        words += [f"--{section.name}.{field.name}={getattr(value, field.name)}" for field in fields(value)]
    text = " ".join(f"'{word}'" for word in words)
    beside = Beside(Cluster.preset("8xh100"), Model.preset("llama3-8b"))
    imported = read(text, "torchtitan", "flags.sh", beside)
    assert imported.unknown == ()
    assert imported.job.global_batch == 8 * 8


@pytest.mark.parametrize(("layers", "stages"), [(32, 2), (32, 4), (80, 8), (28, 6), (61, 16)])
def test_layers_are_dealt_as_it_deals_them(layers: int, stages: int) -> None:
    theirs = _generate_llm_fqn_per_model_part(stages, layers)
    assert dealt(layers, stages, [1, 1]) == [sum(m.startswith("layers.") for m in part) for part in theirs]
    assert math.fsum(dealt(layers, stages, [1, 1])) == layers
