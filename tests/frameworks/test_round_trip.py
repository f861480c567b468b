"""Plan -> files -> plan: what a format can say comes back, what it cannot is listed, and what it says it says exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from meshwright.errors import PlanError
from meshwright.frameworks.contract import Beside, Exported, Imported, Inexpressible
from meshwright.frameworks.registry import FORMATS, export, format_named, read
from meshwright.plans import Job, Plan
from tests.plans.strategies import divisors, plans

OURS = ["torchtitan", "deepspeed", "accelerate", "galvatron", "verl", "areal", "openrlhf"]
READ = ["torchtitan", "deepspeed", "accelerate", "galvatron"]
MODELS = [("tiny-llama", 8, 1), ("llama3-8b", 8, 1), ("tiny-moe", 4, 8), ("qwen3-30b-a3b", 4, 128)]
SLOW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@st.composite
def usual(draw: st.DrawFn) -> dict[str, Any]:
    """A plan that cuts every layer alike, as the frameworks do, in the short form."""
    name, heads, experts = draw(st.sampled_from(MODELS))
    devices = draw(st.sampled_from([1, 2, 4, 8, 16]))
    pp = draw(st.sampled_from([d for d in (1, 2, 4) if devices % d == 0]))
    each = devices // pp
    tp = draw(st.sampled_from([d for d in divisors(each) if heads % d == 0]))
    ulysses = draw(st.sampled_from([1] * 4 + [d for d in divisors(each // tp) if heads % (tp * d) == 0]))
    ring = draw(st.sampled_from([1] * 3 + [d for d in divisors(each // tp // ulysses) if d <= 4]))
    dp = each // (tp * ulysses * ring)
    schedule = (
        draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zero-bubble", "zbv", "dualpipev"])) if pp > 1 else "1f1b"
    )
    virtual = 2 if schedule in {"interleaved", "zbv", "dualpipev"} else 1
    assume(name != "tiny-llama" or pp * virtual <= 4)
    assume(name != "tiny-moe" or pp * virtual <= 2)
    micro_batches = draw(st.sampled_from([1, 2, 4])) * pp * virtual
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    replicas = dp * ulysses * ring
    table = {
        "model": name, "cluster": f"1x{devices}xh100", "seq_len": 256,
        "global_batch": dp * micro_batches * draw(st.sampled_from([1, 2])),
        "precision": draw(st.sampled_from(["bf16", "bf16", "fp16", "fp32", "fp8"])),
        "optimizer": draw(st.sampled_from(["adamw", "adamw", "adamw-16bit", "muon", "sgd", "sgd-momentum"])),
        "dp": dp, "tp": tp, "sp": tp > 1 and draw(st.booleans()), "ulysses": ulysses, "ring": ring, "pp": pp,
        "zero": zero, "schedule": schedule, "virtual": virtual, "micro_batches": micro_batches,
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
    }  # fmt: skip
    if zero and replicas > 1 and draw(st.booleans()):
        table["zero_group"] = draw(st.sampled_from([d for d in divisors(replicas) if d < replicas]))
    if experts > 1:
        table["ep"] = draw(st.sampled_from([d for d in divisors(each) if experts % d == 0]))
    if draw(st.booleans()):
        part = st.sampled_from([0.0, 0.5, 1.0])
        table["offload"] = {"optimizer": draw(part), "parameters": draw(part), "activations": draw(part)}
    if draw(st.booleans()):
        hidden = draw(st.booleans())
        table["overlap"] = {
            "gradients": hidden,
            "parameters": draw(st.booleans()),
            "tensor_chunks": draw(st.sampled_from([1, tp, 4])),
        }
    return table


def made(table: dict[str, Any]) -> tuple[Job, Plan]:
    try:
        plan = Plan.of(table)
    except PlanError:
        assume(False)
    return plan.resolve(), plan


def there_and_back(job: Job, plan: Plan, name: str, folder: Path) -> tuple[Exported, Imported]:
    try:
        exported = export(job, plan, name)
    except Inexpressible:
        assume(False)
    for file, text in exported.files.items():
        (folder / file).write_text(text)
    first = next(iter(exported.files))
    beside = Beside(job.cluster, job.model, job.global_batch, job.seq_len)
    return exported, read(exported.files[first], name, str(folder / first), beside)


def shape(plan: Plan, *, batches: bool = True) -> Any:
    """What a plan says, without what is derived from it; Accelerate's file does not hold the micro-batches."""
    table = plan.to_table()
    for pipeline in table["pipelines"]:
        if not batches:
            pipeline.pop("micro_batches")
    return table["pipelines"], table.get("overlap")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported")


@pytest.mark.parametrize("name", READ)
@given(table=usual())
@SLOW
def test_what_is_said_comes_back(name: str, folder: Path, table: dict[str, Any]) -> None:
    job, plan = made(table)
    exported, imported = there_and_back(job, plan, name, folder)
    whole = name != "accelerate"
    sequence = name == "galvatron"  # its file does not hold sequence parallelism; the command does
    if not (sequence and table["tp"] > 1 and not table["sp"]):
        assert shape(imported.plan, batches=whole) == shape(exported.plan, batches=whole)
    assert imported.unknown == ()
    if not exported.missing:
        assert shape(exported.plan) == shape(plan)
        if name in {"torchtitan", "deepspeed"}:
            assert imported.job == job


@pytest.mark.parametrize("name", OURS)
@given(table=usual())
@SLOW
def test_what_the_files_mean_is_said_without_loss(name: str, table: dict[str, Any]) -> None:
    """The nearest plan needs no other one near it, and gives the same files."""
    job, plan = made(table)
    try:
        first = export(job, plan, name)
    except Inexpressible:
        assume(False)
    again = export(first.plan.resolve(), first.plan, name)
    assert shape(again.plan) == shape(first.plan)
    assert again.files == first.files
    assert [line for line in again.missing if "selective: Megatron" not in line] == []


@pytest.mark.parametrize("name", OURS)
@given(table=plans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_any_plan_is_written_or_refused(name: str, folder: Path, table: dict[str, Any]) -> None:
    """Plans with layers that differ, cuts inside blocks and axes in any order: files that can be read, or a reason."""
    plan = Plan.of(table)
    job = plan.resolve()
    try:
        exported = export(job, plan, name)
    except Inexpressible:
        return
    assert exported.plan.devices == plan.devices
    assert exported.command
    if format_named(name).read:
        exported, imported = there_and_back(job, plan, name, folder)
        assert imported.unknown == ()


def test_every_format_is_registered() -> None:
    assert set(OURS) <= set(FORMATS)
    for name in OURS:
        assert format_named(name).name == name
        assert (format_named(name).read is not None) == (name in READ)
