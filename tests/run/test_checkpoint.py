"""A run that is saved goes on as if it had never stopped, under the same plan or any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from meshwright.errors import InputError
from meshwright.run.folder.checkpoint.checkpoint import Checkpoints, damage, latest
from meshwright.run.optimizers.choose import optimizer_for, optimizer_named, updates_of
from meshwright.run.parallel.apply import apply
from tests.run.families import CONFIGS
from tests.run.parity import GROUPS, batches, plan_of, world_of
from tests.run.plans import FULL
from tests.run.pool import pool

PAIRS = [
    ("dp=2,zero=1", "tp=2,sp=true", "llama"),
    ("tp=4,sp=true", "pp=2", "llama"),
    ("dp=2,ep=2,zero=3", "tp=2,sp=true,ep=2,dp=2", "qwen3-moe"),
    ("pp=2,schedule=zero-bubble", "dp=2,zero=3", "gpt2-deep"),
    ("two pipelines, cut differently", "a tied head cut otherwise than the embedding", "llama-tied"),
    ("dp=4,zero=3,zero_group=2", "stages of one and three processes", "llama-tied"),
    ("dp=1", "tp=2,sp=false", "deepseek-v3"),
]


def trained(
    table: Any, config: dict[str, Any], folder: str, start: int, stop: int, optimizer: str, dtype: torch.dtype,
    lora: int,
) -> list[float]:  # fmt: skip
    """Losses of some steps; what a run has before is read from the folder, what it has then is written there."""
    model, plan = plan_of(table, config)
    part = apply(model, plan, seed=7, groups=GROUPS, dtype=dtype, lora=lora)
    chosen = optimizer_for(optimizer, part, 1e-3, 0.1)
    checkpoints = Checkpoints(folder)
    if start:
        found, _ = latest(folder)
        assert found is not None
        assert found.step == start
        checkpoints.load(found, part, chosen)
    losses = []
    for step in range(start, stop):
        tokens, documents = batches("packed")[step % 3]
        chosen.zero_grad()
        losses.append(part.step(part.micro_batches(tokens, documents), tokens.numel()).loss)
        chosen.step()
    checkpoints.save(stop, part, chosen, {"note": 1})
    checkpoints.wait()
    return losses


def run(
    table: Any, name: str, folder: Path, start: int, stop: int, optimizer: str = "adamw",
    dtype: torch.dtype = torch.float32, lora: int = 0,
) -> list[float]:  # fmt: skip
    table = FULL[table][0] if table in FULL else table
    world = world_of(plan_of(table, CONFIGS[name])[1])
    return pool(world).run(trained, table, CONFIGS[name], str(folder), start, stop, optimizer, dtype, lora)[0]


@pytest.mark.parametrize(("first", "second", "name"), PAIRS)
def test_ten_steps_and_ten_under_another_plan(first: str, second: str, name: str, tmp_path: Path) -> None:
    whole = run("dp=1", name, tmp_path / "whole", 0, 20)
    before = run(first, name, tmp_path / "run", 0, 10)
    after = run(second, name, tmp_path / "run", 10, 20)
    assert before + after == pytest.approx(whole, rel=1e-4)
    assert len(set(whole)) == 20


@pytest.mark.parametrize(("first", "second"), [("dp=2,zero=3", "tp=2,sp=true"), ("pp=2", "dp=2,zero=1")])
def test_sixteen_bits_keep_their_float32_weights(first: str, second: str, tmp_path: Path) -> None:
    """bfloat16 rounds differently under every cut: what comes out of a checkpoint is as close as two plans are."""
    whole = run("dp=1", "llama", tmp_path / "whole", 0, 20, dtype=torch.bfloat16)
    before = run(first, "llama", tmp_path / "run", 0, 10, dtype=torch.bfloat16)
    after = run(second, "llama", tmp_path / "run", 10, 20, dtype=torch.bfloat16)
    assert before + after == pytest.approx(whole, rel=2e-3)
    exact = run("dp=1", "llama", tmp_path / "exact", 0, 20)
    assert whole == pytest.approx(exact, rel=5e-3)


def test_adapters_go_on_under_another_plan(tmp_path: Path) -> None:
    whole = run("dp=1", "qwen3-moe", tmp_path / "whole", 0, 6, lora=3)
    before = run("tp=2,sp=true,ep=2,dp=2", "qwen3-moe", tmp_path / "run", 0, 3, lora=3)
    saved = FileSystemReader(tmp_path / "run" / "step-00000003").read_metadata().state_dict_metadata
    assert {name for name in saved if name.startswith("optimizer.") and ".lora." not in name} == set()
    assert "model.block.0.attention.qkv.weight" in saved
    assert "optimizer.first.block.0.attention.qkv.lora.a" in saved
    assert before + run("dp=2,zero=3", "qwen3-moe", tmp_path / "run", 3, 6, lora=3) == pytest.approx(whole, rel=1e-4)


def test_muon_goes_on_under_another_plan(tmp_path: Path) -> None:
    whole = run("dp=1", "qwen3-moe", tmp_path / "whole", 0, 8, "muon")
    parts = run("tp=2,sp=true,ep=2", "qwen3-moe", tmp_path / "run", 0, 4, "muon")
    parts += run("dp=2,zero=3", "qwen3-moe", tmp_path / "run", 4, 8, "muon")
    assert parts == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-16bit", "adamw-8bit", "sgd-momentum", "muon"])
def test_the_same_plan_goes_on_to_the_last_bit(optimizer: str, tmp_path: Path) -> None:
    whole = run("dp=2,zero=2", "qwen3-moe", tmp_path / "whole", 0, 10, optimizer)
    parts = run("dp=2,zero=2", "qwen3-moe", tmp_path / "run", 0, 5, optimizer)
    assert parts + run("dp=2,zero=2", "qwen3-moe", tmp_path / "run", 5, 10, optimizer) == whole


@pytest.mark.parametrize("second", ["dp=2,zero=3", "tp=2,sp=true"])
def test_moments_in_8_bits_go_on_closely(second: str, tmp_path: Path) -> None:
    """Shards of `fully_shard`, under the same plan and another one; they are rounded by chance."""
    whole = run("dp=1", "llama", tmp_path / "whole", 0, 10, "adamw-8bit")
    before = run("dp=2,zero=3", "llama", tmp_path / "run", 0, 5, "adamw-8bit")
    assert before + run(second, "llama", tmp_path / "run", 5, 10, "adamw-8bit") == pytest.approx(whole, rel=1e-3)


def test_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    run("dp=1", "llama", tmp_path, 0, 2)
    run("dp=1", "llama", tmp_path, 2, 4)
    newest = tmp_path / "step-00000004"
    assert damage(newest) == ""
    data = next(newest.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1  # one bit
    data.write_bytes(bytes(content))
    found, problems = latest(tmp_path)
    assert found is not None
    assert found.step == 2
    assert problems == [f"step-00000004: {data.name} is not what was written"]
    data.write_bytes(bytes(content[:-5]))
    assert "bytes of" in damage(newest)
    data.unlink()
    assert damage(newest) == f"{data.name} is missing"
    (newest / "manifest.json").write_text("{")
    assert "JSON" in damage(newest)
    (newest / "manifest.json").write_text(json.dumps({"format": "meshwright-checkpoint", "version": 9}))
    assert "version 9" in damage(newest)


def test_old_ones_go_and_half_written_ones_do_not_count(tmp_path: Path) -> None:
    for step in range(0, 8, 2):
        run("dp=1", "llama", tmp_path, step, step + 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000008"]
    (tmp_path / "step-00000010.part").mkdir()
    found, problems = latest(tmp_path)
    assert found is not None
    assert (found.step, problems) == (8, [])
    assert latest(tmp_path / "nothing") == (None, [])


def test_a_damaged_newer_one_does_not_drive_out_the_good_ones(tmp_path: Path) -> None:
    run("dp=1", "llama", tmp_path, 0, 2)
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000009")
    (tmp_path / "step-00000009" / ".metadata").unlink()
    model, plan = plan_of("dp=1", CONFIGS["llama"])
    part = apply(model, plan)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(3, part, optimizer_for("adamw", part, 1e-3, 0.1), {})
    checkpoints.wait()
    found, _ = latest(tmp_path)
    assert found is not None
    assert found.step == 3
    assert not (tmp_path / "step-00000002").exists()


def test_updates_that_were_left_out_do_not_count(tmp_path: Path) -> None:
    model, plan = plan_of("dp=1", CONFIGS["llama"])
    part = apply(model, plan)
    for name in ("adamw", "adamw-8bit", "muon"):
        optimizer = optimizer_for(name, part, 1e-3, 0.1)
        for weight in part.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        checkpoints = Checkpoints(tmp_path / name)
        checkpoints.save(5, part, optimizer, {"updates": updates_of(optimizer)})
        checkpoints.wait()
        again = optimizer_for(name, part, 1e-3, 0.1)
        found, _ = latest(tmp_path / name)
        assert found is not None
        checkpoints.load(found, part, again)
        assert updates_of(again) == 1


def test_another_model_is_refused(tmp_path: Path) -> None:
    run("dp=1", "llama", tmp_path, 0, 1)
    found, _ = latest(tmp_path)
    assert found is not None
    model, plan = plan_of("dp=1", {**CONFIGS["llama"], "hidden_size": 64})
    part = apply(model, plan)
    with pytest.raises(InputError, match="the model's is"):
        Checkpoints(tmp_path).load(found, part, optimizer_named("adamw", part.parameters(), 1e-3, 0.1))
    model, plan = plan_of("dp=1", CONFIGS["llama"])
    part = apply(model, plan)
    with pytest.raises(InputError, match=r"has no optimizer\.momentum"):
        Checkpoints(tmp_path).load(found, part, optimizer_named("sgd-momentum", part.parameters(), 1e-3, 0.1))
