"""Read the model of shape arguments, as a Hugging Face config of the matching family."""

from __future__ import annotations

import ast
from typing import Any

from meshwright.errors import InputError, shorten
from meshwright.frameworks.megatron.arguments import Given
from meshwright.models import Model
from meshwright.models.presets import find_preset, presets

# Vocabulary sizes of tokenizers that bring their own.
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
_NEEDED = ("num-layers", "hidden-size", "num-attention-heads")
_TELLING = (  # fields that distinguish most presets before a model is built
    "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "vocab_size", "max_position_embeddings", "n_positions",
)  # fmt: skip


def model_of(given: Given, named: Model | None, assumed: list[str]) -> Model:
    """Return the model that a user names, checked against the script, or the one that the script describes."""
    if named is not None:
        _agree(given, named)
        return named
    for name in _NEEDED:
        if name not in given:
            raise given.refused(name, "is not there, and no --model is named", "it in the script, or --model beside it")
    config = _config(given, assumed)
    try:
        made = Model.from_config(config, f"{config['model_type']}-{len_text(config)}")
    except InputError as error:
        raise InputError(f"the shape makes no model: {error}", file=given.file, valid="--model beside it") from None
    if known := _preset_like(made, config):
        assumed.append(f"model: its shape is that of {known.name}")
        return known
    return made


def len_text(config: dict[str, Any]) -> str:
    return f"{config.get('num_hidden_layers') or config.get('n_layer')}x{config.get('hidden_size') or config.get('n_embd')}"


def _agree(given: Given, model: Model) -> None:
    """Refuse a model whose shape contradicts the script's."""
    hidden = next((int(layer.width_out) for layer in model.layers if layer.kind == "attention"), 0)
    heads = next((layer.heads for layer in model.layers if layer.heads), 0)
    for name, value in (("num-layers", len(model.blocks)), ("hidden-size", hidden), ("num-attention-heads", heads)):
        if value and given.integer(name, value) != value:
            problem = f"is {given.integer(name, value)}, but --model {model.name} has {value}"
            raise given.refused(name, problem, "one of the two")


def _preset_like(made: Model, config: dict[str, Any]) -> Model | None:
    for preset in presets().values():
        if all(preset.config.get(name) == config.get(name) for name in _TELLING):
            model = Model.preset(preset.name)
            if model.layers == made.layers:
                return model
    return None


def _config(given: Given, assumed: list[str]) -> dict[str, Any]:
    rotary = given.text("position-embedding-type") in {"rope", "yarn"} or given.on("use-rotary-position-embeddings")
    rms = given.text("normalization", "LayerNorm") == "RMSNorm"
    if given.integer("mtp-num-layers", 0):
        assumed.append("model: layers that predict further tokens (--mtp-num-layers) are not counted")
    if not rotary and not rms and not given.on("swiglu") and "num-experts" not in given:
        return _gpt2(given, assumed)
    if not (rotary and rms and given.on("swiglu")):
        if "num-experts" not in given and not given.on("swiglu"):
            assumed.append("model: counted as a GPT-2 (LayerNorm, GELU, learned positions), its nearest relative")
            return _gpt2(given, assumed)
        assumed.append("model: counted with RMSNorm, SwiGLU and rotary positions, its nearest relative")
    return _decoder(given, assumed)


def _gpt2(given: Given, assumed: list[str]) -> dict[str, Any]:
    if given.on("disable-bias-linear"):
        assumed.append("model: counted with the biases of a GPT-2")
    hidden = given.integer("hidden-size", 1)
    dropout = given.number("hidden-dropout", 0.1)
    return {
        "model_type": "gpt2",
        "vocab_size": _vocabulary(given, assumed),
        "n_embd": hidden,
        "n_layer": given.integer("num-layers", 1),
        "n_head": given.integer("num-attention-heads", 1),
        "n_inner": given.integer("ffn-hidden-size", 4 * hidden),
        "n_positions": given.integer("max-position-embeddings", given.integer("seq-length", 1024)),
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": given.number("attention-dropout", 0.1),
        "tie_word_embeddings": not given.on("untie-embeddings-and-output-weights"),
    }


