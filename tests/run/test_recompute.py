"""Repeated operators: the same gradients, and the memory that the cost model counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import meshwright as mw
from meshwright.models.layer import Layer
from meshwright.run.memory.checkpointing import Keeper
from meshwright.run.memory.recompute import recompute
from meshwright.run.models import Context, Decoder, build
from tests.run.families import CONFIGS

TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))


def gradients(decoder: Decoder) -> dict[str, torch.Tensor]:
    decoder.zero_grad()
    decoder(TOKENS, Context.of(TOKENS), TOKENS).backward()
    return {name: weight.grad for name, weight in decoder.named_parameters()}


def every_name(model: mw.Model) -> list[Any]:
    """Every operator on its own, all of them at once, and levels."""
    names = sorted({name for layer in model.layers for name in layer.op_names})
    return [*((name,) for name in names), tuple(names), "selective", "full"]


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_the_same_bit_by_bit(name: str) -> None:
    """Save where one of gate and up is repeated: then they are two products instead of one."""
    model = mw.Model.from_config(CONFIGS[name])
    decoder = build(model)
    expected = gradients(decoder)
    for how in every_name(model):
        recompute(decoder, dict.fromkeys(model.layers, how))
        off = 1e-4 if how[0].removeprefix("shared_") in {"gate", "up"} else 0.0
        for key, found in gradients(decoder).items():
            error = (found - expected[key]).abs().max() / expected[key].abs().max().clamp(min=1e-8)
            assert float(error) <= off, f"{how}: {key}"


class Counting(Keeper):
    """Bytes of all that stays, each storage once."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.kept: dict[int, torch.Tensor] = {}
        self.given = {one.untyped_storage().data_ptr() for one in layer.parameters()}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in self.given:
            self.kept[tensor.untyped_storage().data_ptr()] = tensor  # held: no address is used twice
        return tensor

    def bytes(self) -> int:
        return sum(one.untyped_storage().nbytes() for one in self.kept.values())


def kept(decoder: Decoder, layer: Layer, how: Any) -> int:
    recompute(decoder, {layer: how})
    module = decoder.layer(layer.name)
    module.keeper = Counting(module)
    x = torch.randn(2, 16, 32, requires_grad=True) * 1.0
    module(x, Context.of(TOKENS))
    return module.keeper.bytes()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "how", ["selective", ("norm",), ("activation",), ("gate", "up"), ("gate",), ("qkv",), ("core",)]
)
@pytest.mark.parametrize("place", ["attention", "mlp"])
def test_memory_falls_as_the_cost_model_counts(place: str, how: Any) -> None:
    """At least as many bytes, in float32 (less the attention's row sums); exactly those of a product. PyTorch's own norm
    and gates, which run on the CPU, keep more than the kernels that are counted, and so have more to save."""
    model = mw.Model.from_config(CONFIGS["llama"])
    layer = model.layer(f"block.0.{place}")
    part = mw.Slice(micro_batch=2, seq_len=16, precision="fp32")
    decoder = build(model)
    saved = kept(decoder, layer, "none") - kept(decoder, layer, how)
    counted = float(layer.kept_bytes(part) - layer.kept_bytes(part, how))
    slack = 4 * TOKENS.numel() * 8
    assert saved >= counted - slack
    if counted == 0:
        assert saved == 0
    elif "gate" in how:
        assert saved == counted


def test_a_block_that_is_repeated_whole_keeps_its_input() -> None:
    model = mw.Model.from_config(CONFIGS["llama"])
    decoder = build(model)
    blocks = [layer for layer in model.layers if layer.block]
    recompute(decoder, dict.fromkeys(blocks, "full"))
    held: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    given = {one.untyped_storage().data_ptr() for one in decoder.parameters()}
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder(TOKENS, Context.of(TOKENS))
    bytes_ = sum(one.untyped_storage().nbytes() for key, one in held.items() if key not in given)
    assert bytes_ < kept(build(model), model.layer("block.0.mlp"), "none") + kept(
        build(model), model.layer("block.0.attention"), "none"
    )
