"""Training on one device: losses in bfloat16 beside those in float32."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-moe"])
def test_sixteen_bits_follow_thirty_two(name: str) -> None:
    found, left_out = {}, {}
    for precision in ("fp32", "bf16", "fp16"):
        job = mw.Job(mw.Model.preset(name), mw.Cluster.preset("1xh200"), 8, seq_len=128, precision=precision)
        events = mw.train(mw.Plan.of({"micro_batches": 2}, job), steps=12, lr=1e-3)
        steps = [event for event in events if event["event"] == "step"]
        found[precision] = [event["loss"] for event in steps]
        left_out[precision] = [i for i, event in enumerate(steps) if event.get("skipped")]
    assert found["fp32"][-1] < found["fp32"][0] - 0.3
    assert found["bf16"] == pytest.approx(found["fp32"], rel=0.02)
    # float16 leaves out steps whose scaled gradients overflow, with the next of which it falls behind.
    same = left_out["fp16"][0] + 1 if left_out["fp16"] else len(found["fp16"])
    assert found["fp16"][:same] == pytest.approx(found["fp32"][:same], rel=0.02)
    assert found["fp16"][-1] < found["fp16"][0] - 0.3
    assert left_out["fp32"] == left_out["bf16"] == []


@pytest.mark.parametrize(
    "strategy", [{"offload": {"parameters": 0.5, "optimizer": 0.5}}, {"offload": {"parameters": 1.0}}]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_on_the_host(strategy: dict[str, object], precision: str) -> None:
    job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("1xh200"), 8, seq_len=128, precision=precision)
    here, away = (
        [
            e["loss"]
            for e in mw.train(mw.Plan.of({"micro_batches": 2, **how}, job), steps=6, lr=1e-3)
            if e["event"] == "step"
        ]
        for how in ({}, strategy)
    )
    assert away == pytest.approx(here, rel=1e-4 if precision == "fp32" else 2e-2)


def test_muon() -> None:
    job = mw.Job(mw.Model.preset("tiny-moe"), mw.Cluster.preset("1xh200"), 8, seq_len=128, optimizer="muon")
    losses = [
        e["loss"] for e in mw.train(mw.Plan.of({"micro_batches": 2}, job), steps=12, lr=1e-3) if e["event"] == "step"
    ]
    assert losses[-1] < losses[0] - 0.3
