"""BERT: a bidirectional encoder with post-norm blocks and a masked-language head."""

from __future__ import annotations

from meshwright.model.blocks import Attention, Mlp, Place, embedding, language_head, matmul, norm
from meshwright.model.families.decoder import chain
from meshwright.model.families.fields import Fields
from meshwright.model.layer import Kept, Layer, Op


def bert_layers(f: Fields) -> list[Layer]:
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
        Place("embed"), vocab, hidden, positions=positions, types=types, norm_kind="layer", dropout=dropout
    )
    next_sentence = "BertForMaskedLM" not in (f["architectures"] or [])
    tied = f.flag("tie_word_embeddings", True)
    head = _masked_language_head(vocab, hidden, "embed" if tied else "")
    end = [_pooler(hidden), head] if next_sentence else [head]
    return chain(embed, blocks, lambda _: attention.layer, lambda _: mlp.layer, end)


def _pooler(hidden: int) -> Layer:
    """tanh over the first token and the next-sentence classifier: parameters, next to no work."""
    ops = (
        Op("pool", "elementwise", scope="sequence", flops_per_sample=2.0 * hidden * hidden,
           weights=matmul("pool", hidden, hidden, bias=True, cut="none").weights,
           keeps=(Kept("pooled", per_sample=2 * hidden),)),
        Op("next_sentence", "elementwise", scope="sequence", flops_per_sample=4.0 * hidden,
           weights=matmul("next_sentence", hidden, 2, bias=True, cut="none").weights),
    )  # fmt: skip
    return Layer("pooler", "pooler", ops, hidden, width_in=hidden)


def _masked_language_head(vocab: int, hidden: int, tied_to: str) -> Layer:
    """Dense, GELU, norm, then the (tied) vocabulary projection, whose bias is its own."""
    transform = matmul(
        "transform", hidden, hidden, bias=True, cut="none",
        keeps=(Kept("input", hidden, dtype="matmul"), Kept("transformed", 2 * hidden)),
    )  # fmt: skip
    head = language_head(Place("head"), vocab, hidden, tied_to=tied_to)
    bias = Op("bias", "elementwise", weights=matmul("bias", 0, vocab, bias=True, units=vocab).weights)
    ops = (transform, norm("norm", hidden, "layer"), *head.ops, bias)
    return Layer("head", "head", ops, 0.0, width_in=hidden, tied_to=tied_to)
