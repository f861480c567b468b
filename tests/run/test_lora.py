"""Adapters under any plan have the losses and gradients of one process, and of plain products in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import meshwright as mw
from meshwright.run.folder.checkpoint.gather import write_whole
from meshwright.run.folder.checkpoint.huggingface import read_weights, write_weights
from meshwright.run.memory.recompute import recompute
from meshwright.run.models import build
from meshwright.run.models.linear import SCALE
from meshwright.run.parallel.apply import apply
from tests.run.families import CONFIGS
from tests.run.parity import GROUPS, STEPS, batches, nonzero, on_a_rank, optimizer_of, plan_of, values_of, world_of
from tests.run.plans import FULL, pipeline, span, stage
from tests.run.pool import pool

RANK = 4
FULL_ALONE = {  # stages that have nothing to train: the embedding, and the head
    "world": 3,
    "pipelines": [pipeline(stage("0", span("embed")), stage("1", span("block.0..block.1")), stage("2", span("norm..head")))],
}  # fmt: skip
PLANS: dict[str, tuple[str, ...]] = {
    "dp=2": ("llama", "qwen3-moe"),
    "tp=2,sp=true": ("gpt2", "qwen2-moe", "deepseek-v3"),
    "tp=2,sp=false": ("qwen2", "deepseek-v3"),
    "micro_batches=1,tp=2,sp=false,ulysses=2,zero=2": ("moe-balanced",),  # balance is of a micro-batch
    "micro_batches=1,pp=2,ring=2": ("moe-balanced",),
    "tp=4,sp=true": ("llama",),
    "dp=2,tp=4,sp=false,zero=3": ("qwen3",),
    "dp=2,zero=1": ("llama-tied",),
    "dp=2,zero=3": ("gpt2", "qwen3-moe"),
    "dp=4,zero=2,zero_group=2,ep=2": ("qwen3-moe",),
    "ulysses=2,ring=2": ("llama",),
    "pp=2": ("llama-tied", "mixtral"),
    "pp=2,schedule=zero-bubble": ("gpt2-deep", "moe-deep"),
    "pp=2,dp=2,zero=1,schedule=zero-bubble": ("llama-deep",),
    "pp=2,dp=2,ep=2,zero=3,schedule=zbv,virtual=2,micro_batches=4": ("moe-deep",),
    "pp=2,tp=2,sp=true,recompute=full": ("llama",),
    "dp=2,zero=3,recompute=selective": ("qwen2-moe",),
    "three spans: ring, tp without sp, zero 3": ("llama",),
    "two pipelines, cut differently": ("llama", "qwen3-moe"),
    "stages with nothing to train": ("llama", "llama-tied"),
}
TABLES: dict[str, Any] = {title: table for title, (table, _) in FULL.items()}
TABLES["stages with nothing to train"] = FULL_ALONE


@pytest.mark.parametrize(("text", "name"), [(text, name) for text, names in PLANS.items() for name in names])
def test_losses_and_gradients_of_one_process(text: str, name: str) -> None:
    table = TABLES.get(text, text)
    _, plan = plan_of(table, CONFIGS[name])
    for losses, expected, errors in pool(world_of(plan)).run(on_a_rank, table, CONFIGS[name], "packed", RANK):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert len(set(losses)) == STEPS
        assert all(".lora." in key for key in errors)
        assert {key: error for key, error in errors.items() if error > 1e-4} == {}


def test_a_layer_beside_plain_products_of_the_merged_weights() -> None:
    """A feed-forward layer by hand, in float64: its output and the gradients of its adapters."""
    decoder = build(mw.Model.from_config(CONFIGS["llama"]), lora=RANK).double()
    layer = decoder.layer("block.0.mlp")
    for product in (layer.up, layer.down):
        torch.nn.init.normal_(product.lora.b, std=0.1)
    x = torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    from meshwright.run.models import Context

    context = Context.of(torch.zeros(2, 5))
    found = layer(x, context)
    found.square().sum().backward()
    adapters = [part.detach().requires_grad_() for p in (layer.up, layer.down) for part in (p.lora.a, p.lora.b)]
    a_up, b_up, a_down, b_down = adapters
    normed = functional.rms_norm(x, (32,), layer.norm.weight, layer.norm.eps)
    gate, up = functional.linear(normed, layer.up.weight + SCALE * b_up @ a_up).chunk(2, dim=-1)
    expected = x + functional.linear(functional.silu(gate) * up, layer.down.weight + SCALE * b_down @ a_down)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    expected.square().sum().backward()
    for part, plain in zip(
        (layer.up.lora.a, layer.up.lora.b, layer.down.lora.a, layer.down.lora.b), adapters, strict=True
    ):
        assert torch.allclose(part.grad, plain.grad, rtol=1e-9, atol=1e-12)
    assert layer.up.weight.grad is None
    assert layer.norm.weight.grad is None


@pytest.mark.parametrize("name", ["llama", "deepseek-v3", "qwen2-moe"])
def test_merged_weights_do_what_adapters_do(name: str, tmp_path: Path) -> None:
    model = mw.Model.from_config(CONFIGS[name])
    adapted = build(model, lora=RANK)
    for key, module, kind in adapted.named():
        if key.endswith(".lora.b"):
            getattr(module, kind).data.copy_(nonzero(key, getattr(module, kind).shape))
    write_weights(model, adapted, tmp_path)
    plain = build(model)
    tokens = batches("whole")[0][0]
    before = plain(tokens)
    read_weights(model, plain, tmp_path)
    assert torch.allclose(plain(tokens), adapted(tokens), atol=1e-5)
    assert not torch.allclose(before, adapted(tokens), atol=1e-2)
    again = build(model, lora=RANK, seed=1)  # adapters are not in the files: fresh ones add nothing
    read_weights(model, again, tmp_path)
    assert torch.allclose(again(tokens), plain(tokens), atol=1e-6)


def exported(table: str, config: dict[str, Any], folder: str) -> int:
    model, plan = plan_of(table, config)
    part = apply(model, plan, groups=GROUPS, values=values_of(model), lora=RANK)
    write_whole(model, part, folder)
    return part.trained()


def test_processes_write_merged_weights_and_count_what_they_train(tmp_path: Path) -> None:
    counts = pool(4).run(exported, "tp=2,sp=true,dp=2,zero=3", CONFIGS["qwen2-moe"], str(tmp_path))
    model = mw.Model.from_config(CONFIGS["qwen2-moe"])
    # qkv 32 -> 64, proj 32 -> 32, shared gate and up 32 -> 48, shared down 24 -> 32, in two blocks
    assert counts == [2 * RANK * (32 + 64 + 32 + 32 + 32 + 48 + 24 + 32)] * 4
    plain, adapted = build(model), build(model, lora=RANK)
    values = values_of(model)
    for key, module, kind in adapted.named():
        getattr(module, kind).data.copy_(values(key, getattr(module, kind).shape))
    read_weights(model, plain, tmp_path)
    tokens = batches("whole")[0][0]
    assert torch.allclose(plain(tokens), adapted(tokens), atol=1e-5)


def test_fresh_adapters_add_nothing_and_learn() -> None:
    model = mw.Model.from_config(CONFIGS["llama"])
    plain, adapted = build(model), build(model, lora=RANK)
    tokens = batches("whole")[0][0]
    assert torch.equal(plain(tokens), adapted(tokens))
    frozen = {key: getattr(module, kind).clone() for key, module, kind in adapted.named() if ".lora." not in key}
    optimizer = optimizer_of(weight for weight in adapted.parameters() if weight.requires_grad)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = functional.cross_entropy(adapted(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)
    assert all(torch.equal(getattr(m, k), frozen[key]) for key, m, k in adapted.named() if ".lora." not in key)


@pytest.mark.parametrize("ops", [("gate",), ("qkv", "up", "activation"), ("norm", "proj", "down")])
def test_repeated_operators_have_the_same_gradients(ops: tuple[str, ...]) -> None:
    model = mw.Model.from_config(CONFIGS["llama"])
    found = []
    for repeated in ((), ops):
        decoder = build(model, lora=RANK)
        for key, module, kind in decoder.named():
            if key.endswith(".lora.b"):
                getattr(module, kind).data.copy_(nonzero(key, getattr(module, kind).shape))
        recompute(decoder, {layer: tuple(op for op in repeated if op in layer.op_names) for layer in model.layers})
        decoder(batches("whole")[0][0]).square().sum().backward()
        found.append({key: getattr(m, k).grad for key, m, k in decoder.named() if ".lora." in key})
    far = {key: float((found[1][key] - one).abs().max() / one.abs().max()) for key, one in found[0].items()}
    assert max(far.values()) < 1e-5, far
