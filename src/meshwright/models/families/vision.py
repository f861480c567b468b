"""Vision transformers: ViT, and Swin with windows and a resolution that halves from stage to stage."""

from __future__ import annotations

from dataclasses import replace

from meshwright.errors import InputError
from meshwright.models.attention import Attention, core_keeps, relative_table
from meshwright.models.embedding_and_head import final_norm
from meshwright.models.families.decoder import chain
from meshwright.models.families.fields import MOST_LAYERS, Fields
from meshwright.models.feed_forward import Mlp
from meshwright.models.layer import Kept, Layer, Op, Weight
from meshwright.models.operators import Place, layer_input, matmul, norm


def vit_layers(f: Fields) -> list[Layer]:
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    blocks, width = f.layers("num_hidden_layers"), f.integer("intermediate_size")
    image, patch = f.integer("image_size"), f.integer("patch_size")
    channels = f.integer("num_channels", default=3)
    f.divides("num_attention_heads", heads, "hidden_size", hidden)
    f.divides("patch_size", patch, "image_size", image)
    f.require_complete()
    tokens = (image // patch) ** 2 + 1
    biased, dropout = f.flag("qkv_bias", True), f.fraction("hidden_dropout_prob")
    attention = Attention(
        hidden, heads, heads, hidden // heads, causal=False, norm="layer", qkv_bias=biased, out_bias=True,
        dropout=dropout, score_dropout=f.fraction("attention_probs_dropout_prob"),
    )  # fmt: skip
    mlp = Mlp(hidden, width, gated=False, norm="layer", bias=True, dropout=dropout)
    embed = _patch_embedding(channels * patch**2, hidden, tokens, patches=tokens - 1, extra=(tokens + 1) * hidden)
    bare = "ViTModel" in (f["architectures"] or [])
    labels = f.integer("pooler_output_size", default=hidden) if bare else _labels(f)
    end = [final_norm(Place("norm"), hidden, "layer"), _classifier(hidden, labels)]
    layers = chain(embed, blocks, lambda _: attention.layer, lambda _: mlp.layer, end)
    return [replace(layer, tokens=tokens) for layer in layers]


def swin_layers(f: Fields) -> list[Layer]:
    f.refuse_if("use_absolute_embeddings")
    width, depths, heads = f.integer("embed_dim"), f.integers("depths", least=1), f.integers("num_heads", least=1)
    image, patch = f.integer("image_size"), f.integer("patch_size")
    window, channels = f.integer("window_size"), f.integer("num_channels", default=3)
    ratio = f.number("mlp_ratio", 4.0, least=0.01, most=1000)
    f.require_complete()
    if sum(depths) > MOST_LAYERS:
        raise InputError(f"sums to {sum(depths)} blocks", file=f.file, field="depths", valid=f"at most {MOST_LAYERS}")
    if len(depths) != len(heads):
        problem = f"depths has {len(depths)} stages, num_heads has {len(heads)}"
        raise InputError(problem, file=f.file, field="num_heads")
    side = -(-image // patch)  # pixels are padded to whole patches
    layers = [_patch_embedding(channels * patch**2, width, side**2, patches=side**2, extra=2 * width, normed=True)]
    for stage, (depth, stage_heads) in enumerate(zip(depths, heads, strict=True)):
        f.divides("num_heads", stage_heads, "embed_dim of the stage", width)
        for i in range(depth):
            block = f"stage.{stage}.block.{i}"
            layers.append(_window_attention(f, block, width, stage_heads, window, side))
            mlp = Mlp(
                width,
                int(width * ratio),
                gated=False,
                norm="layer",
                bias=True,
                dropout=f.fraction("hidden_dropout_prob"),
            )
            layers.append(mlp.layer(Place(f"{block}.mlp", block, opens_block=False, tokens=side**2)))
        if stage < len(depths) - 1:
            layers.append(_patch_merging(f"stage.{stage}.merge", width, side))
            width, side = 2 * width, -(-side // 2)
    layers.append(final_norm(Place("norm", tokens=side**2), width, "layer"))
    layers.append(replace(_classifier(width, _labels(f)), tokens=side**2))
    return layers


def _labels(f: Fields) -> int:
    """Return the number of classes; config.json files name them instead of counting them."""
    named = f["id2label"]
    return f.integer("num_labels", default=len(named) if isinstance(named, dict) and named else 2)


def _patch_embedding(k: int, hidden: int, tokens: int, *, patches: int, extra: int, normed: bool = False) -> Layer:
    """Return a strided convolution: one matrix product per patch. `extra`: positions, class token, norm."""
    conv = matmul(
        "patches", k, hidden, bias=True, cut="none", keeps=(Kept("pixels", per_sample=k * patches, dtype="matmul"),)
    )
    conv = replace(conv, flops_per_token=0.0, flops_per_sample=2.0 * k * hidden * patches)
    kept = (Kept("input", hidden), Kept("statistics", 2, dtype="fp32")) if normed else ()
    added = Op("norm" if normed else "positions", "norm" if normed else "lookup", scope="sequence",
               weights=(Weight(extra),), keeps=kept)  # fmt: skip
    return Place("embed", tokens=tokens).layer("embedding", (conv, added), 0.0, hidden)


def _window_attention(f: Fields, block: str, width: int, heads: int, window: int, side: int) -> Layer:
    """Return attention inside windows: w^2 keys per query, on a grid padded to whole windows."""
    size = min(window, side)
    padded = (-(-side // size) * size / side) ** 2  # tokens of the padded grid per token
    whole = Attention(
        width, heads, heads, width // heads, causal=False, norm="layer", qkv_bias=f.flag("qkv_bias", True),
        out_bias=True, dropout=f.fraction("hidden_dropout_prob"),
    ).layer(Place(f"{block}.attention", block, tokens=side**2))  # fmt: skip
    keeps = tuple(
        replace(kept, per_token=kept.per_token + kept.per_pair * size**2, per_pair=0.0)
        for kept in core_keeps(width, heads, f.fraction("attention_probs_dropout_prob"))
    )
    core = Op("core", "attention", flops_per_token=4.0 * width * size**2,
              weights=relative_table((2 * window - 1) ** 2, heads), keeps=keeps)  # fmt: skip
    ops = [core if op.name == "core" else op for op in whole.ops]
    return replace(
        whole, ops=tuple(_on_padded_grid(op, padded) if op.cut != "none" or op is core else op for op in ops)
    )


def _on_padded_grid(op: Op, factor: float) -> Op:
    keeps = tuple(replace(kept, per_token=kept.per_token * factor) for kept in op.keeps)
    return replace(op, flops_per_token=op.flops_per_token * factor, keeps=keeps)


def _patch_merging(name: str, width: int, side: int) -> Layer:
    """Return the layer that merges four neighbours into one token of twice the width: 4w -> 2w after a norm."""
    merged = (-(-side // 2)) ** 2
    reduce = matmul("reduce", 4 * width, 2 * width, cut="none")
    ops = (layer_input(4 * width), norm("norm", 4 * width, "layer"), reduce)
    return Place(name, tokens=merged).layer("merge", ops, 4 * width, 2 * width)


def _classifier(hidden: int, labels: int) -> Layer:
    """Return one product per image, on the class token or the mean over tokens."""
    kept = (Kept("pooled", per_sample=hidden), Kept("logits", per_sample=labels, dtype="fp32"))
    dense = matmul("classify", hidden, labels, bias=True, cut="none", keeps=kept)
    dense = replace(dense, flops_per_token=0.0, flops_per_sample=dense.flops_per_token)
    return Place("head").layer("head", (dense, Op("loss", "loss", scope="sequence")), hidden, 0.0)
