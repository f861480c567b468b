"""Plans to Megatron's arguments and back; the list that Megatron publishes and the shell itself are the references."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

import meshwright as mw
from meshwright.frameworks.contract import Beside
from meshwright.frameworks.megatron.arguments import READ, collect
from meshwright.frameworks.megatron.read import published
from meshwright.frameworks.registry import export, read
from tests.frameworks.plans import CONFIGS, jobs_and_plans, model

NAME = "pretrain_megatron.sh"


def words_of(text: str, tmp_path: Path) -> list[str]:
    """What bash itself hands to torchrun."""
    (tmp_path / "run.sh").write_text(text)
    stub = tmp_path / "torchrun"
    stub.write_text("#!/bin/sh\nfor word do printf '%s\\n' \"$word\"; done\n")
    stub.chmod(0o755)
    command = ["bash", str(tmp_path / "run.sh")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}
    )
    return done.stdout.splitlines()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(jobs_and_plans())
def test_a_plan_that_megatron_can_say_comes_back(pair: tuple[mw.Job, mw.Plan]) -> None:
    job, plan = pair
    exported = export(job, plan, "megatron")
    assert exported.missing == ()
    assert exported.plan == plan
    again = read(exported.files[NAME], "megatron", NAME, Beside(job.cluster))
    assert again.unknown == ()
    assert again.plan.pipelines == plan.pipelines
    expected = plan.overlap
    if job.optimizer == "muon":  # dist_muon gathers in its own way
        assert again.plan.overlap.gradients == expected.gradients
    else:
        assert again.plan.overlap == expected
    assert again.job.model.layers == job.model.layers
    for name in ("global_batch", "seq_len", "precision", "optimizer"):
        assert getattr(again.job, name) == getattr(job, name)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(jobs_and_plans())
def test_every_argument_is_one_that_megatron_lists(pair: tuple[mw.Job, mw.Plan]) -> None:
    job, plan = pair
    text = export(job, plan, "megatron").files[NAME]
    names = {line.split()[0][2:] for line in text.splitlines() if line.startswith("    --") and "torchrun" not in line}
    names -= {"master-addr"}
    assert names <= published("megatron")


def test_everything_that_is_read_is_listed() -> None:
    assert published("megatron") >= READ


@pytest.mark.parametrize("name", CONFIGS)
def test_bash_hands_over_what_is_read_back(name: str, tmp_path: Path) -> None:
    job = mw.Job(model(name), mw.Cluster.preset("8x8xh100"), 64, 4096)
    plan = mw.Plan.of({"tp": 4, "pp": 2, "ring": 2}, job)
    text = export(job, plan, "megatron").files[NAME]
    words = words_of(text, tmp_path)
    arguments = collect(words[words.index("Megatron-LM/pretrain_gpt.py") + 1 :], "")
    assert arguments["num-layers"] == ("12",)
    assert arguments["train-iters"] == ("50",)
    assert words[:4] == ["--nnodes", "8", "--nproc-per-node", "8"]
    from meshwright.frameworks.megatron.shell.find_arguments import find_words

    assert find_words(text, "run.sh").words == words[words.index("Megatron-LM/pretrain_gpt.py") + 1 :]


def test_arguments_of_a_real_shape() -> None:
    """Llama 3.1 8B: what Megatron-LM's own checkpoint tools say for it (tools/checkpoint/loader_llama_mistral.py)."""
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    }  # fmt: skip
    job = mw.Job(mw.Model.from_config(config), mw.Cluster.preset("8xh100"), 64, 8192)
    text = export(job, mw.Plan.of({"tp": 2}, job), "megatron").files[NAME]
    for line in (
        "--num-layers 32", "--hidden-size 4096", "--ffn-hidden-size 14336", "--num-attention-heads 32",
        "--group-query-attention", "--num-query-groups 8", "--max-position-embeddings 131072",
        "--position-embedding-type rope", "--rotary-base 500000", "--use-rope-scaling", "--rope-scaling-factor 8",
        "--normalization RMSNorm", "--norm-epsilon 1e-05", "--swiglu", "--disable-bias-linear",
        "--untie-embeddings-and-output-weights", "--vocab-size 128255", "--micro-batch-size 1", "--bf16",
    ):  # fmt: skip
        assert f"    {line}\n" in text
