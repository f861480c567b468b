"""Kept activations: against the published formula, and against what PyTorch really saves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from meshwright.models import Model, Slice, presets


def block_bytes(model: Model, cut: Slice, recompute: object = "none") -> float:
    return sum(layer.kept_bytes(cut, recompute) for layer in model.layers if layer.block == model.blocks[1])  # type: ignore[arg-type]


# Korthikanti et al. 2022, table 2: bytes per layer of a GPT with dropout, 16 bit, unfused attention.
@pytest.mark.parametrize(("seq", "batch"), [(2048, 1), (1024, 4)])
@pytest.mark.parametrize(
    ("tp", "sp", "recompute", "formula"),
    [
        (1, False, "none", lambda a, s, h, t: 34 + 5 * a * s / h),
        (8, False, "none", lambda a, s, h, t: 10 + 24 / t + 5 * a * s / (h * t)),
        (8, True, "none", lambda a, s, h, t: 34 / t + 5 * a * s / (h * t)),
        (8, False, ["core"], lambda a, s, h, t: 10 + 24 / t),
        (8, True, ["core"], lambda a, s, h, t: 34 / t),
        (1, False, "full", lambda a, s, h, t: 2),
        (8, True, "full", lambda a, s, h, t: 2 / t),
    ],
)
def test_gpt3_equals_published_formula(seq, batch, tp, sp, recompute, formula) -> None:  # type: ignore[no-untyped-def]
    model = Model.preset("gpt3-175b")
    cut = Slice(batch, seq, "bf16", tp, sp, fused_attention=False)
    hidden, heads = 12288, 96
    expected = seq * batch * hidden * formula(heads, seq, hidden, tp)
    # The formula leaves out the mean and variance of the two norms, 16 bytes per token.
    statistics = 0 if recompute == "full" else 16 * seq * batch / (tp if sp else 1)
    assert block_bytes(model, cut, recompute) == pytest.approx(expected + statistics, rel=1e-12)


class Saved:
    """Bytes of every tensor that autograd keeps, each storage once, parameters not counted."""

    def __init__(self, module: nn.Module) -> None:
        self.seen = {p.untyped_storage().data_ptr(): None for p in module.parameters()}
        self.bytes = 0
        self.alive: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.seen:
            self.seen[storage.data_ptr()] = None
            self.alive.append(tensor)
            self.bytes += storage.nbytes()
        return tensor


class PlainBlock(nn.Module):
    """A GPT-2 block as anyone would write it with PyTorch's own modules."""

    def __init__(self, hidden: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, width), nn.Linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        context = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(context.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.ln2(x))))


@pytest.mark.parametrize(("batch", "seq"), [(1, 64), (3, 32)])
def test_plain_gpt_block_equals_what_pytorch_saves(batch: int, seq: int) -> None:
    config = presets()["tiny-gpt2"].config
    block = PlainBlock(128, 4, 512)
    saved = Saved(block)
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda t: t):
        block(torch.randn(batch, seq, 128, requires_grad=True))
    assert block_bytes(Model.from_config(config), Slice(batch, seq, "fp32")) == saved.bytes


def test_llama_block_by_hand() -> None:
    """Llama-3 8B, bf16, per token: 2 residuals, 2 normed inputs, q k v context, gate+up and product; statistics in fp32."""
    h, kv, f, heads, seq = 4096, 1024, 14336, 32, 100
    expected = 2 * (2 * h + 2 * h + 2 * h + 2 * kv + 3 * f) + 4 * (2 + heads)
    assert block_bytes(Model.preset("llama3-8b"), Slice(1, seq)) == expected * seq


def test_every_sequence_cut_divides_everything() -> None:
    model = Model.preset("llama3-8b")
    whole = model.kept_bytes(Slice(1, 8192))
    for cut in ({"ulysses": 4}, {"ring": 4}, {"ulysses": 2, "ring": 2}, {"tp": 4, "sp": True}):
        assert model.kept_bytes(Slice(1, 8192, **cut)) == pytest.approx(whole / 4)  # type: ignore[arg-type]


