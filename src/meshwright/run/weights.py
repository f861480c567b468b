"""Weights in Hugging Face's names and files: read and written one tensor at a time, never the whole model.

A parameter here is one or several of theirs, one below the other: q, k and v; gate and up; all experts.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.errors import InputError
from meshwright.files import read_json
from meshwright.model import Model
from meshwright.model.attention import LatentAttention
from meshwright.run.folder_checks import unwritable
from meshwright.run.models.decoder import Decoder, fresh
from meshwright.run.models.linear import merged
from meshwright.run.models.numerics import config_of

_SHARD = 4 * 2**30  # bytes of a file
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Recipe:
    """How a parameter is made: rows of tensors below each other, for every expert where there are several."""

    tensors: tuple[tuple[str, ...], ...]  # (expert or one, part)
    stacked: bool = False  # the first axis is the expert
    transposed: bool = False  # theirs is (in, out): GPT-2

    def joined(self, read: Mapping[str, Tensor]) -> Tensor:
        """The parameter, from tensors by name."""
        every = [torch.cat([self._turned(read[name]) for name in parts]) for parts in self.tensors]
        return torch.stack(every) if self.stacked else every[0]

    def parted(self, parameter: Tensor, sizes: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """The tensors, from a parameter; `sizes` are rows by name where parts differ."""
        for value, parts in zip(parameter if self.stacked else [parameter], self.tensors, strict=True):
            even = value.shape[0] // len(parts)
            for name, part in zip(parts, value.split([sizes.get(n, even) for n in parts]), strict=True):
                yield name, self._turned(part).contiguous()

    def _turned(self, tensor: Tensor) -> Tensor:
        return tensor.t() if self.transposed and tensor.dim() == 2 else tensor


def recipe(model: Model, key: str) -> Recipe:
    """Of a parameter or buffer, by the name that it has under every plan."""
    family = str(config_of(model)["model_type"])
    layer = next(layer for layer in model.layers if key.startswith(f"{layer.name}."))
    own = key[len(layer.name) + 1 :]
    return _gpt2(layer.name, own) if family == "gpt2" else _llama(layer.name, own, family, layer.shape)


def _gpt2(layer: str, own: str) -> Recipe:
    ends = {"embed.tokens.weight": "wte.weight", "embed.positions.weight": "wpe.weight"}
    ends |= {"norm.norm.weight": "ln_f.weight", "norm.norm.bias": "ln_f.bias"}
    if layer in {"embed", "norm"}:
        return Recipe(((f"transformer.{ends[f'{layer}.{own}']}",),))
    if layer == "head":
        return Recipe((("lm_head.weight",),))
    _, index, part = layer.split(".")
    names = {"attention": {"norm": "ln_1", "qkv": "attn.c_attn", "proj": "attn.c_proj"},
             "mlp": {"norm": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj"}}  # fmt: skip
    module, kind = own.rsplit(".", 1)
    return Recipe(((f"transformer.h.{index}.{names[part][module]}.{kind}",),), transposed=module != "norm")


_ENDS = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_ATTENTION = {
    "norm": ("input_layernorm",), "proj": ("self_attn.o_proj",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",),
}  # fmt: skip
_LATENT = {
    "norm": ("input_layernorm",), "proj": ("self_attn.o_proj",), "q_down": ("self_attn.q_a_proj",),
    "q_norm": ("self_attn.q_a_layernorm",), "q_up": ("self_attn.q_b_proj",),
    "kv_down": ("self_attn.kv_a_proj_with_mqa",), "kv_norm": ("self_attn.kv_a_layernorm",),
    "kv_up": ("self_attn.kv_b_proj",),
}  # fmt: skip
_DENSE = {
    "norm": ("post_attention_layernorm",), "up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",),
}  # fmt: skip


def _llama(layer: str, own: str, family: str, shape: Any) -> Recipe:
    if layer in _ENDS:
        return Recipe(((_ENDS[layer],),))
    _, index, part = layer.split(".")
    at = f"model.layers.{index}"
    if part == "moe":
        return _mixture(at, own, family, shape)
    inside, kind = own.rsplit(".", 1)
    latent = isinstance(shape, LatentAttention)
    names = _DENSE if part == "mlp" else _LATENT if latent else _ATTENTION
    if inside == "q_up" and not shape.q_rank:
        return Recipe(((f"{at}.self_attn.q_proj.{kind}",),))
    return Recipe((tuple(f"{at}.{name}.{kind}" for name in names[inside]),))


def _mixture(at: str, own: str, family: str, shape: Any) -> Recipe:
    mixtral = family == "mixtral"
    body = f"{at}.block_sparse_moe" if mixtral else f"{at}.mlp"
    shared = "shared_expert" if family == "qwen2_moe" else "shared_experts"
    simple = {
        "norm.weight": (f"{at}.post_attention_layernorm.weight",), "router.weight": (f"{body}.gate.weight",),
        "router.correction": (f"{body}.gate.e_score_correction_bias",),
        "shared_up.weight": (f"{body}.{shared}.gate_proj.weight", f"{body}.{shared}.up_proj.weight"),
        "shared_down.weight": (f"{body}.{shared}.down_proj.weight",),
        "shared_gate.weight": (f"{body}.shared_expert_gate.weight",),
        "descend.weight": (f"{body}.descend.weight",), "ascend.weight": (f"{body}.ascend.weight",),
    }  # fmt: skip
    if own in simple:
        return Recipe((simple[own],))
    up, down = (("w1", "w3"), ("w2",)) if mixtral else (("gate_proj", "up_proj"), ("down_proj",))
    parts = up if own == "experts.up" else down
    every = range(shape.experts)
    return Recipe(tuple(tuple(f"{body}.experts.{e}.{p}.weight" for p in parts) for e in every), stacked=True)


def values_from(model: Model, folder: str | Path, seed: int = 0) -> Callable[[str, Sequence[int]], Tensor]:
    """Whole parameters by name and shape, each read when it is asked for; adapters are in no file, and fresh."""
    where = _files(Path(folder))

    def value(key: str, shape: Sequence[int]) -> Tensor:
        if of_adapter(key):
            return fresh(key, shape, 0.0, seed)
        how = recipe(model, key)
        names = [name for parts in how.tensors for name in parts]
        missing = [name for name in names if name not in where]
        if missing:
            raise InputError(f"has no tensor '{missing[0]}'", file=str(folder), valid=f"weights of {model.name}")
        found = how.joined({name: _read(where[name], name) for name in names})
        if found.shape != torch.Size(shape):
            said, needed = list(found.shape), list(shape)
            raise InputError(f"'{names[0]}' makes {said}, {model.name} needs {needed}", file=str(folder))
        return found

    return value


@torch.no_grad()
def read_weights(model: Model, decoder: Decoder, folder: str | Path) -> None:
    """Fill a decoder from the safetensors files of a folder, a parameter at a time."""
    value = values_from(model, folder)
    for key, module, kind in decoder.named():
        weight = getattr(module, kind)
        weight.copy_(value(key, weight.shape))


def _files(folder: Path) -> dict[str, Path]:
    """The file of every tensor."""
    if (folder / _INDEX).is_file():
        weights = read_json(str(folder / _INDEX))["weight_map"]
        return {name: folder / file for name, file in weights.items()}
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    if not found:
        raise InputError("holds no safetensors files", file=str(folder), valid="a folder written by save_pretrained")
    return found


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as opened:
        found: Tensor = opened.get_tensor(name)
    return found


def write_weights(model: Model, decoder: Decoder, folder: str | Path, shard: int = _SHARD) -> None:
    """The config and the weights as transformers reads them, adapters merged, in files of about `shard` bytes."""
    with Writer(model, folder, shard) as writer:
        for key, module, kind in decoder.named():
            weight = getattr(module, kind).detach()
            if kind == "weight" and getattr(module, "lora", None) is not None:
                weight = merged(weight, module.lora.a.detach(), module.lora.b.detach())
            if not of_adapter(key):
                writer.add(key, weight)


def of_adapter(key: str) -> bool:
    """Whether a parameter is an adapter's."""
    return key.endswith((".lora.a", ".lora.b"))


