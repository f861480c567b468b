"""Tiny configs of every family that can be trained."""

from __future__ import annotations

from typing import Any

_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 16,
}  # fmt: skip
# Weights as large as trained ones: with small ones all experts score alike, and rounding decides where a token goes.
_APART = {"initializer_range": 0.1}
_EXPERTS = {**_APART, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DEEPSEEK = {
    **_SMALL, **_APART,
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 16, "n_shared_experts": 2, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 12, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1,
    },
    "llama": {"model_type": "llama", **_SMALL},
    "llama-3.1": {"model_type": "llama", **_SMALL, "rope_theta": 5e5, "rope_scaling": _LLAMA3},
    "llama-tied": {"model_type": "llama", **_SMALL, "tie_word_embeddings": True, "attention_bias": True},
    "mistral": {"model_type": "mistral", **_SMALL, "sliding_window": 6},
    "mixtral": {"model_type": "mixtral", **_SMALL, **_APART, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"model_type": "qwen2", **_SMALL},
    "qwen2-moe": {"model_type": "qwen2_moe", **_SMALL, **_EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3": {"model_type": "qwen3", **_SMALL, "head_dim": 16},
    "qwen3-moe": {"model_type": "qwen3_moe", **_SMALL, **_EXPERTS, "head_dim": 8, "norm_topk_prob": True},
    "deepseek-v3": _DEEPSEEK,
    "deepseek-v3-yarn": {**_DEEPSEEK, "q_lora_rank": None, "rope_scaling": _YARN, "rope_theta": 1e4},
}  # fmt: skip
# Deep enough for several stages on every group of devices.
CONFIGS["llama-deep"] = {**CONFIGS["llama"], "num_hidden_layers": 4}
CONFIGS["tied-deep"] = {**CONFIGS["llama-tied"], "num_hidden_layers": 4}
CONFIGS["gpt2-deep"] = {**CONFIGS["gpt2"], "n_layer": 4}
CONFIGS["moe-deep"] = {**CONFIGS["qwen3-moe"], "num_hidden_layers": 4}
CONFIGS["moe-balanced"] = {**CONFIGS["qwen3-moe"], "output_router_logits": True, "router_aux_loss_coef": 0.5}