def test_levels_are_ordered() -> None:
    for name in presets():
        model = Model.preset(name)
        cut = Slice(1, model.default_seq_len())
        none, selective, full = (model.kept_bytes(cut, level) for level in ("none", "selective", "full"))
        assert none >= selective >= full > 0, name


def test_fp8_keeps_matmul_inputs_in_one_byte() -> None:
    layer = Model.preset("llama3-8b").layer("block.0.mlp")
    saved = layer.kept_bytes(Slice(1, 1000, "bf16")) - layer.kept_bytes(Slice(1, 1000, "fp8"))
    assert saved == 1000 * (4096 + 14336)  # the normed input and the activated product


@pytest.mark.parametrize(("tp", "per_head_group"), [(1, 8), (4, 2), (8, 1), (16, 1)])
def test_key_value_heads_are_repeated_past_their_number(tp: int, per_head_group: int) -> None:
    """8 key/value heads of 128 under tp: whole heads each, one per device from tp 8 on."""
    layer = Model.preset("llama3-70b").layer("block.0.attention")
    q_and_proj = 2 * 8192 * 8192 // tp
    kv = 2 * 8192 * 128 * per_head_group
    assert layer.parameters_on(Slice(tp=tp)) == q_and_proj + kv + 8192


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (8, 1), (64, 1), (16, 2), (256, 1)])
def test_experts_are_dealt_out(ep: int, etp: int) -> None:
    layer = Model.preset("deepseek-v3").layer("block.10.moe")
    assert layer.expert_parameters_on(Slice(ep=ep, etp=etp)) == 256 * 3 * 7168 * 2048 // (ep * etp)


def test_sharded_flops_sum_to_the_whole() -> None:
    for name in ("llama3-70b", "deepseek-v3", "qwen3-30b-a3b", "t5-large"):
        model = Model.preset(name)
        whole = model.forward_flops(Slice(1, 4096))
        assert 32 * model.forward_flops(Slice(1, 4096, tp=4, sp=True, ulysses=2, ring=4)) == pytest.approx(whole)


def test_what_crosses_to_the_next_layer() -> None:
    t5 = Model.preset("t5-large")
    cut = Slice(2, 512, "bf16")
    assert t5.layer("encoder.block.3").output_bytes(cut) == 2 * 512 * 1024 * 2
    # In the decoder the encoder's output travels along for the cross attention of every block.
    assert t5.layer("decoder.block.3").output_bytes(cut) == 2 * 2 * 512 * 1024 * 2
    swin = Model.preset("swin-huge")
    sizes = [layer.output_bytes(Slice(1, swin.tokens)) for layer in swin.layers if layer.kind == "merge"]
    assert sizes == [28 * 28 * 640 * 2, 14 * 14 * 1280 * 2, 7 * 7 * 2560 * 2]


@pytest.mark.parametrize(("tp", "ulysses"), [(16, 1), (8, 2), (32, 1), (1, 16)])
def test_repeated_key_value_heads_are_kept_whole(tp: int, ulysses: int) -> None:
    """Past 8 key/value heads every device holds one whole head of 128, over its part of the sequence."""
    layer = Model.preset("llama3-70b").layer("block.0.attention")
    k = next(kept for op in layer.ops for kept in op.keeps if kept.name == "k")
    heads_here = 128 * 8192  # after Ulysses' exchange: the whole sequence, one head
    assert k.bytes(Slice(1, 8192, tp=tp, ulysses=ulysses), 8192) == 2 * heads_here


def test_selective_does_not_send_tokens_twice() -> None:
    layer = Model.preset("mixtral-8x7b").layer("block.0.moe")
    assert layer.recomputed_ops("selective") == {"norm", "expert_activation"}


def test_an_input_is_no_operator_that_can_be_dropped() -> None:
    head = Model.preset("bert-base").layer("head")
    cut = Slice(1, 128)
    assert "input" not in head.op_names
    assert head.kept_bytes(cut, sorted(head.op_names)) >= head.input_bytes(cut)
