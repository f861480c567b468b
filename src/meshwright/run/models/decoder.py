"""A decoder as the chain that plans speak of: a module for every layer, by the layer's name."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.errors import InputError
from meshwright.model import Layer, Model
from meshwright.model.attention import Attention, LatentAttention
from meshwright.model.feed_forward import Mlp, Moe
from meshwright.run.models.attention import GroupedAttention, MultiLatentAttention
from meshwright.run.models.context import Context
from meshwright.run.models.feed_forward import FeedForward
from meshwright.run.models.mixture import Mixture
from meshwright.run.models.norms import norm
from meshwright.run.models.numerics import Numerics, numerics

_MODULES: dict[type, Callable[[Any, Numerics], nn.Module]] = {
    Attention: GroupedAttention, LatentAttention: MultiLatentAttention, Mlp: FeedForward, Moe: Mixture,
}  # fmt: skip


class Embedding(nn.Module):
    """Tokens, and learned positions where a model has them; the table may hold a part of the vocabulary."""

    def __init__(self, numerics: Numerics) -> None:
        super().__init__()
        self.tokens = nn.Embedding(numerics.vocab, numerics.hidden)
        self.positions = nn.Embedding(numerics.positions, numerics.hidden) if numerics.positions else None

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        lane, table = context.lane, self.tokens.weight
        at = tokens - lane.tp.rank * len(table)
        mine = (at >= 0) & (at < len(table))
        found = lane.leave(functional.embedding(at.where(mine, 0), table) * mine.unsqueeze(-1))
        if self.positions is None:
            return found
        places = context.positions
        return found + self.positions(places.chunk(lane.tp.size, dim=1)[lane.tp.rank] if lane.sp else places)


class FinalNorm(nn.Module):
    """The norm after the last block."""

    def __init__(self, kind: str, numerics: Numerics) -> None:
        super().__init__()
        self.norm = norm(kind, numerics.hidden, numerics)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        found: Tensor = self.norm(x)
        return found


class Head(nn.Module):
    """To the vocabulary, or a part of it."""

    weight: Tensor

    def __init__(self, numerics: Numerics) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numerics.vocab, numerics.hidden))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return functional.linear(context.lane.enter(x), self.weight)


class Decoder(nn.Module):
    """Some consecutive layers of a model: all of them, or those of a pipeline stage."""

    def __init__(self, layers: Sequence[Layer], facts: Numerics) -> None:
        super().__init__()
        self.names = [layer.name for layer in layers]
        self.layers = nn.ModuleDict({_key(layer.name): _module(layer, facts) for layer in layers})
        tied = [layer for layer in layers if layer.tied_to in self.names]
        for layer in tied:  # where both ends stand here, they share one parameter
            self.layer(layer.name).weight = self.layer(layer.tied_to).tokens.weight
        self.tied = bool(tied)

    def layer(self, name: str) -> Any:
        """The module of a layer."""
        return self.layers[_key(name)]

    def experts(self) -> Iterator[Tensor]:
        """Parameters of routed experts, which other processes hold alike than those of all else."""
        for name in self.names:
            if isinstance(self.layer(name), Mixture):
                yield from self.layer(name).experts.parameters()

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Tokens, or what the layer before hands on -> logits, or what the next layer takes."""
        context = context or Context.of(x)
        for name in self.names:
            x = self.layer(name)(x, context)
        return x


def _key(name: str) -> str:
    """Module names hold no dots."""
    return name.replace(".", "_")


def _module(layer: Layer, facts: Numerics) -> nn.Module:
    if layer.kind == "embedding":
        return Embedding(facts)
    if layer.kind == "norm":
        return FinalNorm("layer" if facts.positions else "rms", facts)
    if layer.kind == "head":
        return Head(facts)
    if type(layer.shape) not in _MODULES:
        raise InputError(f"{layer.name} is {layer.kind}, which cannot be trained yet", field="model")
    return _MODULES[type(layer.shape)](layer.shape, facts)


def build(model: Model, layers: Sequence[Layer] | None = None, *, seed: int = 0, device: str = "cpu") -> Decoder:
    """A decoder with fresh weights, which depend on the seed and the layer's name only, not on how the chain is cut.

    >>> decoder = build(Model.preset("tiny-llama"))
    >>> decoder(torch.zeros(1, 8, dtype=torch.long)).shape
    torch.Size([1, 8, 512])
    """
    facts = numerics(model)
    with torch.device(device):
        decoder = Decoder(model.layers if layers is None else layers, facts)
    initialise(decoder, facts.initializer, seed)
    return decoder


@torch.no_grad()
def initialise(decoder: Decoder, deviation: float, seed: int) -> None:
    """Norms are one, biases nothing, all else is drawn anew, each parameter from a stream of its own."""
    for name in decoder.names:
        for part, module in decoder.layer(name).named_modules():
            for kind, weight in module.named_parameters(recurse=False):
                if kind == "bias":
                    weight.zero_()
                elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
                    weight.fill_(1.0)
                elif not (isinstance(module, Head) and decoder.tied):
                    stream = torch.Generator("cpu").manual_seed(zlib.crc32(f"{seed} {name} {part} {kind}".encode()))
                    weight.copy_(torch.randn(weight.shape, generator=stream) * deviation)
