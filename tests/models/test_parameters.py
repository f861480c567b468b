"""Parameter counts equal transformers' own classes, built on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from meshwright.models import Model, presets

# Beside the presets: the switches of each family that no preset sets.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biased-wide-heads": ("LlamaForCausalLM", {
        "model_type": "llama", "vocab_size": 1000, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 256, "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": True}),
    "llama-defaults": ("LlamaForCausalLM", {
        "model_type": "llama", "vocab_size": 1000, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6,
        "intermediate_size": 256}),
    "gpt2-defaults": ("GPT2LMHeadModel", {
        "model_type": "gpt2", "vocab_size": 1000, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "gpt2-untied-narrow": ("GPT2LMHeadModel", {
        "model_type": "gpt2", "vocab_size": 1000, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 100,
        "tie_word_embeddings": False}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", {
        "model_type": "qwen2_moe", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 160, "moe_intermediate_size": 48, "num_experts": 6,
        "num_experts_per_tok": 2, "shared_expert_intermediate_size": 80, "decoder_sparse_step": 2, "mlp_only_layers": []}),
    "qwen3-moe-some-dense": ("Qwen3MoeForCausalLM", {
        "model_type": "qwen3_moe", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 160, "moe_intermediate_size": 48, "num_experts": 6,
        "num_experts_per_tok": 2, "mlp_only_layers": [1], "attention_bias": True}),
    "mixtral-small": ("MixtralForCausalLM", {
        "model_type": "mixtral", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 2, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v3-biased": ("DeepseekV3ForCausalLM", {
        "model_type": "deepseek_v3", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "intermediate_size": 160, "moe_intermediate_size": 48, "n_routed_experts": 8, "n_group": 2,
        "topk_group": 1, "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "attention_bias": True}),
    "bert-mlm": ("BertForMaskedLM", {
        "model_type": "bert", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "max_position_embeddings": 77, "architectures": ["BertForMaskedLM"]}),
    "t5-gated": ("T5ForConditionalGeneration", {
        "model_type": "t5", "vocab_size": 1000, "d_model": 64, "d_kv": 24, "d_ff": 144, "num_layers": 3,
        "num_decoder_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu"}),
    "vit-bare": ("ViTModel", {
        "model_type": "vit", "image_size": 32, "patch_size": 8, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 128, "qkv_bias": False, "architectures": ["ViTModel"]}),
    "swin-odd-grid": ("SwinForImageClassification", {
        "model_type": "swin", "image_size": 56, "patch_size": 4, "embed_dim": 24, "depths": [2, 2], "num_heads": [3, 6],
        "window_size": 5, "mlp_ratio": 3.0, "qkv_bias": False, "num_labels": 7}),
}  # fmt: skip


# What a config leaves out is what transformers' config class fills in.
LEFT_OUT = {
    "mistral": ("MistralForCausalLM", ["num_key_value_heads", "sliding_window", "head_dim"]),
    "mixtral": ("MixtralForCausalLM", ["num_key_value_heads", "num_experts_per_tok"]),
    "qwen2": ("Qwen2ForCausalLM", ["num_key_value_heads"]),
    "qwen3": ("Qwen3ForCausalLM", ["num_key_value_heads", "head_dim"]),
    "qwen3_moe": ("Qwen3MoeForCausalLM", ["num_key_value_heads"]),
    "deepseek_v3": ("DeepseekV3ForCausalLM", ["first_k_dense_replace"]),
}
SWITCHES = {
    "mistral-ignores-attention-bias": ("mistral-7b", {"attention_bias": True}),
    "bert-untied": ("bert-base", {"tie_word_embeddings": False}),
    "qwen3-biased": ("qwen3-0.6b", {"attention_bias": True}),
}


@pytest.mark.parametrize("family", list(LEFT_OUT))
def test_fields_left_out_mean_what_transformers_fills_in(family: str) -> None:
    architecture, fields = LEFT_OUT[family]
    base = next(p.config for p in presets().values() if p.config["model_type"] == family)
    config = {key: value for key, value in base.items() if key not in fields}
    # 32 heads of 128 divide by every default of key/value heads.
    config |= {"num_attention_heads": 32, "hidden_size": 4096, "num_hidden_layers": 5}
    assert Model.from_config(config).parameters == count_in_transformers(architecture, config)


@pytest.mark.parametrize("name", list(SWITCHES))
def test_switches_count_as_in_transformers(name: str) -> None:
    preset, changes = SWITCHES[name]
    config = presets()[preset].config | changes
    assert Model.from_config(config).parameters == count_in_transformers(presets()[preset].architecture, config)


def count_in_transformers(architecture: str, config: dict[str, Any]) -> int:
    settings = {key: value for key, value in config.items() if key != "architectures"}
    with torch.device("meta"):
        module = getattr(transformers, architecture)(transformers.AutoConfig.for_model(**settings))
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", list(presets()))
def test_preset_equals_transformers(name: str) -> None:
    preset = presets()[name]
    assert Model.preset(name).parameters == count_in_transformers(preset.architecture, preset.config)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_config_variant_equals_transformers(name: str) -> None:
    architecture, config = VARIANTS[name]
    assert Model.from_config(config).parameters == count_in_transformers(architecture, config)


# Counts that the models' publishers print, so that a shared mistake in config and class would show.
PUBLISHED = {
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama-7b": 6_738_415_616,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "bloom-176b": 176_247_271_424,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-235b-a22b": 235_093_634_560,
    "t5-large": 737_668_096,
    "vit-huge": 632_045_800,
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_preset_equals_published_count(name: str) -> None:
    assert Model.preset(name).parameters == PUBLISHED[name]


def test_untied_t5_as_published() -> None:
    """google/t5-v1_1-small: transformers 5 ties the class's head whatever the config says, the weights are untied."""
    config = {
        "model_type": "t5", "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8,
        "num_decoder_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    }  # fmt: skip
    assert Model.from_config(config).parameters == 76_961_152


def test_router_bias_of_deepseek_is_the_rest_of_its_published_count() -> None:
    """The published 671,026,419,200 include 58 x 256 router biases, which are buffers, not trained by gradients."""
    assert Model.preset("deepseek-v3").parameters + 58 * 256 == 671_026_419_200


@pytest.mark.parametrize(("name", "billions"), [("deepseek-v3", 37), ("qwen3-30b-a3b", 3.3), ("mixtral-8x7b", 12.9)])
def test_active_parameters_as_published(name: str, billions: float) -> None:
    assert Model.preset(name).active_parameters / 1e9 == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize("spelling", ["Llama-3-70B", "meta-llama/Meta-Llama-3-70B", "llama3_70b", "LLAMA 3 70b"])
def test_spelling_is_forgiving(spelling: str) -> None:
    assert Model.preset(spelling).name == "llama3-70b"


def test_similar_names_stay_apart() -> None:
    assert Model.preset("gpt3-1.3b").parameters < 2e9 < Model.preset("gpt3-13b").parameters
    assert Model.preset("llama-33b").parameters > 30e9


def test_every_family_the_product_promises_is_there() -> None:
    promised = (
        "gpt2 gpt2-medium gpt2-large gpt2-xl gpt3-175b bert-huge t5-large vit-huge swin-huge llama-7b llama-13b "
        "llama-65b llama2-7b llama2-13b llama2-70b llama3-8b llama3-70b llama3.1-8b llama3.1-70b llama3.1-405b "
        "qwen2.5-7b qwen2.5-72b qwen3-8b qwen3-32b qwen3-30b-a3b qwen3-235b-a22b mixtral-8x7b mixtral-8x22b "
        "deepseek-v3 bloom-176b tiny-gpt2 tiny-llama tiny-moe"
    )
    assert set(promised.split()) <= set(presets())
