"""Model for torchtitan: one of its flavours, or any Llama built from its parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.frameworks.contract import Inexpressible
from meshwright.frameworks.torchtitan.known import FLAVORS
from meshwright.models import Model
from meshwright.models.presets import find_preset

# Names below are torchtitan 0.3.0's (models/llama3/__init__.py); it offers only these helpers with an underscore.
_LLAMA = '''\
def model_spec() -> ModelSpec:
    """{name}: a Llama of sizes that torchtitan has no flavour of."""
    dim, vocab_size = {dim}, {vocab}
    rope = llama3.ComplexRoPE.Config(dim={head_dim}, max_seq_len={max_seq}, theta={theta}, scaling="none")
    model = llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=vocab_size,
        enable_weight_tying={tied},
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=vocab_size, embedding_dim=dim, param_init=llama3.{embedding}
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(
            in_features=dim, out_features=vocab_size, param_init=llama3._output_linear_init(dim)
        ),
        layers=llama3._build_llama3_layers(
            n_layers={layers},
            dim=dim,
            n_heads={heads},
            n_kv_heads={kv_heads},
            hidden_dim={hidden},
            rope=rope,
            attn_backend="flex",
        ),
    )
    return dataclasses.replace(llama3.model_registry("8B"), flavor="{name}", model=model)
'''


def flavor_of(model: Model) -> tuple[str, str] | None:
    """Return the module and flavour of a preset, if torchtitan has it."""
    reference = model.reference
    return FLAVORS.get(find_preset(reference).name) if isinstance(reference, str) and reference else None


def llama_text(model: Model, seq_len: int) -> str:
    """Return the function that builds a Llama."""
    config = _config(model)
    if config.get("model_type") != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        kind = config.get("model_type", model.family)
        raise Inexpressible(f"torchtitan 0.3.0 has no model like {model.name} ({kind}): Llama 3, Qwen 3, DeepSeek V3")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if head_dim * heads != config["hidden_size"]:
        raise Inexpressible(f"torchtitan's Llama has heads of hidden size / heads; {model.name} has {head_dim}")
    tied = bool(config.get("tie_word_embeddings"))
    return _LLAMA.format(
        name=re.sub(r"[^\w.+-]", "_", model.name),
        dim=config["hidden_size"],
        vocab=config["vocab_size"],
        head_dim=head_dim,
        max_seq=max(config.get("max_position_embeddings", 0), seq_len),
        theta=float(config.get("rope_theta", 10000.0)),
        tied=tied,
        embedding="_EMBEDDING_SKIP_INIT" if tied else "_EMBEDDING_INIT",
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads", heads),
        hidden=config["intermediate_size"],
    )


def _config(model: Model) -> Mapping[str, Any]:
    reference = model.reference
    if isinstance(reference, str):
        return find_preset(reference).config if reference else {}
    return reference
