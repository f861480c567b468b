"""Weights to begin from that are cut off, damaged, or another model's: one message, which names file and tensor."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import meshwright as mw
from meshwright.errors import InputError
from meshwright.run.folder.checkpoint.huggingface import read_weights, write_weights
from meshwright.run.models import build
from tests.run.families import CONFIGS

SHARD = "model-00001.safetensors"
INDEX = "model.safetensors.index.json"
Q, K = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Whole weights of a small Llama, in one file with an index."""
    model = mw.Model.from_config(CONFIGS["llama"])
    write_weights(model, build(model), tmp_path / "weights")
    return tmp_path / "weights"


def refusal(folder: Path) -> InputError:
    model = mw.Model.from_config(CONFIGS["llama"])
    with pytest.raises(InputError) as caught:
        read_weights(model, build(model), folder)
    return caught.value


def changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """Return what changes tensors of the file, and leaves the index as it is."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / SHARD)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SHARD)

    return apply


def index(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(text)


def config(**fields: object) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        known = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**known, **fields}))

    return apply


def swap(tensors: dict[str, torch.Tensor]) -> None:
    """q and k below each other have the same rows as before."""
    tensors[Q], tensors[K] = tensors[K], tensors[Q]


BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "cut off": (lambda at: (at / SHARD).write_bytes((at / SHARD).read_bytes()[:-100]), SHARD, "no whole safetensors"),
    "empty": (lambda at: (at / SHARD).write_bytes(b""), SHARD, "no whole safetensors"),
    "garbage": (lambda at: (at / SHARD).write_bytes(b"\xfe" * 5000), SHARD, "no whole safetensors"),
    "file gone": (lambda at: (at / SHARD).unlink(), SHARD, "no such file"),
    "a folder": (lambda at: ((at / SHARD).unlink(), (at / SHARD).mkdir()), SHARD, "no whole safetensors"),
    "tensor gone": (changed(lambda tensors: tensors.pop(K)), SHARD, f"has no tensor '{K}', which {INDEX}"),
    "narrow": (changed(lambda t: t.update({K: t[K][:, :7]})), SHARD, rf"'{K}' is \[16, 7\], llama needs \[16, 32\]"),
    "flat": (changed(lambda t: t.update({K: t[K].flatten()})), SHARD, rf"'{K}' is \[512\], llama needs \[16, 32\]"),
    "swapped": (changed(swap), SHARD, rf"'{Q}' is \[16, 32\], llama needs \[32, 32\]"),
    "integers": (changed(lambda t: t.update({K: t[K].to(torch.int64)})), SHARD, f"'{K}' is of type I64"),
    "eight bits": (changed(lambda t: t.update({K: t[K].to(torch.float8_e4m3fn)})), SHARD, f"'{K}' is of type F8_E4M3"),
    "index cut off": (index('{"weight_map": {'), INDEX, "malformed JSON"),
    "no map": (index("[]"), INDEX, "weight_map: is no map of tensors to files"),
    "map of lists": (index('{"weight_map": {"a": []}}'), INDEX, "weight_map: is no map of tensors to files"),
    "map elsewhere": (index('{"weight_map": {"a": "b.safetensors"}}'), "b.safetensors", "no such file"),
    "map of others": (index(f'{{"weight_map": {{"a": "{SHARD}"}}}}'), SHARD, f"has no tensor 'a', which {INDEX}"),
    "map of few": (index(f'{{"weight_map": {{"{K}": "{SHARD}"}}}}'), "weights", "has no tensor 'model.embed_tokens"),
    "other heads": (config(num_attention_heads=8), "config.json", r"block\.0\.attention: says head_dim 4, llama has 8"),
    "other family": (config(model_type="qwen3"), "config.json", "architectures: LlamaForCausalLM is not"),
    "deeper": (config(num_hidden_layers=3), "config.json", r"describes a block\.2\.attention, which llama has not"),
    "config cut off": (lambda at: (at / "config.json").write_text("{"), "config.json", "malformed JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_file_and_tensor_are_named(name: str, folder: Path) -> None:
    damage, file, words = BROKEN[name]
    damage(folder)
    error = refusal(folder)
    assert Path(error.file).name == file
    assert re.search(words, str(error)), error


def test_a_tensor_missing_without_an_index(folder: Path) -> None:
    changed(lambda tensors: tensors.pop(K))(folder)
    (folder / INDEX).unlink()
    assert str(refusal(folder)).startswith(f"{folder}: has no tensor '{K}'")


def test_weights_of_a_longer_context_are_taken(folder: Path) -> None:
    """A window, and how rotary frequencies are scaled, may change between two runs of the same weights."""
    config(rope_theta=5e5, max_position_embeddings=4096, attention_dropout=0.1)(folder)
    model = mw.Model.from_config(CONFIGS["llama"])
    read_weights(model, build(model), folder)


@pytest.mark.parametrize(
    "plan", ["pp=2", *(pytest.param(plan, marks=pytest.mark.nightly) for plan in ("dp=1", "dp=2"))]
)
def test_a_run_ends_with_one_message(plan: str, folder: Path) -> None:
    """Under pp=2 only one process reads the tensor, the other waits for it."""
    changed(lambda tensors: tensors.update({K: tensors[K][:, :7]}))(folder)
    command = [sys.executable, "-m", "meshwright", "train", "config.json", "--init-from", ".", "--plan", plan]
    command += ["--seq", "16", "--batch", "4", "--steps", "2", "--data", "synthetic"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert f"{SHARD}: '{K}' is [16, 7]" in line
