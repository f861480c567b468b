"""Configurations as users have them: what they mean, what is listed, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.contract import Beside, Imported
from meshwright.frameworks.registry import format_named, read
from meshwright.models import Model

BESIDE = Beside(Cluster.preset("2x8xh100"), Model.preset("llama3-8b"), batch=128, seq=8192)
ALONE = Beside(Cluster.preset("2x8xh100"))


def of(text: str | dict[str, Any], name: str, beside: Beside = BESIDE) -> Imported:
    return read(text if isinstance(text, str) else json.dumps(text), name, f"my.{name}", beside)


def span(found: Imported) -> Any:
    return found.plan.pipelines[0].stages[0].spans[0]


# DeepSpeed: fields of its documentation's configuration page, put together by hand.
STAGE3: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "steps_per_print": 10,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "stage3_prefetch_bucket_size": 5e7,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}


def test_deepspeed_counts_the_batch() -> None:
    found = of(STAGE3, "deepspeed")
    assert (found.job.global_batch, found.plan.pipelines[0].micro_batches) == (128, 4)
    assert (span(found).zero, span(found).offload.optimizer, span(found).dp) == (3, 1.0, 16)
    assert found.unknown == ()
    assert "steps_per_print" in found.unused
    assert any(line.startswith("recompute") for line in found.assumed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_batch_size": 64}, r"train_batch_size: is 64, but .*2 x .*4 x 16 replicas is 128"),
        ({"fp16": {"enabled": True}}, r"fp16.enabled: is true, and so is bf16.enabled"),
        ({"zero_optimization": {"stage": 4}}, r"stage: is 4 \(valid: 0, 1, 2, 3\)"),
        ({"zero_optimization": {"stage": "three"}}, r"stage: is a string"),
        ({"sequence_parallel_size": 3}, r"sequence_parallel_size: .* does not divide 16 devices"),
        ({"sequence_parallel_size": 4, "data_parallel_size": 8}, r"data_parallel_size: is 8, but .* is 4"),
        ({"gradient_accumulation_steps": 0}, r"gradient_accumulation_steps: is 0"),
    ],
)
def test_deepspeed_contradictions_name_both(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        of(STAGE3 | change, "deepspeed", Beside(BESIDE.cluster, BESIDE.model))


def test_a_batch_beside_the_file_must_agree() -> None:
    with pytest.raises(InputError, match=r"--batch: is 100, the configuration has 128"):
        of(STAGE3, "deepspeed", Beside(BESIDE.cluster, BESIDE.model, batch=100))


def test_deepspeed_auto_is_transformers_to_fill() -> None:
    auto = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
    found = of(auto | {"zero_optimization": {"stage": 2}, "colour": 3}, "deepspeed")
    assert found.job.global_batch == 128
    assert found.unknown == ("colour",)
    assert "train_batch_size is left to Transformers" in found.assumed


FLAGS = """\
#!/bin/bash
torchrun --nproc_per_node=8 --nnodes 2 -m torchtitan.train --module llama3 --config llama3_70b \\
    --parallelism.tensor_parallel_degree 4 --parallelism.pipeline_parallel_degree=2 \\
    --parallelism.pipeline_parallel_schedule Interleaved1F1B \\
    --training.global_batch_size 64 --training.local_batch_size 16 --compile.enable --metrics.log_freq 5
"""


def test_torchtitan_flags_start_from_a_configuration() -> None:
    found = of(FLAGS, "torchtitan", ALONE)
    assert (found.job.model.name, found.job.seq_len, found.job.global_batch) == ("llama3-70b", 8192, 64)
    pipeline = found.plan.pipelines[0]
    assert (pipeline.schedule.name, pipeline.schedule.virtual, pipeline.micro_batches) == ("interleaved", 2, 32)
    # 80 layers and two ends, dealt by torchtitan over four stages: 21, 21, 20, 20 less the ends.
    assert [stage.spans[0].layers for stage in pipeline.stages] == [
        "embed..block.19", "block.20..block.40", "block.41..block.60", "block.61..head"]  # fmt: skip
    assert (span(found).tp, span(found).sp, span(found).zero, span(found).recompute) == (4, True, 2, "full")
    assert found.unknown == ()
    assert "metrics.log_freq" in found.unused


MODULE = """\
from torchtitan.models.llama3.config_registry import llama3_8b

def mine():
    config = llama3_8b()
    config.parallelism.data_parallel_replicate_degree = 2
    config.training.local_batch_size = 2
    config.parallelism.colour_of_shards = "red"
    config.activation_checkpoint = None
    return config
