"""Table from the `model_type` of a Hugging Face config to the function that builds its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.models.families.bert import bert_layers
from meshwright.models.families.decoder import bloom_layers, decoder_layers, gpt2_layers
from meshwright.models.families.fields import Fields
from meshwright.models.families.t5 import t5_layers
from meshwright.models.families.vision import swin_layers, vit_layers
from meshwright.models.layer import Layer

Builder = Callable[[Fields], list[Layer]]


@dataclass(frozen=True, slots=True)
class Family:
    """Reader of the configs of one `model_type`."""

    build: Builder
    architectures: tuple[str, ...]  # classes whose parameters the builder counts
    learned_positions: bool = False  # a longer sequence is impossible
    longest: int = 0  # tokens, if the config names no maximum


FAMILIES: dict[str, Family] = {
    "gpt2": Family(gpt2_layers, ("GPT2LMHeadModel",), learned_positions=True, longest=1024),
    "bloom": Family(bloom_layers, ("BloomForCausalLM",)),
    "llama": Family(decoder_layers, ("LlamaForCausalLM",)),
    "mistral": Family(decoder_layers, ("MistralForCausalLM",)),
    "mixtral": Family(decoder_layers, ("MixtralForCausalLM",)),
    "qwen2": Family(decoder_layers, ("Qwen2ForCausalLM",)),
    "qwen2_moe": Family(decoder_layers, ("Qwen2MoeForCausalLM",)),
    "qwen3": Family(decoder_layers, ("Qwen3ForCausalLM",)),
    "qwen3_moe": Family(decoder_layers, ("Qwen3MoeForCausalLM",)),
    "deepseek_v2": Family(decoder_layers, ("DeepseekV2ForCausalLM",)),
    "deepseek_v3": Family(decoder_layers, ("DeepseekV3ForCausalLM",)),
    "kimi_k2": Family(decoder_layers, ("DeepseekV3ForCausalLM",)),
    "bert": Family(bert_layers, ("BertForPreTraining", "BertForMaskedLM"), learned_positions=True, longest=512),
    "t5": Family(t5_layers, ("T5ForConditionalGeneration", "T5WithLMHeadModel")),
    "vit": Family(vit_layers, ("ViTForImageClassification", "ViTModel")),
    "swin": Family(swin_layers, ("SwinForImageClassification",)),
}
