"""torchtitan's files: what is written where, and schedules that have no name."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.frameworks.contract import Beside, Inexpressible
from meshwright.frameworks.registry import export, read
from meshwright.plans import Plan
from meshwright.plans.action_table import action_table

JOB = {"model": "tiny-llama", "cluster": "4xh100", "global_batch": 16, "seq_len": 256}


def custom() -> Plan:
    """Two stages whose table is GPipe's with the last two backward passes the other way round."""
    table = Plan.of(JOB | {"pp": 2, "schedule": "gpipe", "micro_batches": 4}).to_table()
    rows = [[f"{s}{kind}{m}" for s, kind, m in row] for row in action_table(Plan.of(table).pipelines[0].schedule, 2, 4)]
    rows = [[*row[:-2], row[-1], row[-2]] for row in rows]
    table["pipelines"][0]["schedule"] = {"name": "custom", "virtual": 1, "table": rows}
    return Plan.of(table)


def test_a_table_of_actions_travels_beside_the_module(tmp_path: Path) -> None:
    plan = custom()
    job = plan.resolve()
    exported = export(job, plan, "torchtitan")
    assert exported.missing == ("zero=1: ZeRO-2 instead",)
    assert list(exported.files) == ["plan_config.py", "schedule.csv"]
    for name, text in exported.files.items():
        (tmp_path / name).write_text(text)
    assert exported.files["schedule.csv"].splitlines()[1] == ",".join(plan.pipelines[0].schedule.table[1])
    path = str(tmp_path / "plan_config.py")
    found = read(exported.files["plan_config.py"], "torchtitan", path, Beside(job.cluster, job.model))
    assert found.plan.pipelines == exported.plan.pipelines
    assert found.plan.pipelines[0].schedule == plan.pipelines[0].schedule


def test_uneven_stages_are_named_module_by_module() -> None:
    stages = [{"layers": "embed..block.0"}, {"layers": "block.1..head"}]
    plan = Plan.of(JOB | {"stages": stages, "zero": 2})
    text = export(plan.resolve(), plan, "torchtitan").files["plan_config.py"]
    assert '["tok_embeddings", "layers.0"],' in text
    assert '["layers.1", "layers.2", "layers.3", "norm", "lm_head"],' in text


def test_a_model_it_does_not_have_is_refused() -> None:
    plan = Plan.of({"model": "bert-base", "cluster": "4xh100", "global_batch": 16})
    with pytest.raises(Inexpressible, match=r"torchtitan 0\.3\.0 has no model like bert-base"):
        export(plan.resolve(), plan, "torchtitan")


def test_tied_embeddings_keep_a_pipeline_away() -> None:
    plan = Plan.of({"model": "llama3.2-1b", "cluster": "8xh100", "global_batch": 32, "pp": 2, "zero": 2})
    exported = export(plan.resolve(), plan, "torchtitan")
    assert "pp=2: no pipeline with tied embeddings; these devices are replicas instead" in exported.missing
    assert exported.plan.pipelines[0].stages[0].spans[0].dp == 8


def test_what_is_not_torchtitans_is_listed() -> None:
    plan = Plan.of(JOB | {"ulysses": 2, "zero": 1, "recompute": ["norm"], "optimizer": "sgd", "precision": "tf32"})
    missing = export(plan.resolve(), plan, "torchtitan").missing
    assert [line.partition(":")[0] for line in missing] == [
        "ulysses=2", "recompute=norm", "zero=1", "precision=tf32", "optimizer=sgd"]  # fmt: skip


@pytest.mark.parametrize("name", ["torchtitan", "deepspeed", "accelerate", "openrlhf", "areal"])
def test_tensor_parallelism_deals_out_whole_heads(name: str) -> None:
    """Llama 3 has eight key/value heads, which Megatron repeats past that; these frameworks refuse."""
    plan = Plan.of({"model": "llama3-8b", "cluster": "2x8xh100", "global_batch": 64, "tp": 16, "zero": 3})
    exported = export(plan.resolve(), plan, name)
    span = exported.plan.pipelines[0].stages[0].spans[0]
    assert (span.tp, span.dp) == (8, 2)
    assert any("tp=16: has to divide the 8 key/value heads" in line for line in exported.missing)


def test_a_sequence_past_its_positions_is_refused() -> None:
    plan = Plan.of({"model": "qwen3-8b", "cluster": "8xh100", "global_batch": 8, "seq_len": 65536, "zero": 3})
    with pytest.raises(Inexpressible, match="takes 40,960 tokens at most, the job has 65,536"):
        export(plan.resolve(), plan, "torchtitan")
