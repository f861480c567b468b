"""A config that cannot be read says which field is wrong and what would be valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError, UnknownName
from meshwright.models import Model, presets

LLAMA = presets()["tiny-llama"].config


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"model_type": "mamba2"}, "model_type", ["mamba2", "not supported", "llama"]),
        ({"model_type": "llamma"}, "model_type", ["did you mean llama"]),
        ({"model_type": None}, "model_type", ["missing"]),
        ({"hidden_size": -128}, "hidden_size", ["-128", "1 to"]),
        ({"hidden_size": 1.5}, "hidden_size", ["1.5", "integer"]),
        ({"hidden_size": "128"}, "hidden_size", ["integer"]),
        ({"hidden_size": True}, "hidden_size", ["integer"]),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", ["10000"]),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "num_attention_heads", ["not a multiple"]),
        ({"num_key_value_heads": 3}, "num_key_value_heads", ["not a multiple"]),
        ({"attention_dropout": 1.5}, "attention_dropout", ["1.5"]),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", ["true or false"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures", ["LlamaForCausalLM"]),
        ({"architectures": "LlamaForCausalLM"}, "architectures", ["list"]),
    ],
)
def test_wrong_field(changes: dict[str, Any], field: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        Model.from_config(LLAMA | changes)
    assert caught.value.field == field
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_every_missing_field_is_named_at_once() -> None:
    with pytest.raises(
        InputError, match="hidden_size, vocab_size, num_hidden_layers, num_attention_heads, intermediate_size"
    ):
        Model.from_config({"model_type": "llama"})


def test_an_unknown_family_says_what_it_lacks() -> None:
    with pytest.raises(InputError, match="lacks num_hidden_layers, num_attention_heads, intermediate_size"):
        Model.from_config({"model_type": "rwkv", "hidden_size": 8, "vocab_size": 10})


def test_more_experts_per_token_than_experts() -> None:
    with pytest.raises(InputError, match="num_experts_per_tok"):
        Model.from_config(presets()["tiny-moe"].config | {"num_experts_per_tok": 9})


def test_a_path_and_its_folder_both_work(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    expected = Model.preset("tiny-llama").parameters
    assert Model.load(tmp_path / "config.json").parameters == Model.load(str(tmp_path)).parameters == expected


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"vocab_size": 0}))
    with pytest.raises(InputError) as caught:
        Model.load(path)
    assert (caught.value.file, caught.value.field) == (str(path), "vocab_size")


def test_an_unknown_preset_offers_the_closest() -> None:
    with pytest.raises(UnknownName) as caught:
        Model.preset("lama3-70b")
    assert "llama3-70b" in caught.value.closest
    assert "meshwright models" in str(caught.value)


@pytest.mark.parametrize("name", ["", "x" * 5_000, "llama\n3", "../../etc", "\x00"])
def test_odd_names_do_not_break(name: str) -> None:
    with pytest.raises(InputError):
        Model.load(name)
