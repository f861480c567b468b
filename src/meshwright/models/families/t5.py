"""T5: an encoder and a decoder in one chain; the decoder's layers pass on the encoder's output."""

from __future__ import annotations

from meshwright.models.attention import Attention
from meshwright.models.embedding_and_head import embedding, final_norm, language_head
from meshwright.models.families.fields import Fields
from meshwright.models.feed_forward import Mlp
from meshwright.models.layer import Layer
from meshwright.models.operators import Place


def t5_layers(f: Fields) -> list[Layer]:
    hidden, heads, head_dim = f.integer("d_model"), f.integer("num_heads"), f.integer("d_kv")
    width, vocab = f.integer("d_ff"), f.integer("vocab_size")
    encoders = f.layers("num_layers")
    decoders = f.layers("num_decoder_layers", default=encoders)
    buckets = f.integer("relative_attention_num_buckets", default=32)
    f.require_complete()
    dropout = f.fraction("dropout_rate")
    gated = str(f["feed_forward_proj"] or "relu").startswith("gated")
    mlp = Mlp(hidden, width, gated=gated, dropout=dropout, inner_dropout=dropout)

    def attention(causal: bool, table: bool) -> Attention:
        return Attention(
            hidden, heads, heads, head_dim, causal=causal, dropout=dropout, score_dropout=dropout,
            relative_bias=buckets if table else 0,
        )  # fmt: skip

    layers = [embedding(Place("embed"), vocab, hidden, dropout_rate=dropout)]
    for i in range(encoders):
        block = f"encoder.block.{i}"
        layers.append(attention(False, i == 0).layer(Place(f"{block}.attention", block)))
        layers.append(mlp.layer(Place(f"{block}.mlp", block, opens_block=False)))
    layers.append(final_norm(Place("encoder.norm"), hidden, "rms", dropout_rate=dropout))
    again = Place("decoder.embed", carried=hidden)
    layers.append(embedding(again, vocab, hidden, dropout_rate=dropout, tied_to="embed"))
    for i in range(decoders):
        block = f"decoder.block.{i}"
        # Layers pass the encoder's output on until the last cross attention has read it.
        after = hidden if i < decoders - 1 else 0
        layers.append(attention(True, i == 0).layer(Place(f"{block}.attention", block, carried=hidden)))
        crossing = Place(f"{block}.cross_attention", block, opens_block=False, carried=after)
        layers.append(attention(False, False).layer(crossing, cross=True))
        layers.append(mlp.layer(Place(f"{block}.mlp", block, opens_block=False, carried=after)))
    layers.append(final_norm(Place("decoder.norm"), hidden, "rms", dropout_rate=dropout))
    tied = f.flag("tie_word_embeddings", True)
    layers.append(language_head(Place("head"), vocab, hidden, tied_to="embed" if tied else ""))
    return layers