def _decoder(given: Given, assumed: list[str]) -> dict[str, Any]:
    hidden, heads = given.integer("hidden-size", 1), given.integer("num-attention-heads", 1)
    grouped = given.on("group-query-attention")
    config: dict[str, Any] = {
        "vocab_size": _vocabulary(given, assumed),
        "hidden_size": hidden,
        "num_hidden_layers": given.integer("num-layers", 1),
        "num_attention_heads": heads,
        "num_key_value_heads": given.integer("num-query-groups", 1) if grouped else heads,
        "intermediate_size": given.integer("ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64),  # Megatron's default
        "max_position_embeddings": given.integer("max-position-embeddings", given.integer("seq-length", 4096)),
        "tie_word_embeddings": not given.on("untie-embeddings-and-output-weights"),
    }
    config |= _numbers(given)
    if given.on("multi-latent-attention"):
        return config | _latent(given) | _mixture(given, assumed, latent=True)
    if "kv-channels" in given:
        config["head_dim"] = given.integer("kv-channels", 1)
    if given.number("attention-dropout", 0.1):
        config["attention_dropout"] = given.number("attention-dropout", 0.1)
    if given.number("hidden-dropout", 0.1):
        assumed.append(f"model: --hidden-dropout {given.number('hidden-dropout', 0.1):g} is not counted")
    config |= _mixture(given, assumed, latent=False) if "num-experts" in given else {"model_type": _dense(given)}
    if config["model_type"] == "llama" and not given.on("disable-bias-linear"):
        config |= {"attention_bias": True, "mlp_bias": True}
    if config["model_type"] in {"qwen3", "qwen3_moe"} and (
        given.on("add-qkv-bias") or not given.on("disable-bias-linear")
    ):
        assumed.append("model: biases beside norms on queries and keys are not counted")
    return config | _windows(given, config)


def _numbers(given: Given) -> dict[str, Any]:
    """Return fields without effect on cost that belong to the config."""
    config: dict[str, Any] = {"rms_norm_eps": given.number("norm-epsilon", 1e-5)}
    rope: dict[str, Any] = {}
    if given.on("use-rope-scaling"):
        rope = {"rope_type": "llama3", "factor": given.number("rope-scaling-factor", 8.0), "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    elif given.text("rope-type", "yarn" if given.on("multi-latent-attention") else "rope") == "yarn":
        rope = {"rope_type": "yarn", "factor": given.number("rotary-scaling-factor", 1.0),
                "mscale": given.number("mscale", 1.0), "mscale_all_dim": given.number("mscale-all-dim", 0.0)}  # fmt: skip
    elif "rotary-seq-len-interpolation-factor" in given:
        rope = {"rope_type": "linear", "factor": given.number("rotary-seq-len-interpolation-factor", 1.0)}
    if "rotary-base" in given:
        config["rope_theta"] = given.number("rotary-base", 1e4)
    if "init-method-std" in given:
        config["initializer_range"] = given.number("init-method-std", 0.02)
    return config | ({"rope_scaling": rope} if rope else {})


def _dense(given: Given) -> str:
    if given.on("qk-layernorm"):
        return "qwen3"
    if given.on("add-qkv-bias") and given.on("disable-bias-linear"):
        return "qwen2"
    return "mistral" if "window-size" in given else "llama"


def _latent(given: Given) -> dict[str, Any]:
    return {
        "q_lora_rank": given.integer("q-lora-rank", 0) or None,
        "kv_lora_rank": given.integer("kv-lora-rank", 32),  # defaults of Megatron's arguments
        "qk_nope_head_dim": given.integer("qk-head-dim", 128),
        "qk_rope_head_dim": given.integer("qk-pos-emb-head-dim", 64),
        "v_head_dim": given.integer("v-head-dim", 128),
    }


def _mixture(given: Given, assumed: list[str], *, latent: bool) -> dict[str, Any]:
    if "num-experts" not in given:
        raise given.refused(
            "multi-latent-attention", "without experts has no relative here", "--num-experts, or --model"
        )
    layers = given.integer("num-layers", 1)
    dense = [i for i, expert in enumerate(_pattern(given, "moe-layer-freq", layers)) if not expert]
    width = given.integer("moe-ffn-hidden-size", given.integer("ffn-hidden-size", 1))
    shared = given.integer("moe-shared-expert-intermediate-size", 0)
    config: dict[str, Any] = {
        "num_experts_per_tok": given.integer("moe-router-topk", 2),
        "moe_capacity_factor": given.number("moe-expert-capacity-factor", 0.0),
        "norm_topk_prob": not given.on("moe-router-pre-softmax"),
    }
    experts = given.integer("num-experts", 1)
    if latent:
        return (
            config
            | {"n_routed_experts": experts, "moe_intermediate_size": width}
            | _deepseek(given, dense, width, shared)
        )
    if shared:
        assumed.append("model: the shared expert is counted with a gate of its own (Qwen2-MoE)")
        config |= {
            "model_type": "qwen2_moe",
            "shared_expert_intermediate_size": shared,
            "qkv_bias": given.on("add-qkv-bias"),
        }
    elif not dense and not given.on("qk-layernorm") and not given.on("add-qkv-bias"):
        return config | {"model_type": "mixtral", "num_local_experts": experts, "intermediate_size": width}
    else:
        config["model_type"] = "qwen3_moe"
        if not given.on("qk-layernorm"):
            assumed.append("model: counted with norms on queries and keys (Qwen3-MoE), its nearest relative")
    return config | {"num_experts": experts, "moe_intermediate_size": width, "mlp_only_layers": dense}


def _deepseek(given: Given, dense: list[int], width: int, shared: int) -> dict[str, Any]:
    if dense != list(range(len(dense))):
        raise given.refused("moe-layer-freq", "mixes dense layers and experts", "dense layers first, then experts")
    if shared % width:
        problem = f"is {shared}, not a multiple of --moe-ffn-hidden-size {width}"
        raise given.refused("moe-shared-expert-intermediate-size", problem, f"a multiple of {width}")
    sigmoid = given.text("moe-router-score-function", "softmax") == "sigmoid"
    groups = {
        "n_group": given.integer("moe-router-num-groups", 1),
        "topk_group": given.integer("moe-router-group-topk", 1),
    }
    return {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "n_shared_experts": shared // width,
        "first_k_dense_replace": len(dense),
        "routed_scaling_factor": given.number("moe-router-topk-scaling-factor", 1.0),
        **groups,
    }


def _pattern(given: Given, name: str, layers: int) -> list[bool]:
    """Return True for chosen layers: every N-th from the first, or a list such as ([0]*3+[1]*58)."""
    text = given.text(name, "1")
    if text.isdecimal() and int(text) > 0:
        return [i % int(text) == 0 for i in range(layers)]
    try:
        found = _evaluated(ast.parse(text[:10_000], mode="eval").body, layers)
    except (SyntaxError, ValueError, RecursionError):
        raise given.refused(name, f"is {shorten(text, 40)}", "a number, or a list such as ([0]*3+[1]*58)") from None
    if not isinstance(found, list) or len(found) != layers:
        length = len(found) if isinstance(found, list) else "no"
        raise given.refused(name, f"has {length} entries, but --num-layers is {layers}", f"{layers} entries")
    return [bool(flag) for flag in found]


def _evaluated(node: ast.expr, longest: int) -> int | list[int]:
    """Evaluate sums and multiples of lists of numbers, nothing else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.List):
        return [v for v in (_evaluated(item, longest) for item in node.elts) if isinstance(v, int)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluated(node.left, longest), _evaluated(node.right, longest)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            return left * min(right, longest + 1)
    raise ValueError


def _windows(given: Given, config: dict[str, Any]) -> dict[str, Any]:
    text = given.text("window-size")
    if not text:
        return {"sliding_window": None} if config["model_type"] in {"mistral", "mixtral"} else {}
    left = text.strip("()").split(",")[0].strip()
    if not left.isdecimal():
        raise given.refused("window-size", f"is {shorten(text, 40)}", "tokens before and after, such as 4095,0")
    family = str(config["model_type"])
    layers = int(config["num_hidden_layers"])
    slides = _sliding(given, layers)
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    switch = {"use_sliding_window": True} if family.startswith("qwen") else {}
    return {"sliding_window": int(left) + 1, "layer_types": kinds, **switch}


def _sliding(given: Given, layers: int) -> list[bool]:
    """Return True for sliding layers: all, all but every N-th, or those of a list."""
    name = "window-attn-skip-freq"
    text = given.text(name)
    if text.isdecimal() and int(text) > 0:
        return [(i + 1) % int(text) != 0 for i in range(layers)]
    return _pattern(given, name, layers) if text else [True] * layers


def _vocabulary(given: Given, assumed: list[str]) -> int:
    """Return the tokens before padding; NullTokenizer adds one, other tokenizers bring their own number."""
    kind = given.text("tokenizer-type")
    if "vocab-size" in given:
        return given.integer("vocab-size", 1) + (1 if kind == "NullTokenizer" else 0)
    if "padded-vocab-size" in given:
        return given.integer("padded-vocab-size", 1)
    if not kind and "tokenizer-model" not in given:
        kind = "GPT2BPETokenizer"
        assumed.append(f"vocabulary: {_VOCABULARIES[kind]} tokens of {kind}, which pretrain_gpt.py takes by default")
    if kind in _VOCABULARIES:
        return _VOCABULARIES[kind]
    name = " ".join(given.words("tokenizer-model")).rstrip("/").rsplit("/", 1)[-1]
    try:
        known = find_preset(name)
    except InputError:
        raise given.refused(
            "vocab-size", "is not there, and the tokenizer is not known here", "it in the script, or --model beside it"
        ) from None
    assumed.append(f"vocabulary: that of {known.name}, by the name of the tokenizer")
    return int(known.config["vocab_size"])
