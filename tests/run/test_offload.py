"""Activations and optimizer states that live elsewhere: the same training, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import meshwright as mw
from meshwright.run.memory import offload
from meshwright.run.memory.offload import Place
from meshwright.run.memory.offload_share import OffloadShare, keep_on_host, on_host
from meshwright.run.memory.recompute import recompute
from meshwright.run.models import Context, Decoder, build
from meshwright.run.optimizers.adamw import AdamW
from meshwright.run.optimizers.choose import optimizer_named
from meshwright.run.parallel.apply import apply
from tests.run.families import CONFIGS
from tests.run.parity import GROUPS, batches, plan_of, world_of
from tests.run.plans import pipeline, span, stage
from tests.run.pool import pool

TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST", 0)


def gradients(decoder: Decoder) -> dict[str, torch.Tensor]:
    decoder.zero_grad()
    decoder(TOKENS, Context.of(TOKENS), TOKENS).backward()
    return {name: weight.grad for name, weight in decoder.named_parameters()}


@pytest.mark.parametrize("how", ["none", ("norm", "activation"), "full"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3-moe", "deepseek-v3"])
def test_gradients_are_the_same_bit_by_bit(name: str, how: Any) -> None:
    model = mw.Model.from_config(CONFIGS[name])
    decoder = build(model)
    recompute(decoder, dict.fromkeys(model.layers, how))
    expected = gradients(decoder)
    for host, peer in ((1.0, 0.0), (0.4, 0.3)):
        offload.offload(decoder, [Place("cpu", OffloadShare(host)), Place("cpu", OffloadShare(peer))])
        for key, found in gradients(decoder).items():
            assert torch.equal(found, expected[key]), key


def test_the_fraction_is_met_by_bytes_and_parameters_stay() -> None:
    model = mw.Model.from_config(CONFIGS["llama-deep"])
    decoder = build(model)
    for fraction in (0.25, 0.5, 1.0):
        share = OffloadShare(fraction)
        offload.offload(decoder, [Place("cpu", share)])
        gradients(decoder)
        assert share.moved == pytest.approx(fraction * share.seen, rel=0.1)
    kept = decoder.layer("block.0.mlp").keeper.pack(decoder.layer("block.0.mlp").up.weight.t())
    assert isinstance(kept, torch.Tensor)


def test_what_is_small_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST", 2**20)
    decoder, share = build(mw.Model.from_config(CONFIGS["llama"])), OffloadShare(1.0)
    offload.offload(decoder, [Place("cpu", share)])
    gradients(decoder)
    assert share.seen == 0


def losses(table: Any, config: dict[str, Any]) -> list[float]:
    offload.LEAST = 0
    model, plan = plan_of(table, config)
    part = apply(model, plan, seed=7, groups=GROUPS, dtype=torch.bfloat16)
    optimizer = optimizer_named("adamw", part.parameters(), 1e-3, 0.1)
    found = []
    for tokens, documents in batches("packed"):
        optimizer.zero_grad()
        found.append(part.step(part.micro_batches(tokens, documents), tokens.numel()).loss)
        optimizer.step()
    return found


AWAY = {"offload": {"activations": 0.6, "optimizer": 0.5}}
PLANS: list[tuple[dict[str, Any], str]] = [
    ({"dp": 2, "zero": 3}, "llama"),
    ({"dp": 2, "zero": 1, "recompute": "full"}, "gpt2"),
    ({"tp": 2, "sp": True, "recompute": "selective"}, "qwen3-moe"),
    ({"pp": 2, "schedule": "zero-bubble"}, "gpt2-deep"),
]


def hosted(table: Any, config: dict[str, Any]) -> float:
    """The part of the parameters that is on the host again after a step, and only there."""
    model, plan = plan_of(table, config)
    part = apply(model, plan, seed=7, groups=GROUPS)
    tokens, documents = batches("packed")[0]
    part.step(part.micro_batches(tokens, documents), tokens.numel())
    away = [weight.numel() for weight in part.parameters() if isinstance(weight, DTensor) and on_host(weight)]
    return sum(away) / sum(weight.numel() for weight in part.parameters())


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ({"dp": 2, "zero": 3}, "llama-tied"),
        ({"dp": 2, "ep": 2, "zero": 3}, "qwen3-moe"),
        ({"dp": 2, "zero": 1}, "gpt2-deep"),
        ({"dp": 4, "zero": 2, "zero_group": 2}, "llama-deep"),
        ({"micro_batches": 4}, "llama-tied"),
        ({"dp": 2}, "moe-deep"),
        ({"tp": 2, "ep": 2}, "moe-deep"),
        ({"pp": 2, "schedule": "zero-bubble"}, "gpt2-deep"),
    ],
)
def test_parameters_on_the_host(table: dict[str, Any], name: str) -> None:
    world = world_of(plan_of(table, CONFIGS[name])[1])
    expected = pool(world).run(losses, table, CONFIGS[name])
    for fraction in (0.5, 1.0):
        away = table | {"offload": {"parameters": fraction, "activations": 0.3}}
        for found, reference in zip(pool(world).run(losses, away, CONFIGS[name]), expected, strict=True):
            assert found == pytest.approx(reference, rel=2e-3)  # bfloat16 gradients are rounded elsewhere
        for part in pool(world).run(hosted, away, CONFIGS[name]):
            assert part == pytest.approx(fraction, abs=0.2)


@pytest.mark.parametrize(("table", "name"), PLANS)
def test_under_plans(table: dict[str, Any], name: str) -> None:
    world = world_of(plan_of(table, CONFIGS[name])[1])
    assert pool(world).run(losses, table | AWAY, CONFIGS[name]) == pool(world).run(losses, table, CONFIGS[name])


def test_swap_to_another_stage() -> None:
    def table(**strategy: Any) -> dict[str, Any]:
        stages = stage("0", span("embed..block.0", **strategy)), stage("1", span("block.1..head"))
        return {"world": 2, "pipelines": [pipeline(*stages)]}

    swapped = table(swap={"to": 1, "activations": 0.5}, offload={"activations": 0.25})
    assert pool(2).run(losses, swapped, CONFIGS["llama"]) == pool(2).run(losses, table(), CONFIGS["llama"])


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_on_the_host_are_updated_alike(dtype: torch.dtype, moments: torch.dtype) -> None:
    found = []
    for fraction in (0.0, 0.5, 1.0):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(8, 8).to(dtype)) for _ in range(4)]
        keep_on_host(weights, fraction)
        assert sum(map(on_host, weights)) == 4 * fraction
        optimizer = AdamW(weights, lr=1e-2, moments=moments)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.step()
        found.append([weight.detach() for weight in weights])
    for here, half, host in zip(*found, strict=True):
        assert torch.equal(here, half)
        assert torch.equal(here, host)


@pytest.mark.parametrize("name", ["sgd", "sgd-momentum", "adamw-8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_optimizers_on_the_host(name: str, dtype: torch.dtype) -> None:
    found = []
    for fraction in (0.0, 1.0):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(8, 40).to(dtype)) for _ in range(4)]
        keep_on_host(weights, fraction)
        optimizer = optimizer_named(name, weights, 1e-2, 0.1)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.step()
        found.append([weight.detach() for weight in weights])
    for here, host in zip(*found, strict=True):
        assert torch.equal(here, host)