"""


def test_torchtitan_modules_are_read_not_run() -> None:
    found = of("import os; os.abort()\n" + MODULE, "torchtitan", ALONE)
    assert (span(found).zero, span(found).zero_group, span(found).dp, span(found).recompute) == (3, 8, 16, "none")
    assert (found.job.global_batch, found.unknown) == (32, ("parallelism.colour_of_shards",))


def test_torchtitan_toml_of_older_versions() -> None:
    text = "[parallelism]\ntensor_parallel_degree = 8\n[training]\nlocal_batch_size = 4\nseq_len = 8192\n"
    found = of(text + '[activation_checkpoint]\nmode = "full"\n', "torchtitan")
    assert (span(found).tp, span(found).recompute, found.plan.pipelines[0].micro_batches) == (8, "full", 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--config llama3_9b", r"--config: the configuration llama3_9b is not known here \(valid: llama3_8b"),
        ("--config llama3_8b --parallelism.tensor_parallel_degree 3", r"= 15, but 2x8xh100 has 16 devices"),
        ("--config llama3_8b --parallelism.data_parallel_shard_degree 4", r"= 4, but 2x8xh100 has 16 devices"),
        ("--config llama3_8b --training.global_batch_size 24", "is 24, not a multiple of local_batch_size 1 x 16"),
        ("--config llama3_8b --parallelism.tensor_parallel_degree many", "tensor_parallel_degree: is a string"),
        ("--config llama3_8b --parallelism.pipeline_parallel_degree 2 --training.local_batch_size 16"
         " --parallelism.pipeline_parallel_schedule 2F2B", r"is 2F2B \(valid: GPipe, 1F1B"),
        ("hello world", "holds nothing of torchtitan's"),
        ("def f(:\n  pass", "is no Python"),
        ("import os\n", "functions that return a Trainer.Config: none"),
        ("--config 'llama", "is no command"),
    ],
)  # fmt: skip
def test_torchtitan_mistakes(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        of(text, "torchtitan", ALONE)


# Accelerate, as `accelerate config` writes FSDP1's file; names from its documentation.
FSDP1 = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: HYBRID_SHARD  # inside a node
  fsdp_activation_checkpointing: true
  fsdp_use_orig_params: true
mixed_precision: bf16
num_machines: 2
num_processes: 16
colour: red
"""


def test_accelerate_fsdp1() -> None:
    found = of(FSDP1, "accelerate")
    assert (span(found).zero, span(found).zero_group, span(found).recompute) == (3, 8, "full")
    assert found.unknown == ("colour",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("num_processes: 16", "num_processes: 8"), "num_processes: is 8, but .* is 16"),
        (("distributed_type: FSDP", "distributed_type: DEEPSPEED"), "--from deepspeed"),
        (("HYBRID_SHARD", "HALF_SHARD"), "is HALF_SHARD"),
        (("mixed_precision: bf16", "mixed_precision"), "my.accelerate:8:1: 'mixed_precision' is not NAME: VALUE"),
        (("num_machines: 2", "num_processes: 2"), "num_processes appears twice"),
        (("  fsdp_use_orig_params: true", "parallelism_config:\n  parallelism_config_tp_size: 3"), "not 16"),
    ],
)
def test_accelerate_mistakes(change: tuple[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        of(FSDP1.replace(*change), "accelerate")


@pytest.mark.parametrize("name", ["torchtitan", "deepspeed", "accelerate", "galvatron"])
@pytest.mark.parametrize(
    "text", ["[1]", "[]", "null", "{", '{"a": {"b": [1, {}]}}', "\x00", "a: b: c", "--", "---", "3"]
)
def test_nonsense_is_refused_or_listed(name: str, text: str) -> None:
    """Nothing but an InputError, whatever the text."""
    try:
        found = of(text, name)
    except InputError as error:
        assert str(error)  # noqa: PT017
    else:
        assert found.plan.devices == 16


JUNK: list[Any] = [None, True, -1, 0, 3, 1.5, 10**30, "", "x", "8", "1,2", [], [1], [["layers.0"], 3], {}, {"a": 1}]
SECTIONS = {
    "deepspeed": "optimizer zero_optimization fp16",
    "accelerate": "fsdp_config",
    "torchtitan": "parallelism training",
}
FIELDS = [(name, field) for name in SECTIONS for field in (*sorted(format_named(name).words), *SECTIONS[name].split())]


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_no_value_of_a_field_breaks_a_reader(name: str, field: str) -> None:
    """Any JSON value in any field that is read: an InputError, or a plan."""
    base = {"deepspeed": {"train_batch_size": 128}, "torchtitan": {"parallelism.pipeline_parallel_degree": 2,
            "training.local_batch_size": 8}, "accelerate": {"distributed_type": "FSDP"}}[name]  # fmt: skip
    for junk in JUNK:
        nested: dict[str, Any] = {}
        for path, value in (base | {field: junk}).items():
            *sections, last = path.split(".")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
        try:
            of(nested, name)
        except InputError as error:
            assert str(error)  # noqa: PT017
