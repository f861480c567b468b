"""Every override is a name of verl's packaged YAML, composed by Hydra; verl itself is not imported."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from tests.packages import folder, installed

if not installed("verl"):
    pytest.skip("verl is not installed: make targets", allow_module_level=True)

import hydra
from omegaconf import OmegaConf

from meshwright.frameworks.registry import export
from tests.targets.plans import PLANS, made


def composed(text: str) -> Any:
    """What verl's trainer would see; names that its YAML does not have are refused by Hydra."""
    where = folder("verl") / "trainer" / "config"
    words = shlex.split(text)
    overrides = words[words.index("verl.trainer.main_ppo") + 1 : -1]
    with hydra.initialize_config_dir(str(where), version_base=None):
        return hydra.compose("ppo_trainer", overrides=[word for word in overrides if word.strip()])


@pytest.mark.parametrize("name", PLANS)
def test_overrides_compose(name: str) -> None:
    job, plan = made(name)
    exported = export(job, plan, "verl")
    config = composed(exported.files["verl.sh"])
    (pipeline,) = exported.plan.pipelines
    span = pipeline.stages[0].spans[0]
    actor, critic, ref = config.actor_rollout_ref.actor, config.critic, config.actor_rollout_ref.ref
    assert config.trainer.nnodes * config.trainer.n_gpus_per_node == plan.devices
    assert config.data.max_prompt_length + config.data.max_response_length == job.seq_len
    assert actor.ppo_max_token_len_per_gpu * span.ulysses * span.ring == pipeline.samples // span.dp * job.seq_len
    if actor.strategy == "megatron":
        for engine in (actor.megatron, critic.megatron, ref.megatron):
            assert engine.tensor_model_parallel_size == span.tp
            assert engine.context_parallel_size == span.ulysses * span.ring
            assert (engine.expert_model_parallel_size, engine.expert_tensor_parallel_size) == (span.ep, span.etp)
            groups = engine.pipeline_model_parallel_size * (engine.virtual_pipeline_model_parallel_size or 1)
            assert groups == len(pipeline.stages)
        assert actor.megatron.use_distributed_optimizer == (span.zero == 1)
        if name == "uneven":
            layout = actor.megatron.override_transformer_config.pipeline_model_parallel_layout
            assert layout == "Et*14|t*18L"
    else:
        assert (actor.strategy, critic.strategy, ref.strategy) == ("fsdp2", "fsdp2", "fsdp2")
        for engine in (actor.fsdp_config, critic.fsdp):
            assert engine.ulysses_sequence_parallel_size == span.ulysses
            assert engine.reshard_after_forward == (span.zero == 3)
            assert engine.fsdp_size == (1 if span.zero == 0 else span.zero_group or -1)
        assert ref.ulysses_sequence_parallel_size == span.ulysses
    OmegaConf.to_container(actor, resolve=True)
