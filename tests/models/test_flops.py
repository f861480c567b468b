"""Forward FLOPs equal what PyTorch counts while transformers' own models run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from meshwright.models import Model, Slice, presets

LENGTH = 64


def full_attention(model: Model) -> Model:
    """PyTorch counts masked pairs too: count them here as well, for the comparison."""
    layers = []
    for layer in model.layers:
        ops = tuple(replace(op, pairs="full", window=0) if op.pairs == "causal" else op for op in layer.ops)
        layers.append(replace(layer, ops=ops))
    return replace(model, layers=tuple(layers))


def counted(module: torch.nn.Module, *inputs: Any, **keywords: Any) -> int:
    """What PyTorch counts, less the table of angles, which some versions of transformers build by a product."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(*inputs, **keywords)
    parts = counter.get_flop_counts()
    angles = sum(sum(flops.values()) for name, flops in parts.items() if name.endswith("rotary_emb"))
    return counter.get_total_flops() - angles


def on_meta(name: str, **changes: Any) -> torch.nn.Module:
    preset = presets()[name]
    config = transformers.AutoConfig.for_model(**(preset.config | changes))
    config._attn_implementation = "eager"
    with torch.device("meta"):
        return getattr(transformers, preset.architecture)(config).eval()


@pytest.mark.parametrize(
    "name", ["gpt2", "bloom-560m", "llama3.2-1b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b", "bert-base", "tiny-llama"]
)
def test_text_models(name: str) -> None:
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
    expected = counted(on_meta(name), ids)
    assert full_attention(Model.preset(name)).forward_flops(Slice(1, LENGTH)) == pytest.approx(expected, rel=1e-12)


def test_encoder_decoder() -> None:
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
    expected = counted(on_meta("t5-small"), input_ids=ids, decoder_input_ids=ids)
    assert full_attention(Model.preset("t5-small")).forward_flops(Slice(1, LENGTH)) == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize("name", ["vit-base", "vit-huge", "swin-base", "swin-huge"])
def test_vision_models(name: str) -> None:
    model = Model.preset(name)
    expected = counted(on_meta(name), torch.zeros(1, 3, 224, 224, device="meta"))
    assert model.forward_flops(Slice(1, model.tokens)) == pytest.approx(expected, rel=1e-12)


def test_swin_on_a_grid_that_windows_do_not_divide() -> None:
    """256 pixels make 64, 32, 16 and 8 tokens a side, in windows of 7: transformers pads, and so the count must."""
    changes = {"image_size": 256}
    expected = counted(on_meta("swin-base", **changes), torch.zeros(1, 3, 256, 256, device="meta"))
    model = Model.from_config(presets()["swin-base"].config | changes)
    assert model.forward_flops(Slice(1, model.tokens)) == pytest.approx(expected, rel=1e-12)


def test_latent_attention() -> None:
    """DeepSeek with dense feed-forward layers only, so that routing does not need data."""
    changes = {"num_hidden_layers": 2, "first_k_dense_replace": 2, "vocab_size": 1000}
    config = presets()["deepseek-v3"].config | changes
    expected = counted(on_meta("deepseek-v3", **changes), torch.zeros(1, LENGTH, dtype=torch.long, device="meta"))
    assert full_attention(Model.from_config(config)).forward_flops(Slice(1, LENGTH)) == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("tiny-moe", {}),
        ("mixtral-8x7b", {"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                          "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}),
        ("deepseek-v3", {"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
                         "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "intermediate_size": 160,
                         "moe_intermediate_size": 48, "n_routed_experts": 16, "first_k_dense_replace": 1,
                         "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}),
    ],
)  # fmt: skip
def test_mixtures_run_for_real(kind: str, changes: dict[str, Any]) -> None:
    """Every token goes to exactly top-k experts whatever the router says, so a real run counts the same."""
    preset = presets()[kind]
    config = transformers.AutoConfig.for_model(**(preset.config | changes))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    module = getattr(transformers, preset.architecture)(config).eval()
    expected = counted(module, torch.randint(0, 500, (1, LENGTH)))
    model = full_attention(Model.from_config(preset.config | changes))
    assert model.forward_flops(Slice(1, LENGTH)) == pytest.approx(expected, rel=1e-12)


def pairs(length: int, window: int) -> int:
    """Brute force: query i sees itself and what is before it, at most `window` keys."""
    return sum(1 for i in range(length) for j in range(length) if j <= i and (not window or i - j < window))


@pytest.mark.parametrize(("length", "window"), [(1, 0), (7, 0), (64, 0), (64, 16), (64, 64), (10, 64), (33, 1)])
def test_causal_pairs_by_brute_force(length: int, window: int) -> None:
    core = next(op for op in Model.preset("mistral-7b").layers[1].ops if op.name == "core")
    assert replace(core, window=window).pair_count(length) == pairs(length, window)


def test_capacity_scales_expert_work_only() -> None:
    config = presets()["tiny-moe"].config
    cut = Slice(1, LENGTH)
    dropless = Model.from_config(config).layer("block.0.moe")
    capped = Model.from_config(config | {"moe_capacity_factor": 1.5}).layer("block.0.moe")
    extra = {
        a.name: b.forward_flops(cut, LENGTH) / max(a.forward_flops(cut, LENGTH), 1)
        for a, b in zip(dropless.ops, capped.ops, strict=True)
    }
    assert extra["expert_up"] == extra["expert_down"] == 1.5
    assert extra["router"] == 1.0


def test_bigmac_moves_less_and_counts_its_projections() -> None:
    """Descend, communicate, communicate, ascend: h = 128 travels as r = 32, experts are r -> f -> r."""
    config = presets()["tiny-moe"].config
    plain = Model.from_config(config).layer("block.0.moe")
    narrow = Model.from_config(config | {"moe_bottleneck_size": 32}).layer("block.0.moe")
    cut = Slice(1, LENGTH)
    assert plain.dispatch_bytes(cut) == 4 * narrow.dispatch_bytes(cut) == LENGTH * 2 * 128 * 2
    h, r, f, experts = 128, 32, 128, 8
    router_and_norm = h * experts + h
    assert narrow.parameters == 2 * h * r + experts * 3 * r * f + router_and_norm
    assert plain.parameters == experts * 3 * h * f + router_and_norm