class Writer:
    """Takes whole parameters one at a time; the folder is complete when it is left without an error."""

    def __init__(self, model: Model, folder: str | Path, shard: int = _SHARD) -> None:
        self.model, self.target, self.shard = model, Path(folder), shard
        self._pending: dict[str, Tensor] = {}
        self._weights: dict[str, str] = {}
        self._total, self._files = 0, 0

    def __enter__(self) -> Writer:
        self.target.mkdir(parents=True, exist_ok=True)
        return self

    def add(self, key: str, parameter: Tensor) -> None:
        """By the name that it has under every plan."""
        how = recipe(self.model, key)
        for name, tensor in how.parted(parameter, _rows(self.model, how)):
            if self._pending and sum(t.nbytes for t in self._pending.values()) + tensor.nbytes > self.shard:
                self._flush()
            self._pending[name] = tensor.cpu()
            self._total += tensor.nbytes

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
            _write(self.target / _INDEX, {"metadata": {"total_size": self._total}, "weight_map": self._weights})
            _write(self.target / "config.json", _config(self.model))

    def _flush(self) -> None:
        self._files += 1
        file = f"model-{self._files:05d}.safetensors"
        try:
            save_file(self._pending, self.target / file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            (self.target / file).unlink(missing_ok=True)
            full = isinstance(error, SafetensorError) and "No space left" in str(error)
            cause = error if isinstance(error, OSError) else OSError(errno.ENOSPC if full else errno.EIO, str(error))
            raise unwritable(self.target / file, cause) from None
        self._weights |= dict.fromkeys(self._pending, file)
        self._pending = {}


def _rows(model: Model, recipe: Recipe) -> dict[str, int]:
    """Rows of q, k and v, which differ."""
    first = recipe.tensors[0][0]
    if not first.endswith(("self_attn.q_proj.weight", "self_attn.q_proj.bias")) or len(recipe.tensors[0]) == 1:
        return {}
    shape: Any = model.layer(f"block.{first.split('.')[2]}.attention").shape
    widths = (shape.heads, shape.kv_heads, shape.kv_heads)
    return {name: width * shape.head_dim for name, width in zip(recipe.tensors[0], widths, strict=True)}


def _config(model: Model) -> dict[str, Any]:
    from meshwright.model.families import FAMILIES

    config = {key: value for key, value in config_of(model).items() if key != "_name_or_path"}
    return {"architectures": [FAMILIES[str(config["model_type"])].architectures[0]], **config}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    os.replace(part, path)
