"""Muon under plans against a loop of one process with matrices taken apart by hand, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import meshwright as mw
from meshwright.run.models import Context, build
from meshwright.run.optimizers.choose import optimizer_for
from meshwright.run.optimizers.muon import orthogonal
from meshwright.run.parallel.apply import apply
from tests.run.families import CONFIGS
from tests.run.parity import GROUPS, batches, plan_of, world_of
from tests.run.plans import FULL
from tests.run.pool import pool

RATE, DECAY = 1e-2, 0.1


def by_hand(u: torch.Tensor) -> torch.Tensor:
    """Singular values through the quintic, five times: what Newton-Schulz steps do, without a product of matrices."""
    left, values, right = torch.linalg.svd(u.double(), full_matrices=False)
    values = values / (values.norm() + 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return 0.2 * max(u.shape) ** 0.5 * (left * values) @ right


def matrices(config: dict[str, Any], key: str, weight: torch.Tensor) -> list[torch.Tensor]:
    """Views of the matrices in a parameter of the blocks."""
    if key.endswith("qkv.weight"):
        kv = config["num_key_value_heads"] * config.get(
            "head_dim", config["hidden_size"] // config["num_attention_heads"]
        )
        return list(weight.split([weight.shape[0] - 2 * kv, kv, kv]))
    if key.endswith("experts.up"):
        return [half for expert in weight for half in expert.chunk(2)]
    if key.endswith("experts.down"):
        return list(weight)
    return list(weight.chunk(2)) if key.endswith(".up.weight") else [weight]


def by_one_process(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    decoder = build(mw.Model.from_config(config), seed=7)
    every = {key: getattr(module, kind) for key, module, kind in decoder.named()}
    taken = {key: weight for key, weight in every.items() if key.startswith("block.") and weight.dim() > 1}
    rest = {key: weight for key, weight in every.items() if key not in taken}
    groups = [
        {"params": [w for w in rest.values() if w.dim() > 1], "weight_decay": DECAY},
        {"params": [w for w in rest.values() if w.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    moments = {key: torch.zeros_like(weight) for key, weight in taken.items()}
    for tokens, _ in batches("whole"):
        decoder.zero_grad()
        logits = decoder(tokens, Context.of(tokens, divisor=tokens.numel()))[:, :-1].flatten(0, 1)
        (functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum") / tokens.numel()).backward()
        adam.step()
        for key, weight in taken.items():
            moments[key].mul_(0.95).add_(0.05 * weight.grad)
            ahead = 0.05 * weight.grad + 0.95 * moments[key]
            parts = zip(matrices(config, key, weight.data), matrices(config, key, ahead), strict=True)
            for value, direction in parts:
                value.copy_(value * (1 - RATE * DECAY) - RATE * by_hand(direction).float())
    return {key: weight.detach() for key, weight in every.items()}


def on_a_rank(table: Any, config: dict[str, Any]) -> dict[str, float]:
    """How far weights are from those of one process after three steps, beside how far they have moved."""
    model, plan = plan_of(table, config)
    expected, start = by_one_process(config), build(model, seed=7)
    begun = {key: getattr(module, kind).detach() for key, module, kind in start.named()}
    part = apply(model, plan, seed=7, groups=GROUPS)
    optimizer = optimizer_for("muon", part, RATE, DECAY)
    for tokens, _ in batches("whole"):
        optimizer.zero_grad()
        part.step(part.micro_batches(tokens), tokens.numel())
        optimizer.step()
    errors: dict[str, float] = {}
    for span in part.spans:
        for key, module, kind in span.decoder.named():
            for box, value in span.layouts[key].pieces(getattr(module, kind).detach()):
                at = tuple(slice(*interval) for interval in box)
                off, moved = (value - expected[key][at]).norm(), (begun[key][at] - expected[key][at]).norm()
                errors[key] = max(errors.get(key, 0.0), float(off / moved))
    return errors


PLANS: list[tuple[Any, str]] = [
    ("micro_batches=2", "llama"),
    ("dp=2", "llama"),
    ("tp=2,sp=true", "llama"),
    ("tp=2,sp=false,dp=2,zero=3", "qwen3"),
    ("dp=2,zero=1", "qwen3-moe"),
    ("dp=2,ep=2,zero=3", "qwen3-moe"),
    ("dp=2,tp=2,sp=true,ep=2,etp=2", "qwen3-moe"),
    ("tp=4,sp=true", "llama"),
    ("pp=2,dp=2,zero=2,schedule=zbv,virtual=2,micro_batches=4", "llama-deep"),
    (FULL["two pipelines, cut differently"][0], "llama"),
    ({"dp": 2, "zero": 2, "offload": {"optimizer": 0.5, "parameters": 0.5}}, "llama"),
]


@pytest.mark.parametrize(("table", "name"), PLANS, ids=str)
def test_weights_of_one_process(table: Any, name: str) -> None:
    for errors in pool(world_of(plan_of(table, CONFIGS[name])[1])).run(on_a_rank, table, CONFIGS[name]):
        assert {key: error for key, error in errors.items() if error > 2e-3} == {}


def test_orthogonal_against_singular_values() -> None:
    for shape in ((8, 24), (24, 8), (16, 16)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(orthogonal(x), by_hand(x).float(), atol=1e-4, rtol=1e-4)


def test_a_matrix_against_pytorchs_own() -> None:
    """Which computes in bfloat16."""
    job_model, plan = plan_of("micro_batches=2", CONFIGS["llama"])
    part = apply(job_model, plan, seed=7)
    optimizer = optimizer_for("muon", part, RATE, DECAY)
    layer = part.spans[0].decoder.layer("block.0.mlp")
    peer_weight = torch.nn.Parameter(layer.down.weight.detach().clone())
    peer = torch.optim.Muon([peer_weight], lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    begun = peer_weight.detach().clone()
    for tokens, _ in batches("whole"):
        optimizer.zero_grad()
        part.step(part.micro_batches(tokens), tokens.numel())
        peer_weight.grad = layer.down.weight.grad.clone()
        optimizer.step()
        peer.step()
    off = (layer.down.weight - peer_weight).norm() / (begun - peer_weight).norm()
    assert off < 2e-2
