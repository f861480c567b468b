"""What Megatron has no words for: the nearest plan, a line for each step back, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

import meshwright as mw
from meshwright.frameworks.contract import Beside, Inexpressible
from meshwright.frameworks.registry import export, read
from tests.frameworks.plans import any_jobs_and_plans, model

NAME = "pretrain_megatron.sh"


def job_of(name: str = "llama", **changes: Any) -> mw.Job:
    facts: dict[str, Any] = {"global_batch": 64, "seq_len": 4096} | changes
    return mw.Job(model(name), mw.Cluster.preset("8x8xb200"), **facts)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, dict[str, Any]]] = {
    # plan, changes of the job, a word of the line, the plan that is said instead
    "zero 3 in a pipeline": ({"pp": 2, "zero": 3}, {}, "zero: 3", {"pp": 2, "zero": 1}),
    "gpipe": ({"pp": 4, "schedule": "gpipe"}, {}, "schedule: gpipe", {"pp": 4}),
    "zero bubble": ({"pp": 4, "schedule": "zero-bubble"}, {}, "zero-bubble", {"pp": 4}),
    "dualpipev": ({"pp": 4, "schedule": "dualpipev", "micro_batches": 8, "dp": 8, "tp": 2}, {}, "dualpipev",
                  {"pp": 4, "virtual": 2, "micro_batches": 8, "dp": 8, "tp": 2}),
    "selective": ({"recompute": "selective"}, {}, "no module of Megatron repeats activation alone", {"recompute": ["norm"]}),
    "too many heads for all-to-all": ({"tp": 4, "ulysses": 4}, {}, "8 key heads", {"tp": 4, "ring": 4}),
    "parameters ahead of nothing": ({"overlap": {"gradients": False}}, {}, "overlap: parameters",
                                    {"overlap": {"gradients": False, "parameters": False}}),
    "parameters on the host": ({"offload": {"parameters": 1.0}}, {}, "parameters stay", {}),
    "a third of the activations": ({"offload": {"activations": 0.3}}, {}, "whole blocks only",
                                   {"offload": {"activations": 4 / 12}}),
    "states of sgd on the host": ({"offload": {"optimizer": 1.0}}, {"optimizer": "sgd"}, "states of sgd", {}),
    "16-bit moments without shards": ({"zero": 0}, {"optimizer": "adamw-16bit"}, "zero: adamw-16bit", {"zero": 1}),
    "chunks": ({"tp": 4, "overlap": {"tensor_chunks": 7}}, {}, "chunks", {"tp": 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_nearest_is_said_and_priced(name: str) -> None:
    plan, changes, word, instead = CASES[name]
    job = job_of(**changes)
    exported = export(job, mw.Plan.of(plan, job), "megatron")
    assert any(word in line for line in exported.missing), exported.missing
    assert exported.plan == mw.Plan.of(instead, job)
    again = read(exported.files[NAME], "megatron", NAME, Beside(job.cluster))
    assert again.plan.pipelines == exported.plan.pipelines  # the files mean what is said that they mean


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_jobs_and_plans())
def test_files_mean_what_is_said_that_they_mean(pair: tuple[mw.Job, mw.Plan]) -> None:
    job, plan = pair
    exported = export(job, plan, "megatron")
    again = read(exported.files[NAME], "megatron", NAME, Beside(job.cluster))
    assert again.plan.pipelines == exported.plan.pipelines
    if not exported.missing:
        assert exported.plan == plan
    if plan.pipelines != exported.plan.pipelines:
        assert exported.missing


def test_spans_that_differ_become_alike() -> None:
    job = job_of()
    stages = [{"layers": "embed..block.5", "tp": 4}, {"layers": "block.6..head", "tp": 2}]
    exported = export(job, mw.Plan.of({"stages": stages, "micro_batches": 4}, job), "megatron")
    assert any("2 ways to cut layers" in line for line in exported.missing)


def test_devices_in_another_order_are_said_to_be_lost() -> None:
    job = job_of()
    stages = [{"layers": "embed..block.5", "devices": "32-63"}, {"layers": "block.6..head", "devices": "0-31"}]
    exported = export(job, mw.Plan.of({"stages": stages}, job), "megatron")
    assert any(line.startswith("devices:") for line in exported.missing)


def test_a_norm_stands_with_its_head() -> None:
    """Megatron builds the last norm where the loss is; a search may leave it with the last block."""
    job = job_of()
    exported = export(job, mw.Plan.of({"stages": [{"layers": "embed..norm"}, {"layers": "head"}]}, job), "megatron")
    assert exported.missing == ()
    assert [stage.spans[0].layers for stage in exported.plan.pipelines[0].stages] == ["embed..block.11", "norm..head"]


def test_states_of_experts_lie_in_copies_too() -> None:
    job = job_of("qwen3_moe")
    exported = export(job, mw.Plan.of({"ep": 8, "zero": 1, "zero_group": 32}, job), "megatron")
    assert any("states of experts" in line for line in exported.missing)


@pytest.mark.parametrize(
    ("model_", "plan", "changes", "word"),
    [
        ("bert-base", {}, {"seq_len": 512}, "bert"),
        ("bloom-560m", {}, {"seq_len": 512}, "bloom"),
        ("qwen3_moe", {"ep": 8}, {"precision": "fp16"}, "fp16"),
        ("llama", {"ulysses": 4}, {"seq_len": 4100}, "4100 tokens"),
    ],
)
def test_what_cannot_be_said_at_all(model_: str, plan: dict[str, Any], changes: dict[str, Any], word: str) -> None:
    job = job_of("llama", **changes)
    if model_ != "llama":
        made = mw.Model.preset(model_) if "-" in model_ else model(model_)
        job = mw.Job(made, job.cluster, 64, job.seq_len, job.precision)
    with pytest.raises(Inexpressible, match=word):
        export(job, mw.Plan.of(plan, job), "megatron")


def test_python_and_command_line_say_the_same() -> None:
    job = job_of()
    plan = mw.Plan.of({"tp": 2}, job)
    assert mw.export(plan, "megatron") == export(job, plan, "megatron")
    with pytest.raises(mw.InputError, match="expected a Plan"):
        mw.export({"tp": 2}, "megatron")  # type: ignore[arg-type]
    with pytest.raises(mw.UnknownName, match="megatron"):
        mw.export(plan, "megatronn")
