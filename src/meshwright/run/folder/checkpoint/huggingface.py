"""Weights in Hugging Face's names and files: read and written one tensor at a time, never the whole model.

One parameter here is one or several of their tensors, stacked by rows: q, k and v; gate and up; all experts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.base.files import read_json, write_error, write_text
from meshwright.errors import DiskFull, InputError
from meshwright.models import Model
from meshwright.models.attention import LatentAttention
from meshwright.run.models.decoder import Decoder, fresh
from meshwright.run.models.linear import merged
from meshwright.run.models.numerics import config_of

_SHARD = 4 * 2**30  # bytes of a file
_INDEX = "model.safetensors.index.json"
_NUMBERS = ("F64", "F32", "F16", "BF16")  # types of weights that need no scales
# Fields of a layer that do not change its weights.
_FREE = {"causal", "window", "capacity", "dropout", "score_dropout", "inner_dropout"}


@dataclass(frozen=True)
class Recipe:
    """Recipe of a parameter: rows of tensors stacked, for every expert if there are several."""

    tensors: tuple[tuple[str, ...], ...]  # (expert or one, part)
    stacked: bool = False  # the first dimension is the expert
    transposed: bool = False  # stored as (in, out): GPT-2

    def joined(self, read: Mapping[str, Tensor]) -> Tensor:
        """Return the parameter, joined from tensors by name."""
        every = [torch.cat([self._turned(read[name]) for name in parts]) for parts in self.tensors]
        return torch.stack(every) if self.stacked else every[0]

    def shapes(self, shape: Sequence[int], sizes: Mapping[str, int]) -> dict[str, list[int]]:
        """Return the shape that every tensor has in its file; `sizes` as for `parted`."""
        first, *rest = shape[1:] if self.stacked else shape
        found = {}
        for parts in self.tensors:
            for name in parts:
                found[name] = [sizes.get(name, first // len(parts)), *rest]
                if self.transposed and rest:
                    found[name].reverse()
        return found

    def parted(self, parameter: Tensor, sizes: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a parameter; `sizes` are rows by name where parts differ."""
        for value, parts in zip(parameter if self.stacked else [parameter], self.tensors, strict=True):
            even = value.shape[0] // len(parts)
            for name, part in zip(parts, value.split([sizes.get(n, even) for n in parts]), strict=True):
                yield name, self._turned(part).contiguous()

    def _turned(self, tensor: Tensor) -> Tensor:
        return tensor.t() if self.transposed and tensor.dim() == 2 else tensor


def recipe(model: Model, key: str) -> Recipe:
    """Return the recipe of a parameter or buffer, by its name, which is the same under every plan."""
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
    """Return a function that reads a whole parameter by name and shape; adapters are in no file, and start fresh."""
    _check_config(model, Path(folder))
    where = _files(Path(folder))

    def value(key: str, shape: Sequence[int]) -> Tensor:
        if of_adapter(key):
            return fresh(key, shape, 0.0, seed)
        how = recipe(model, key)
        shapes = how.shapes(shape, _rows(model, how))
        missing = [name for name in shapes if name not in where]
        if missing:
            raise InputError(f"has no tensor '{missing[0]}'", file=str(folder), valid=f"weights of {model.name}")
        return how.joined({name: _read(where[name], name, rows, model.name) for name, rows in shapes.items()})

    return value


@torch.no_grad()
def read_weights(model: Model, decoder: Decoder, folder: str | Path) -> None:
    """Load a decoder from the safetensors files of a folder, one parameter at a time."""
    value = values_from(model, folder)
    for key, module, kind in decoder.named():
        weight = getattr(module, kind)
        weight.copy_(value(key, weight.shape))


def _check_config(model: Model, folder: Path) -> None:
    """Refuse weights whose config describes other layers: other head sizes may give tensors of equal shapes."""
    file = folder / "config.json"
    if not file.is_file():
        return
    theirs, own = Model.from_config(file), {layer.name: layer.shape for layer in model.layers}
    for layer in theirs.layers:
        if layer.name not in own:
            problem = f"describes a {layer.name}, which {model.name} has not"
            raise InputError(problem, file=str(file), valid=f"the config of {model.name}")
        needed, said = _structure(own[layer.name]), _structure(layer.shape)
        for name in sorted(needed | said):
            if needed.get(name) != said.get(name):
                problem = f"says {name} {said.get(name)}, {model.name} has {needed.get(name)}"
                raise InputError(problem, file=str(file), field=layer.name, valid=f"the config of {model.name}")


def _structure(shape: Any) -> dict[str, Any]:
    """Return the fields that a layer's weights depend on; windows and dropout may change between runs."""
    if shape is None:
        return {}
    facts = {"kind": type(shape).__name__, **{field.name: getattr(shape, field.name) for field in fields(shape)}}
    return {name: value for name, value in facts.items() if name not in _FREE}


