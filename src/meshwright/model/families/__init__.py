"""Which function turns a Hugging Face config of which `model_type` into a chain of layers."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.model.families.bert import bert_layers
from meshwright.model.families.decoder import bloom_layers, decoder_layers, gpt2_layers
from meshwright.model.families.fields import Fields
from meshwright.model.families.t5 import t5_layers
from meshwright.model.families.vision import swin_layers, vit_layers
from meshwright.model.layer import Layer

Builder = Callable[[Fields], list[Layer]]

# model_type -> (builder, architectures whose parameters the builder counts)
FAMILIES: dict[str, tuple[Builder, tuple[str, ...]]] = {
    "gpt2": (gpt2_layers, ("GPT2LMHeadModel",)),
    "bloom": (bloom_layers, ("BloomForCausalLM",)),
    "llama": (decoder_layers, ("LlamaForCausalLM",)),
    "mistral": (decoder_layers, ("MistralForCausalLM",)),
    "mixtral": (decoder_layers, ("MixtralForCausalLM",)),
    "qwen2": (decoder_layers, ("Qwen2ForCausalLM",)),
    "qwen2_moe": (decoder_layers, ("Qwen2MoeForCausalLM",)),
    "qwen3": (decoder_layers, ("Qwen3ForCausalLM",)),
    "qwen3_moe": (decoder_layers, ("Qwen3MoeForCausalLM",)),
    "deepseek_v2": (decoder_layers, ("DeepseekV2ForCausalLM",)),
    "deepseek_v3": (decoder_layers, ("DeepseekV3ForCausalLM",)),
    "kimi_k2": (decoder_layers, ("DeepseekV3ForCausalLM",)),
    "bert": (bert_layers, ("BertForPreTraining", "BertForMaskedLM")),
    "t5": (t5_layers, ("T5ForConditionalGeneration", "T5WithLMHeadModel")),
    "vit": (vit_layers, ("ViTForImageClassification", "ViTModel")),
    "swin": (swin_layers, ("SwinForImageClassification",)),
}
