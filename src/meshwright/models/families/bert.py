"""BERT: a bidirectional encoder with post-norm blocks and a masked-language head."""

from __future__ import annotations

from dataclasses import replace

from meshwright.models.attention import Attention
from meshwright.models.embedding_and_head import embedding, language_head
from meshwright.models.families.decoder import chain
from meshwright.models.families.fields import Fields
from meshwright.models.feed_forward import Mlp
from meshwright.models.layer import Kept, Layer, Op, Weight
from meshwright.models.operators import Place, layer_input, matmul, norm


def bert_layers(f: Fields) -> list[Layer]:
    f.refuse_if("add_cross_attention")
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    vocab, blocks = f.integer("vocab_size"), f.layers("num_hidden_layers")
    positions, types = f.integer("max_position_embeddings", default=512), f.integer("type_vocab_size", default=2)
    width = f.integer("intermediate_size")
    f.divides("num_attention_heads", heads, "hidden_size", hidden)
    f.require_complete()
    dropout = f.fraction("hidden_dropout_prob")
    attention = Attention(
        hidden, heads, heads, hidden // heads, causal=False, norm="layer", qkv_bias=True, out_bias=True,
        dropout=dropout, score_dropout=f.fraction("attention_probs_dropout_prob"),
    )  # fmt: skip
    mlp = Mlp(hidden, width, gated=False, norm="layer", bias=True, dropout=dropout)
    embed = embedding(
        Place("embed"), vocab, hidden, positions=positions, types=types, norm_kind="layer", dropout_rate=dropout
    )
    next_sentence = "BertForMaskedLM" not in (f["architectures"] or [])
    tied = f.flag("tie_word_embeddings", True)
    head = _masked_language_head(vocab, hidden, "embed" if tied else "")
    end = [_pooler(hidden), head] if next_sentence else [head]
    return chain(embed, blocks, lambda _: attention.layer, lambda _: mlp.layer, end)


def _pooler(hidden: int) -> Layer:
    """Return tanh over the first token and the next-sentence classifier: parameters, next to no work."""

    def per_sample(name: str, n: int, *keeps: Kept) -> Op:
        dense = matmul(name, hidden, n, bias=True, cut="none", keeps=keeps)
        return replace(dense, flops_per_token=0.0, flops_per_sample=dense.flops_per_token)

    ops = (per_sample("pool", hidden, Kept("pooled", per_sample=2 * hidden)), per_sample("next_sentence", 2))
    return Place("pooler").layer("pooler", ops, hidden)


def _masked_language_head(vocab: int, hidden: int, tied_to: str) -> Layer:
    """Return dense, GELU, norm, then the (tied) vocabulary projection with its own bias."""
    kept = (Kept("transformed", 2 * hidden),)
    head = language_head(Place("head"), vocab, hidden, tied_to=tied_to)
    biases = vocab if tied_to else 2 * vocab  # an untied decoder has a bias beside the head's own
    bias = Op("bias", "elementwise", weights=(Weight(biases, "tensor", vocab),))
    transform = matmul("transform", hidden, hidden, bias=True, cut="none", keeps=kept)
    return replace(head, ops=(layer_input(hidden), transform, norm("norm", hidden, "layer"), *head.ops, bias))
