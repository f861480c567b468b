"""Write a model as arguments of `pretrain_gpt.py`: shapes from its layers, constants from its config."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from meshwright.frameworks.contract import Inexpressible
from meshwright.frameworks.megatron.arguments import Arguments
from meshwright.models import Model
from meshwright.models.attention import Attention, LatentAttention
from meshwright.models.feed_forward import Mlp, Moe
from meshwright.models.presets import find_preset

DECODERS = (
    "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3",
    "kimi_k2",
)  # fmt: skip
_EPSILON = {"gpt2": 1e-5, "mixtral": 1e-5}  # defaults of transformers' config classes; 1e-6 elsewhere
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fixed in Megatron


def config_of(model: Model) -> Mapping[str, Any]:
    """Return the Hugging Face config of a model; it must be a decoder that `pretrain_gpt.py` can build."""
    config = find_preset(model.reference).config if isinstance(model.reference, str) else model.reference
    family = str(config.get("model_type", ""))
    if family not in DECODERS:
        kind = f"a {family} model" if family else "no Hugging Face model"
        raise Inexpressible(f"{model.name} is {kind}; Megatron's pretrain_gpt.py trains {', '.join(DECODERS)}")
    return config


def shape_arguments(model: Model, seq_len: int, missing: list[str], to_fill: list[str]) -> Arguments:
    """Return all arguments that `pretrain_gpt.py` needs to build the model."""
    config = config_of(model)
    attention = [layer.shape for layer in model.layers if isinstance(layer.shape, Attention | LatentAttention)]
    feeds = [layer.shape for layer in model.layers if isinstance(layer.shape, Mlp | Moe)]
    first = attention[0]
    learned = config["model_type"] == "gpt2"
    longest = model.max_seq_len if learned else max(model.max_seq_len, seq_len)
    said: Arguments = {
        "num-layers": (str(len(model.blocks)),),
        "hidden-size": (str(first.hidden),),
        "num-attention-heads": (str(first.heads),),
        "max-position-embeddings": (str(longest),),
    }
    said |= _width(feeds, config) | _attention(first, missing)
    said |= _positions(config, learned, missing, to_fill) | _window(attention)
    said |= _norm_and_bias(first, feeds, config, missing)
    if not any(layer.tied_to for layer in model.layers):
        said["untie-embeddings-and-output-weights"] = ()
    said |= _experts(feeds, config, missing) if any(isinstance(feed, Moe) for feed in feeds) else {}
    return said | _dropout(first, config, missing)


def _width(feeds: list[Mlp | Moe], config: Mapping[str, Any]) -> Arguments:
    dense = [feed for feed in feeds if isinstance(feed, Mlp)]
    width = dense[0].width if dense else int(config.get("intermediate_size") or feeds[0].width)
    gated = not dense or dense[0].gated
    return {"ffn-hidden-size": (str(width),)} | ({"swiglu": ()} if gated else {})


def _attention(shape: Attention | LatentAttention, missing: list[str]) -> Arguments:
    if isinstance(shape, LatentAttention):
        if shape.bias:
            missing.append("attention_bias: latent attention of Megatron has no bias")
        low = {"q-lora-rank": (str(shape.q_rank),)} if shape.q_rank else {}
        return {"multi-latent-attention": (), **low} | {
            "kv-lora-rank": (str(shape.kv_rank),),
            "qk-head-dim": (str(shape.nope_dim),),
            "qk-pos-emb-head-dim": (str(shape.rope_dim),),
            "v-head-dim": (str(shape.v_dim),),
            "qk-layernorm": (),  # the norms on the latents
        }
    said: Arguments = {}
    if shape.kv_heads != shape.heads:
        said |= {"group-query-attention": (), "num-query-groups": (str(shape.kv_heads),)}
    if shape.head_dim * shape.heads != shape.hidden:
        said["kv-channels"] = (str(shape.head_dim),)
    return said | ({"qk-layernorm": ()} if shape.qk_norm else {})


def _positions(config: Mapping[str, Any], learned: bool, missing: list[str], to_fill: list[str]) -> Arguments:
    if learned:
        return {"position-embedding-type": ("learned_absolute",)}
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    said: Arguments = {"position-embedding-type": ("rope",)}
    base = rope.get("rope_theta", config.get("rope_theta"))
    if base is None:
        to_fill.append(
            "--rotary-base, --norm-epsilon: a preset holds the shape alone; take them from the model's config.json, "
            "or plan with that file instead of the preset"
        )
    else:
        said["rotary-base"] = (f"{float(base):.0f}",)  # Megatron takes a whole number
    kind, factor = str(rope.get("rope_type") or rope.get("type") or "default"), float(rope.get("factor") or 1.0)
    latent = str(config["model_type"]).startswith(("deepseek", "kimi"))
    if kind == "llama3":
        if any(float(rope.get(name, value)) != value for name, value in _LLAMA3.items()):
            missing.append("rope_scaling: Megatron fixes Llama 3.1's frequencies (factors 1 and 4 of 8192 tokens)")
        return said | {"use-rope-scaling": (), "rope-scaling-factor": (f"{factor:g}",)}
    if kind == "yarn" and latent:
        mscale = {name: (f"{float(rope[name.replace('-', '_')]):g}",)
                  for name in ("mscale", "mscale-all-dim") if name.replace("-", "_") in rope}  # fmt: skip
        return said | {"rope-type": ("yarn",), "rotary-scaling-factor": (f"{factor:g}",), **mscale}
    if kind == "linear" and factor.is_integer():
        return said | {"rotary-seq-len-interpolation-factor": (f"{factor:.0f}",)}
    if kind != "default":
        missing.append(f"rope_scaling: {kind} is not there; positions are not scaled")
    return said | ({"rope-type": ("rope",)} if latent else {})


def _window(attention: list[Attention | LatentAttention]) -> Arguments:
    """Return keys to the left of a query; a window of w tokens holds the query itself."""
    windows = [shape.window if isinstance(shape, Attention) else 0 for shape in attention]
    if not any(windows):
        return {}
    said: Arguments = {"window-size": (f"{max(windows) - 1},0",)}
    return said | ({} if all(windows) else {"window-attn-skip-freq": (pattern_text([bool(w) for w in windows]),)})


def pattern_text(flags: list[bool]) -> str:
    """Return a list of ones and zeros as Megatron reads it.

    >>> pattern_text([False, False, True, True, True])
    '([0]*2+[1]*3)'
    """
    runs = [(int(flag), len(list(same))) for flag, same in groupby(flags)]
    return "(" + "+".join(f"[{flag}]*{count}" for flag, count in runs) + ")"


def _norm_and_bias(
    first: Attention | LatentAttention, feeds: list[Mlp | Moe], config: Mapping[str, Any], missing: list[str]
) -> Arguments:
    family = str(config["model_type"])
    epsilon = config.get("rms_norm_eps", config.get("layer_norm_epsilon", _EPSILON.get(family, 1e-6)))
    layer = isinstance(first, Attention) and first.norm == "layer"
    said: Arguments = {
        "normalization": ("LayerNorm" if layer else "RMSNorm",),
        "norm-epsilon": (f"{float(epsilon):g}",),
    }
    if "initializer_range" in config:
        said["init-method-std"] = (f"{float(config['initializer_range']):g}",)
    qkv, out = (first.qkv_bias, first.out_bias) if isinstance(first, Attention) else (False, False)
    dense = any(isinstance(feed, Mlp) and feed.bias for feed in feeds)
    if qkv and out and dense:
        return said
    if out or dense:
        missing.append("bias: Megatron has it in all linear layers, in queries, keys and values, or nowhere")
    return said | {"disable-bias-linear": ()} | ({"add-qkv-bias": ()} if qkv else {})


def _experts(feeds: list[Mlp | Moe], config: Mapping[str, Any], missing: list[str]) -> Arguments:
    shape = next(feed for feed in feeds if isinstance(feed, Moe))
    if shape.bottleneck:
        raise Inexpressible("moe_bottleneck_size: Megatron has no projection before the experts' all-to-all")
    said: Arguments = {
        "num-experts": (str(shape.experts),),
        "moe-router-topk": (str(shape.top_k),),
        "moe-ffn-hidden-size": (str(shape.width),),
        "moe-token-dispatcher-type": ("alltoall",),
        "moe-grouped-gemm": (),
        "moe-permute-fusion": (),
    }
    if not all(isinstance(feed, Moe) for feed in feeds):
        said["moe-layer-freq"] = (pattern_text([isinstance(feed, Moe) for feed in feeds]),)
    if shape.shared_width:
        said["moe-shared-expert-intermediate-size"] = (str(shape.shared_width),)
    if shape.shared_gate:
        missing.append("shared expert: it has no gate of its own")
    if shape.capacity:
        said |= {"moe-expert-capacity-factor": (f"{shape.capacity:g}",), "moe-pad-expert-input-to-capacity": ()}
    return said | _router(config)


def _router(config: Mapping[str, Any]) -> Arguments:
    """Return arguments of the router (transformers' modeling files; Megatron's transformer/moe/router.py)."""
    said: Arguments = {}
    sigmoid = config["model_type"] in {"deepseek_v3", "kimi_k2"}
    if sigmoid:
        said |= {"moe-router-score-function": ("sigmoid",), "moe-router-enable-expert-bias": ()}
    elif not config.get("norm_topk_prob", config["model_type"] == "mixtral"):
        said["moe-router-pre-softmax"] = ()
    if int(config.get("n_group") or 1) > 1:
        said["moe-router-num-groups"] = (str(config["n_group"]),)
        said["moe-router-group-topk"] = (str(config.get("topk_group") or 1),)
    scale = float(config.get("routed_scaling_factor") or 1.0)
    return said | ({"moe-router-topk-scaling-factor": (f"{scale:g}",)} if scale != 1 else {})


def _dropout(first: Attention | LatentAttention, config: Mapping[str, Any], missing: list[str]) -> Arguments:
    """Return dropout arguments; Megatron's default is 0.1, so zero is also written."""
    scores, hidden = first.score_dropout, first.dropout if isinstance(first, Attention) else 0.0
    absent = 0.1 if config["model_type"] == "gpt2" else 0.0
    if float(config.get("embd_pdrop", absent) or 0.0) != hidden:
        missing.append(f"embd_pdrop: Megatron drops after the embedding what it drops elsewhere, {hidden:g}")
    return {"attention-dropout": (f"{scores:g}",), "hidden-dropout": (f"{hidden:g}",)}
