"""Decoder-only language models: GPT-2 and GPT-3, BLOOM, Llama and its relatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.models.attention import Attention, LatentAttention
from meshwright.models.embedding_and_head import embedding, final_norm, language_head
from meshwright.models.families.fields import Fields
from meshwright.models.feed_forward import Mlp, Moe
from meshwright.models.layer import Layer
from meshwright.models.operators import NormKind, Place

LayerAt = Callable[[Place], Layer]


def chain(
    embed: Layer,
    blocks: int,
    attention: Callable[[int], LayerAt],
    feed_forward: Callable[[int], LayerAt],
    end: list[Layer],
) -> list[Layer]:
    """Return the embedding, then attention and feed-forward of every block, then the end."""
    layers = [embed]
    for i in range(blocks):
        name = f"block.{i}"
        layers.append(attention(i)(Place(f"{name}.attention", name)))
        body = feed_forward(i)(Place(f"{name}.mlp", name, opens_block=False))
        layers.append(_named_by_kind(body))
    return layers + end


def _named_by_kind(layer: Layer) -> Layer:
    if layer.kind != "moe":
        return layer
    return replace(layer, name=layer.name.removesuffix("mlp") + "moe")


def gpt2_layers(f: Fields) -> list[Layer]:
    f.refuse_if("add_cross_attention")
    hidden, heads = f.integer("n_embd", "hidden_size"), f.integer("n_head", "num_attention_heads")
    positions = f.integer("n_positions", "max_position_embeddings", default=1024)
    vocab, blocks = f.integer("vocab_size"), f.layers("n_layer", "num_hidden_layers")
    width = f.integer("n_inner", default=4 * hidden)
    f.divides("n_head", heads, "n_embd", hidden)
    f.require_complete()
    embed = embedding(Place("embed"), vocab, hidden, positions=positions, dropout_rate=_pdrop(f, "embd_pdrop"))
    rates = _pdrop(f, "resid_pdrop"), _pdrop(f, "attn_pdrop")
    return _biased_decoder(f, embed, vocab, hidden, heads, width, blocks, *rates)


def _pdrop(f: Fields, name: str) -> float:
    """Return a rate of GPT-2, whose config class has a default."""
    return f.fraction(name, default=0.1)


def bloom_layers(f: Fields) -> list[Layer]:
    """Return the layers of BLOOM: ALiBi instead of positions, a norm on the embedding."""
    hidden, heads = f.integer("hidden_size", "n_embed"), f.integer("n_head", "num_attention_heads")
    vocab, blocks = f.integer("vocab_size"), f.layers("n_layer", "num_hidden_layers")
    f.divides("n_head", heads, "hidden_size", hidden)
    f.require_complete()
    embed = embedding(Place("embed"), vocab, hidden, norm_kind="layer")
    rates = f.fraction("hidden_dropout"), f.fraction("attention_dropout")
    return _biased_decoder(f, embed, vocab, hidden, heads, 4 * hidden, blocks, *rates)


def _biased_decoder(
    f: Fields, embed: Layer, vocab: int, hidden: int, heads: int, width: int, blocks: int, dropout: float, scores: float
) -> list[Layer]:
    """Return layers with layer norms, GELU and biases; the head is tied unless the config says otherwise."""
    attention = Attention(
        hidden, heads, heads, hidden // heads, norm="layer", qkv_bias=True, out_bias=True, dropout=dropout,
        score_dropout=scores,
    )  # fmt: skip
    mlp = Mlp(hidden, width, gated=False, norm="layer", bias=True, dropout=dropout)
    end = _end(vocab, hidden, "layer", tied=f.flag("tie_word_embeddings", True))
    return chain(embed, blocks, lambda _: attention.layer, lambda _: mlp.layer, end)


def _end(vocab: int, hidden: int, norm: NormKind, *, tied: bool) -> list[Layer]:
    head = language_head(Place("head"), vocab, hidden, tied_to="embed" if tied else "")
    return [final_norm(Place("norm"), hidden, norm), head]


def decoder_layers(f: Fields) -> list[Layer]:
    """Return the layers of Llama and its relatives.

    They are Mistral, Mixtral, Qwen2/2.5/3 (dense and MoE) and DeepSeek-V2/V3.
    """
    hidden, vocab = f.integer("hidden_size"), f.integer("vocab_size")
    blocks = f.layers("num_hidden_layers")
    attention = _latent_attention(f, hidden) if "deepseek" in _type(f) else _grouped_attention(f, hidden)
    feed_forward = _feed_forward(f, hidden)
    f.require_complete()
    end = _end(vocab, hidden, "rms", tied=f.flag("tie_word_embeddings", False))
    return chain(embedding(Place("embed"), vocab, hidden), blocks, attention, feed_forward, end)


# Defaults of transformers' config classes for absent fields (null means as many as heads).
_KV_HEADS = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen2_moe": 16, "qwen3": 32, "qwen3_moe": 4}


def _type(f: Fields) -> str:
    return {"kimi_k2": "deepseek_v3"}.get(str(f["model_type"]), str(f["model_type"]))


def _grouped_attention(f: Fields, hidden: int) -> Callable[[int], LayerAt]:
    family, heads = _type(f), f.integer("num_attention_heads")
    kv_default = heads if f.has("num_key_value_heads") else _KV_HEADS.get(family, heads)
    kv_heads = f.integer("num_key_value_heads", default=kv_default)
    f.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    if family == "qwen3" and not f.has("head_dim"):
        head_dim = 128
    else:
        if f["head_dim"] is None:
            f.divides("num_attention_heads", heads, "hidden_size", hidden)
        head_dim = f.integer("head_dim", default=max(hidden // heads, 1))
    biased = _attention_bias(f)
    windowed = _window_of_layer(f)

    def attention(index: int) -> LayerAt:
        return Attention(
            hidden, heads, kv_heads, head_dim,
            window=windowed(index),
            qkv_bias=biased,
            out_bias=biased and not family.startswith("qwen2"),
            qk_norm=family in {"qwen3", "qwen3_moe"},
            rotary=True,
            score_dropout=f.fraction("attention_dropout"),
        ).layer  # fmt: skip

    return attention


def _attention_bias(f: Fields) -> bool:
    """Return True if projections have biases; each family has its own switch, Mistral and Mixtral none."""
    family = _type(f)
    if family == "qwen2":
        return True
    if family == "qwen2_moe":
        return f.flag("qkv_bias", True)
    return f.flag("attention_bias", False) if family in {"llama", "qwen3", "qwen3_moe"} else False


def _window_of_layer(f: Fields) -> Callable[[int], int]:
    """Return the attention window of each layer.

    Mistral slides in every layer, Qwen only where the config enables it and past `max_window_layers`.
    """
    if _type(f) == "mistral" and not f.has("sliding_window"):
        return lambda _: 4096  # the default of its config class
    if f["sliding_window"] is None or (_type(f).startswith("qwen") and not f.flag("use_sliding_window", False)):
        return lambda _: 0
    window = f.integer("sliding_window")
    kinds = f["layer_types"]
    if isinstance(kinds, list):
        return lambda i: window if i < len(kinds) and kinds[i] == "sliding_attention" else 0
    first = f.integer("max_window_layers", default=0, least=0) if _type(f).startswith("qwen") else 0
    return lambda i: window if i >= first else 0


def _latent_attention(f: Fields, hidden: int) -> Callable[[int], LayerAt]:
    attention = LatentAttention(
        hidden,
        f.integer("num_attention_heads"),
        q_rank=0 if f["q_lora_rank"] is None else f.integer("q_lora_rank"),
        kv_rank=f.integer("kv_lora_rank"),
        nope_dim=f.integer("qk_nope_head_dim"),
        rope_dim=f.integer("qk_rope_head_dim"),
        v_dim=f.integer("v_head_dim"),
        bias=f.flag("attention_bias", False),
        score_dropout=f.fraction("attention_dropout"),
    )
    return lambda _: attention.layer


def _feed_forward(f: Fields, hidden: int) -> Callable[[int], LayerAt]:
    """Return the feed-forward layer of each block, dense or a mixture by the family's own switches."""
    family = _type(f)
    bias = f.flag("mlp_bias", False) if family == "llama" else False
    if family in {"llama", "mistral", "qwen2", "qwen3"}:
        dense = Mlp(hidden, f.integer("intermediate_size"), bias=bias)
        return lambda _: dense.layer
    if family == "mixtral":
        mixture = _moe(f, hidden, f.integer("intermediate_size"), f.integer("num_local_experts", "num_experts"))
        return lambda _: mixture.layer
    if family.startswith("deepseek"):
        width = f.integer("moe_intermediate_size")
        shared = f.integer("n_shared_experts", default=0, least=0) * width
        mixture = _moe(f, hidden, width, f.integer("n_routed_experts", "num_local_experts"), shared=shared)
        dense = Mlp(hidden, f.integer("intermediate_size"))
        first = f.integer("first_k_dense_replace", default=3 if family == "deepseek_v3" else 0, least=0)
        every = f.integer("moe_layer_freq", default=1)
        return lambda i: mixture.layer if i >= first and i % every == 0 else dense.layer
    shared = f.integer("shared_expert_intermediate_size") if family == "qwen2_moe" else 0
    experts = f.integer("num_experts", "num_local_experts")
    mixture = _moe(f, hidden, f.integer("moe_intermediate_size"), experts, shared, family == "qwen2_moe")
    every = f.integer("decoder_sparse_step", default=1)
    always_dense = set(f.integers("mlp_only_layers")) if f["mlp_only_layers"] else set()
    if not always_dense and every == 1:
        return lambda _: mixture.layer
    dense = Mlp(hidden, f.integer("intermediate_size"))
    return lambda i: mixture.layer if i not in always_dense and (i + 1) % every == 0 else dense.layer


def _moe(f: Fields, hidden: int, width: int, experts: int, shared: int = 0, shared_gate: bool = False) -> Moe:
    """Return a mixture; `moe_capacity_factor` and `moe_bottleneck_size` are meshwright's own config fields."""
    return Moe(
        hidden,
        width,
        experts,
        f.integer("num_experts_per_tok", default=2 if _type(f) == "mixtral" else None, most=experts),
        shared_width=shared,
        shared_gate=shared_gate,
        capacity=f.number("moe_capacity_factor", 0.0),
        bottleneck=f.integer("moe_bottleneck_size", default=0),
    )
