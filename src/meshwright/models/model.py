"""`Model`: the model to train, as a named chain of layers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError, UnknownName
from meshwright.models.layer import Layer, Op, Recompute, Slice

if TYPE_CHECKING:
    import torch

# Default sequence length of a job: common in pre-training, below most models' maximum.
DEFAULT_SEQ_LEN = 4096


@dataclass(frozen=True)
class Model:
    """Named chain of layers, made from a preset, a Hugging Face config or any `torch.nn.Module`.

    >>> model = Model.preset("llama3-70b")
    >>> model.parameters, len(model.blocks), model.layers[1].name
    (70553706496, 80, 'block.0.attention')
    """

    name: str
    family: str
    layers: tuple[Layer, ...]
    max_seq_len: int = 0  # longest sequence it was made for; 0: unknown
    learned_positions: bool = False  # a longer sequence is impossible
    tokens: int = 0  # tokens per sample where the input fixes them (vision); 0: the job decides
    # Reference to this model in a document: a preset's name, or a table that rebuilds it.
    reference: str | Mapping[str, Any] = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        """Share equal operators between layers: equal layers are then found by identity and priced once."""
        by_identity: dict[int, tuple[Op, ...]] = {}
        by_value: dict[tuple[Op, ...], tuple[Op, ...]] = {}
        for layer in self.layers:
            if id(layer.ops) not in by_identity:
                by_identity[id(layer.ops)] = by_value.setdefault(layer.ops, layer.ops)
        if len(by_value) < len(by_identity):
            layers = tuple(replace(layer, ops=by_identity[id(layer.ops)]) for layer in self.layers)
            object.__setattr__(self, "layers", layers)

    @staticmethod
    def preset(name: str) -> Model:
        """Return a known model by name; case and punctuation may vary.

        >>> Model.preset("GPT-2 XL").parameters
        1557611200
        """
        from meshwright.models.presets import preset_model

        return preset_model(name)

    @staticmethod
    def from_config(config: str | Path | Mapping[str, Any], name: str = "") -> Model:
        """Return the model of a Hugging Face `config.json`: a path, or its contents as a dict.

        >>> tiny = {"model_type": "gpt2", "vocab_size": 100, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
        >>> Model.from_config(tiny).parameters
        2688
        """
        from meshwright.models.from_config import config_model

        return config_model(config, name)

    @staticmethod
    def from_module(
        module: torch.nn.Module, *inputs: Any, name: str = "", seq_dim: int | None = None, **keywords: Any
    ) -> Model:
        """Return the model of a `torch.nn.Module` and example inputs; nothing is allocated or run.

        Dimension 0 of every input tensor is the batch. `seq_dim` names the sequence dimension, if any, so that FLOPs
        and bytes become functions of its length.
        """
        from meshwright.models.from_module import traced_model

        return traced_model(module, inputs, keywords, name=name, seq_dim=seq_dim)

    @staticmethod
    def load(what: str | Path | Mapping[str, Any]) -> Model:
        """Return the model a user names: a preset, the path of a config.json (or its folder), or a table."""
        if isinstance(what, Mapping) and "layers" in what:
            from meshwright.models.model_table import written_model

            return written_model(what)
        if not isinstance(what, str | Path):
            return Model.from_config(what)
        inside = os.path.join(what, "config.json")
        path = inside if os.path.isfile(inside) else str(what)
        if path.endswith(".json") or os.path.isfile(path):
            return Model.from_config(path)
        return Model.preset(str(what))

    @cached_property
    def parameters(self) -> int:
        """Trained parameters; tied weights count once."""
        return sum(layer.parameters for layer in self.layers)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that process one token: in a mixture of experts, those of the chosen experts only."""
        routed = [layer for layer in self.layers if layer.experts]
        return self.parameters - round(sum(layer.parameters - layer.active_parameters for layer in routed))

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Names of the transformer blocks, in order."""
        return tuple(dict.fromkeys(layer.block for layer in self.layers if layer.block))

    @cached_property
    def _index(self) -> dict[str, int]:
        return {layer.name: i for i, layer in enumerate(self.layers)}

    @cached_property
    def _ends(self) -> dict[str, tuple[int, int]]:
        """First and last layer of each block."""
        found: dict[str, tuple[int, int]] = {}
        for i, layer in enumerate(self.layers):
            if layer.block:
                found[layer.block] = (found.get(layer.block, (i, i))[0], i)
        return found

    def index(self, name: str, *, last: bool = False) -> int:
        """Return the position of a layer; a block's name means its first layer, or its last with `last`."""
        if name in self._index:
            return self._index[name]
        if name not in self._ends:
            names = [*self._index, *self.blocks]
            raise UnknownName(f"layer of {self.name}", name, names, see=f"{names[0]} ... {self.layers[-1].name}")
        return self._ends[name][last]

    def layer(self, name: str) -> Layer:
        return self.layers[self.index(name)]

    def default_seq_len(self) -> int:
        """Return the sequence length of a job that names none."""
        if self.tokens:
            return self.tokens
        return min(self.max_seq_len or DEFAULT_SEQ_LEN, DEFAULT_SEQ_LEN)

    def check_seq_len(self, seq_len: int) -> None:
        """Refuse a length the model cannot take."""
        if self.tokens and seq_len != self.tokens:
            raise InputError(
                f"{self.name} has {self.tokens} tokens per sample, fixed by its input", valid=str(self.tokens)
            )
        if self.learned_positions and seq_len > self.max_seq_len:
            problem = f"{self.name} has learned positions for {self.max_seq_len} tokens, not {seq_len}"
            raise InputError(problem, valid=f"1 to {self.max_seq_len}")

    def forward_flops(self, slice_: Slice) -> float:
        """Return forward FLOPs of one micro-batch on one device; a multiply-add is two."""
        return float(sum(layer.forward_flops(slice_) for layer in self.layers))

    def kept_bytes(self, slice_: Slice, recompute: Recompute = "none") -> float:
        """Return the bytes one micro-batch keeps on a device until its backward pass."""
        return float(sum(layer.kept_bytes(slice_, recompute) for layer in self.layers))

    def __repr__(self) -> str:
        return f"Model({self.name}: {self.parameters:,} parameters, {len(self.layers)} layers)"
