"""Our modules compute what transformers' own models compute, from the same files; and write files that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import meshwright as mw
from meshwright.errors import InputError
from meshwright.run.folder.checkpoint.huggingface import read_weights, write_weights
from meshwright.run.models import build
from tests.run.families import CONFIGS


def theirs(config: dict[str, Any]) -> Any:
    """A model of transformers with weights, biases and norms that are all different."""
    torch.manual_seed(0)
    settings = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **settings)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in [*model.parameters(), *(b for name, b in model.named_buffers() if "correction" in name)]:
            weight.add_(0.05 * torch.randn_like(weight))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_logits_and_files(name: str, tmp_path: Path) -> None:
    reference = theirs(CONFIGS[name])
    reference.save_pretrained(tmp_path / "theirs")
    model = mw.Model.from_config(tmp_path / "theirs" / "config.json")
    decoder = build(model)
    read_weights(model, decoder, tmp_path / "theirs")
    assert sum(p.numel() for p in decoder.parameters()) == model.parameters
    tokens = torch.randint(0, 64, (2, 24))
    with torch.no_grad():
        expected, found = reference(tokens).logits, decoder(tokens)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    write_weights(model, decoder, tmp_path / "ours", shard=20_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    again, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(told.values())
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(tokens).logits, expected, atol=0, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3-moe", "deepseek-v3"])
def test_the_same_gradients(name: str, tmp_path: Path) -> None:
    reference = theirs(CONFIGS[name])
    reference.save_pretrained(tmp_path)
    model = mw.Model.from_config(tmp_path / "config.json")
    decoder = build(model)
    read_weights(model, decoder, tmp_path)
    tokens = torch.randint(0, 64, (2, 16))
    reference(tokens).logits.square().mean().backward()
    decoder(tokens).square().mean().backward()
    end = "transformer.ln_f.weight" if name == "gpt2" else "model.norm.weight"
    start = "transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"
    expected = dict(reference.named_parameters())
    torch.testing.assert_close(decoder.layer("norm").norm.weight.grad, expected[end].grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(decoder.layer("embed").tokens.weight.grad, expected[start].grad, atol=1e-6, rtol=1e-4)


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    model = mw.Model.from_config(CONFIGS["llama"])
    with pytest.raises(InputError, match="holds no safetensors files"):
        read_weights(model, build(model), tmp_path)
    other = mw.Model.from_config({**CONFIGS["llama"], "num_hidden_layers": 1})
    write_weights(other, build(other), tmp_path)
    with pytest.raises(InputError, match=r"has no tensor 'model.layers.1.input_layernorm.weight'"):
        read_weights(model, build(model), tmp_path)
    wide = mw.Model.from_config({**CONFIGS["llama"], "vocab_size": 80, "num_hidden_layers": 1})
    with pytest.raises(InputError, match=r"is \[64, 32\], llama needs \[80, 32\]"):
        read_weights(wide, build(wide), tmp_path)
