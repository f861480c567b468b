"""Long runs keep their memory: drawn plans with every kind of recompute, offload, swap, adapters and mixtures."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from meshwright.errors import PlanError
from meshwright.run.data import open_data
from meshwright.run.data.prefetch import Feed
from meshwright.run.loop import Loop, advance, begin
from meshwright.run.memory import offload
from meshwright.run.memory.host_memory import malloc_bytes
from meshwright.run.options import Training
from tests.run.draws import FAMILIES, drawn, plan_of
from tests.run.pool import pool

_NOISE = 256 * 1024  # bytes; the smallest activation here has 9 KiB, and a leak keeps one a step at least
_STATE: dict[str, Any] = {}  # of a process of a pool


def soaked(seed: int) -> tuple[str, dict[str, Any], int]:
    """Return a family, a plan for one to four ranks with things offloaded and swapped, and the rank of its adapters."""
    random = Random(seed)
    name, _, table, _ = drawn(8 * seed + seed % 4)  # worlds of 1 to 4
    for pipe in table["pipelines"]:
        last = len(pipe["stages"]) - 1
        for s, each in enumerate(pipe["stages"]):
            for one in each["spans"]:
                before = dict(one)
                shares = {kind: random.choice([0.0, 0.5, 1.0]) for kind in ("optimizer", "activations", "parameters")}
                one["offload"] = shares
                if s < last and random.random() < 0.5:
                    one["swap"] = {"to": last, "activations": 0.5}
                    one["offload"]["activations"] = min(shares["activations"], 0.5)
                if not _stands(table, name):
                    one.pop("swap", None)
                if not _stands(table, name):
                    one.clear()
                    one.update(before)
    return name, table, random.choice([0, 0, 4])


def _stands(table: dict[str, Any], name: str) -> bool:
    try:
        plan_of(table, FAMILIES[name])
    except PlanError:
        return False
    return True


def prepare(table: dict[str, Any], config: dict[str, Any], lora: int) -> None:
    """Build what this rank trains."""
    offload.LEAST = 1  # type: ignore[misc] - tensors here are small
    _, plan = plan_of(table, config)
    job = plan.resolve()
    run = Training(steps=10_000, lora=lora, decay="constant")
    data = open_data("synthetic", vocab=64, seq_len=job.seq_len, global_batch=job.global_batch)
    loop = begin(job, plan, run, "cpu")
    _STATE.clear()
    _STATE.update(loop=loop, feed=iter(Feed(data, loop.part, range(10_000), "cpu")))


def train(steps: int) -> list[tuple[int, int]]:
    """Train some steps more; return bytes that malloc has handed out, and of the process, after each."""
    loop: Loop = _STATE["loop"]
    held = []
    for _ in range(steps):
        step, batches = next(_STATE["feed"])
        advance(loop, batches, step, stop=False)
        held.append((malloc_bytes(), _resident()))
    return held


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def check(seed: int, steps: int) -> None:
    """Hold every rank's memory after the last steps against that after the fifth."""
    name, table, lora = soaked(seed)
    world = pool(table["world"])
    world.run(prepare, table, FAMILIES[name], lora)
    parts = [world.run(train, 20) for _ in range(steps // 20)]
    for rank in range(table["world"]):
        held = [one for part in parts for one in part[rank]]
        early, late = held[4:20], held[-20:]
        more = max(tensors for tensors, _ in late) - max(tensors for tensors, _ in early)
        assert more < _NOISE, f"rank {rank} of {table}: {more:,} bytes more"
        grown = max(process for _, process in late) / max(process for _, process in early)
        assert grown < 1.01, f"rank {rank} of {table}: the process grew {grown:.4f} times"


@pytest.mark.parametrize(
    "seed", [9, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 26) if seed != 9)]
)
def test_a_drawn_plan_for_sixty_steps(seed: int) -> None:
    check(seed, 60)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [31, 32, 33, 34])
def test_two_thousand_steps(seed: int) -> None:
    check(seed, 2000)


def test_draws_have_everything() -> None:
    """Nothing that a plan may do with memory is missing among the draws."""
    found = [soaked(seed) for seed in range(2, 26)]
    spans = [
        one for _, table, _ in found for pipe in table["pipelines"] for each in pipe["stages"] for one in each["spans"]
    ]
    assert {table["world"] for _, table, _ in found} == {1, 2, 3, 4}
    assert any(lora for *_, lora in found)
    assert any("balance" in name for name, *_ in found)
    assert any("swap" in one for one in spans)
    assert {kind for one in spans for kind, share in one.get("offload", {}).items() if share} == {
        "optimizer", "activations", "parameters"
    }  # fmt: skip
    assert {one["recompute"] if isinstance(one["recompute"], str) else "by name" for one in spans} == {
        "none", "selective", "full", "by name"
    }  # fmt: skip
