"""Accelerate's own classes accept what is exported to it; our reading of its YAML is PyYAML's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packages import installed

if not installed("accelerate"):
    pytest.skip("accelerate is not installed: make targets", allow_module_level=True)

import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin

from meshwright.frameworks.accelerate.read import KNOWN, _yaml
from meshwright.frameworks.registry import export
from tests.targets.plans import PLANS, made


def options() -> set[str]:
    """Names that `accelerate launch` takes, which a file may set instead."""
    return {option.lstrip("-") for action in launch_command_parser()._actions for option in action.option_strings}


@pytest.mark.parametrize("name", PLANS)
def test_its_classes_accept_the_export(name: str, tmp_path: Path) -> None:
    job, plan = made(name)
    exported = export(job, plan, "accelerate")
    text = exported.files["accelerate.yaml"]
    path = tmp_path / "accelerate.yaml"
    path.write_text(text)
    config = ClusterConfig.from_yaml_file(str(path))  # refuses names it does not know
    assert _yaml(text, "accelerate.yaml") == yaml.safe_load(text)
    assert config.num_processes == plan.devices
    span = exported.plan.pipelines[0].stages[0].spans[0]
    assert set(config.fsdp_config) | set(config.parallelism_config) <= options()
    if config.distributed_type.value == "MULTI_GPU":
        assert (span.dp, span.zero) == (plan.devices, 0)
        return
    sizes = {key.removeprefix("parallelism_config_"): value for key, value in config.parallelism_config.items()}
    grid = ParallelismConfig(**sizes)  # refuses grids that it cannot lay out
    assert grid.total_size == plan.devices
    assert (grid.data_parallel_size, grid.tp_size, grid.cp_size) == (span.dp, span.tp, span.ring)
    assert grid.dp_shard_size * grid.cp_size == span.shards(span.replicas)
    said = config.fsdp_config
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=said["fsdp_version"],
        reshard_after_forward=said["fsdp_reshard_after_forward"],
        activation_checkpointing=said["fsdp_activation_checkpointing"],
        cpu_offload=said["fsdp_offload_params"],
    )
    assert plugin.reshard_after_forward == (span.zero == 3)
    assert plugin.activation_checkpointing == (span.recompute == "full")


def test_names_that_say_nothing_about_a_plan_are_its_names() -> None:
    theirs = options() | set(ClusterConfig.__dataclass_fields__)
    listed = {name.removesuffix(".").partition(".")[2] or name.removesuffix(".") for name in KNOWN}
    assert listed - theirs - {"fsdp_backward_prefetch_policy"} == set()  # the name before 0.27
