"""Tensors of replicas on processors: as many bytes as predicted at every ZeRO level, and none kept after their use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.cost.memory.device_memory import plan_memory
from meshwright.run.loop import advance, begin
from meshwright.run.memory.host_memory import Peaks, malloc_bytes
from meshwright.run.options import Training
from tests.run.pool import pool

_WIDE = {"model_type": "gpt2", "n_layer": 2, "n_embd": 384, "n_head": 6, "vocab_size": 24000, "n_positions": 128}
counted = pytest.mark.skipif(not malloc_bytes(), reason="the C library counts no bytes")


def plan_of(zero: int) -> mw.Plan:
    model = mw.Model.from_config({**_WIDE, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0})
    job = mw.Job(model, mw.Cluster.preset("2xcpu"), 4, seq_len=64, precision="fp32")
    return mw.Plan.of({"dp": 2, "zero": zero, "micro_batches": 1}, job)


def trained(zero: int) -> tuple[int, int]:
    """Return the most bytes of tensors in four steps, and the bytes that a last `zero_grad` frees."""
    plan = plan_of(zero)
    with Peaks("cpu") as peaks:
        loop: Any = begin(plan.resolve(), plan, Training(steps=9), "cpu")
        batches = loop.part.micro_batches(torch.zeros(4, 64, dtype=torch.long))
        for step in range(4):
            advance(loop, batches, step, stop=False)
    before = malloc_bytes()
    loop.optimizer.zero_grad(set_to_none=True)
    return peaks.facts()["peak_tensor_bytes"], before - malloc_bytes()


@counted
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_take_what_was_predicted_of_them(zero: int) -> None:
    (row,) = plan_memory(plan_of(zero))
    for most, freed in pool(2).run(trained, zero):
        assert row.allocated == pytest.approx(most, rel=0.25)
        assert freed > 0.9 * 4 * plan_of(zero).resolve().model.parameters / (2 if zero else 1)
