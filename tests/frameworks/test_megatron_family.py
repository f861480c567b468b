"""MindSpeed-LLM, Megatron-Bridge and slime: golden files, and every name in the list that each publishes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings

import meshwright as mw
from meshwright.frameworks.contract import Inexpressible
from meshwright.frameworks.megatron.read import published
from meshwright.frameworks.megatron.relatives.nemo import _FAMILIES, _RECIPES
from meshwright.frameworks.registry import export
from tests.frameworks.plans import jobs_and_plans, model

GOLDEN = Path(__file__).parent / "golden"
FAMILY = ("mindspeed", "nemo", "slime")
QUIET = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def said(text: str) -> list[str]:
    """Words of the arrays of a script, one argument a line."""
    return [
        line.strip()
        for line in text.splitlines()
        if re.match(r"    (--[a-z]|'?[a-z_]+[.=])", line) and "$MASTER" not in line
    ]


def names(text: str) -> set[str]:
    return {line.removeprefix("--").split()[0] for line in said(text) if not line.startswith("--runtime-env")}


@pytest.mark.parametrize("name", FAMILY)
def test_golden(name: str) -> None:
    """Llama 3 70B on 64 H100, uneven stages; read by hand against the sources that `published.json` names."""
    job = mw.Job(mw.Model.preset("llama3-70b"), mw.Cluster.preset("8x8xh100"), 512, 8192)
    stages = [{"layers": "embed..block.18"}, {"layers": "block.19..block.38"}, {"layers": "block.39..block.58"}]
    plan = mw.Plan.of({"tp": 4, "ring": 2, "stages": [*stages, {"layers": "block.59..head"}], "recompute": "full"}, job)
    exported = export(job, plan, name)
    assert exported.missing == ()
    file, text = next(iter(exported.files.items()))
    assert text == (GOLDEN / file).read_text()


@QUIET
@given(jobs_and_plans())
def test_arguments_are_listed(pair: tuple[mw.Job, mw.Plan]) -> None:
    job, plan = pair
    lists = {
        "mindspeed": published("mindspeed") | published("megatron"),
        "slime": published("slime") | published("megatron"),
    }
    checked = 0
    for name, known in lists.items():
        try:
            text = next(iter(export(job, plan, name).files.values()))
        except Inexpressible:
            continue
        checked += 1
        assert names(text) <= known
    assume(checked)


@QUIET
@given(jobs_and_plans())
def test_overrides_are_fields(pair: tuple[mw.Job, mw.Plan]) -> None:
    job, plan = pair
    assume(job.precision != "fp32")
    text = export(job, plan, "nemo").files["pretrain_nemo.sh"]
    keys = {line.strip("'").split("=")[0] for line in said(text)}
    assert keys <= published("megatron-bridge")
    assert "model.tensor_model_parallel_size" in keys
    assert {f"{name}_pretrain_config" for name in (*_RECIPES.values(), *_FAMILIES.values())} <= published(
        "megatron-bridge-recipes"
    )


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        ({"ulysses": 2}, "--context-parallel-algo ulysses_cp_algo"),
        ({"ring": 2}, "--context-parallel-algo megatron_cp_algo"),
        ({"ring": 2, "ulysses": 4}, "--ulysses-degree-in-cp 4"),
        ({"recompute": "selective"}, "--recompute-activation-function"),
        ({"recompute": "selective"}, "--recompute-norm"),
        ({"pp": 4, "virtual": 3}, "--num-layers-per-virtual-pipeline-stage 1"),
        ({"offload": {"optimizer": 1.0}}, "--swap-optimizer"),
    ],
)
def test_what_mindspeed_says_in_its_own_words(plan: dict[str, Any], line: str) -> None:
    job = mw.Job(model("llama"), mw.Cluster.preset("8x8xh100"), 64, 4096)
    exported = export(job, mw.Plan.of(plan, job), "mindspeed")
    assert exported.missing == ()
    assert exported.plan == mw.Plan.of(plan, job)
    assert line in said(exported.files["pretrain_mindspeed.sh"])


def test_mindspeed_runs_dualpipev_for_experts() -> None:
    job = mw.Job(model("deepseek_v3"), mw.Cluster.preset("8x8xh100"), 128, 4096)
    short = {"pp": 2, "schedule": "dualpipev", "ep": 8, "micro_batches": 4, "dp": 32}
    exported = export(job, mw.Plan.of(short, job), "mindspeed")
    assert exported.missing == ()
    assert "--schedules-method dualpipev" in said(exported.files["pretrain_mindspeed.sh"])
    dense = mw.Job(model("llama"), job.cluster, 128, 4096)
    plain = {"pp": 2, "schedule": "dualpipev", "micro_batches": 4, "dp": 32}
    assert export(dense, mw.Plan.of(plain, dense), "mindspeed").missing


@pytest.mark.parametrize(
    ("name", "changes", "plan", "word"),
    [
        ("mindspeed", {"precision": "fp8"}, {}, "fp8"),
        ("mindspeed", {"optimizer": "muon"}, {}, "muon"),
        ("nemo", {"precision": "fp32"}, {}, "fp32"),
        ("slime", {"precision": "fp32"}, {}, "fp32"),
        ("slime", {}, {"zero": 3}, "ZeRO-3"),
    ],
)
def test_what_they_cannot_say(name: str, changes: dict[str, str], plan: dict[str, Any], word: str) -> None:
    job = mw.Job(model("llama"), mw.Cluster.preset("8x8xh100"), 64, 4096, **changes)
    with pytest.raises(Inexpressible, match=word):
        export(job, mw.Plan.of(plan, job), name)