def _files(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor."""
    index = folder / _INDEX
    if index.is_file():
        return _indexed(index)
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= dict.fromkeys(_names(file), file)
    if not found:
        raise InputError("holds no safetensors files", file=str(folder), valid="a folder written by save_pretrained")
    return found


def _indexed(index: Path) -> dict[str, Path]:
    """Return the file of every tensor from an index that agrees with the files."""
    table = read_json(str(index))
    weights = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        valid = "an object that maps the name of every tensor to its file"
        raise InputError("is no map of tensors to files", file=str(index), field="weight_map", valid=valid)
    held = {file: _names(index.parent / file) for file in sorted(set(weights.values()))}
    for name, file in weights.items():
        if name not in held[file]:
            raise InputError(f"has no tensor '{name}', which {_INDEX} places there", file=str(index.parent / file))
    return {name: index.parent / file for name, file in weights.items()}


def _names(file: Path) -> set[str]:
    with _opened(file) as opened:
        return set(opened.keys())


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file; a truncated or damaged one is an input error."""
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except FileNotFoundError:
        raise InputError("no such file", file=str(file), field="--init-from") from None
    except (SafetensorError, OSError) as error:
        valid = "a folder written by save_pretrained, whole"
        raise InputError(f"is no whole safetensors file: {error}", file=str(file), valid=valid) from None


def _read(file: Path, name: str, shape: Sequence[int], model: str) -> Tensor:
    """Read a tensor after checking its header."""
    with _opened(file) as opened:
        header = opened.get_slice(name)
        if header.get_dtype() not in _NUMBERS:
            problem = f"'{name}' is of type {header.get_dtype()}"
            raise InputError(problem, file=str(file), valid=", ".join(_NUMBERS))
        if header.get_shape() != list(shape):
            raise InputError(f"'{name}' is {header.get_shape()}, {model} needs {list(shape)}", file=str(file))
        found: Tensor = opened.get_tensor(name)
    return found


def write_weights(model: Model, decoder: Decoder, folder: str | Path, shard: int = _SHARD) -> None:
    """Write the config and the weights as transformers reads them, adapters merged, in files of about `shard` bytes."""
    with Writer(model, folder, shard) as writer:
        for key, module, kind in decoder.named():
            weight = getattr(module, kind).detach()
            if kind == "weight" and getattr(module, "lora", None) is not None:
                weight = merged(weight, module.lora.a.detach(), module.lora.b.detach())
            if not of_adapter(key):
                writer.add(key, weight)


def of_adapter(key: str) -> bool:
    """Return True if a parameter belongs to an adapter."""
    return key.endswith((".lora.a", ".lora.b"))


class Writer:
    """Writer of whole parameters, one at a time; the folder is complete if the block ends without an error."""

    def __init__(self, model: Model, folder: str | Path, shard: int = _SHARD) -> None:
        self.model, self.target, self.shard = model, Path(folder), shard
        self._pending: dict[str, Tensor] = {}
        self._weights: dict[str, str] = {}
        self._total = 0
        self._written: list[str] = []  # final names of files, which have temporary names until all are written

    def __enter__(self) -> Writer:
        try:
            self.target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(error, file=str(self.target)) from None
        return self

    def add(self, key: str, parameter: Tensor) -> None:
        """Add a parameter by its name, which is the same under every plan."""
        how = recipe(self.model, key)
        for name, tensor in how.parted(parameter, _rows(self.model, how)):
            if self._pending and sum(t.nbytes for t in self._pending.values()) + tensor.nbytes > self.shard:
                self._flush()
            self._pending[name] = tensor.cpu()
            self._total += tensor.nbytes

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
                self._text("config.json", _config(self.model))
                self._text(_INDEX, {"metadata": {"total_size": self._total}, "weight_map": self._weights})
                (self.target / _INDEX).unlink(missing_ok=True)  # index of a model that is replaced
                for name in self._written:  # the index last: a folder without it is no complete model
                    self._part(name).rename(self.target / name)
        finally:
            for name in self._written:
                self._part(name).unlink(missing_ok=True)

    def _flush(self) -> None:
        file = f"model-{len(self._written) + 1:05d}.safetensors"
        self._written.append(file)
        try:
            save_file(self._pending, self._part(file), metadata={"format": "pt"})
            with self._part(file).open("rb") as saved:
                os.fsync(saved.fileno())  # a full disk may report its error only now
        except (SafetensorError, OSError) as error:
            raise write_error(_reason(error), file=str(self.target / file)) from None
        self._weights |= dict.fromkeys(self._pending, file)
        self._pending = {}

    def _text(self, name: str, content: Mapping[str, Any]) -> None:
        self._written.append(name)
        try:
            write_text(self._part(name), json.dumps(content, indent=2) + "\n")
        except (InputError, DiskFull) as error:
            error.file = str(self.target / name)
            raise

    def _part(self, name: str) -> Path:
        return self.target / f"{name}.part"


def _reason(error: Exception) -> OSError:
    """Return the system error behind an error of safetensors, which names its number only in the text."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))


def _rows(model: Model, recipe: Recipe) -> dict[str, int]:
    """Return the rows of q, k and v, which differ."""
    first = recipe.tensors[0][0]
    if not first.endswith(("self_attn.q_proj.weight", "self_attn.q_proj.bias")) or len(recipe.tensors[0]) == 1:
        return {}
    shape: Any = model.layer(f"block.{first.split('.')[2]}.attention").shape
    widths = (shape.heads, shape.kv_heads, shape.kv_heads)
    return {name: width * shape.head_dim for name, width in zip(recipe.tensors[0], widths, strict=True)}


def _config(model: Model) -> dict[str, Any]:
    from meshwright.models.families import FAMILIES

    config = {key: value for key, value in config_of(model).items() if key != "_name_or_path"}
    return {"architectures": [FAMILIES[str(config["model_type"])].architectures[0]], **config}
