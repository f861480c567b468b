"""A decoder as a plan's chain of layers: a module for every layer, by the layer's name."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from meshwright.errors import InputError
from meshwright.models import Layer, Model
from meshwright.models.attention import Attention, LatentAttention
from meshwright.models.feed_forward import Mlp, Moe
from meshwright.run.kernels.cross_entropy import linear_loss
from meshwright.run.memory.checkpointing import Keeper
from meshwright.run.models.attention.attention import GroupedAttention, MultiLatentAttention
from meshwright.run.models.context import Context
from meshwright.run.models.feed_forward import FeedForward
from meshwright.run.models.linear import Product, norm
from meshwright.run.models.mixture import Mixture
from meshwright.run.models.numerics import Numerics, numerics

_MODULES: dict[type, Callable[[Any, Numerics], nn.Module]] = {
    Attention: GroupedAttention, LatentAttention: MultiLatentAttention, Mlp: FeedForward, Moe: Mixture,
}  # fmt: skip


class Embedding(nn.Module):
    """Embedding of tokens, and of learned positions if a model has them; the table may hold a part of the vocabulary."""

    def __init__(self, numerics: Numerics) -> None:
        super().__init__()
        self.vocabulary = numerics.vocab
        self.layer_name, self.dropout = "", numerics.embedding_dropout
        self.first = 0  # first row of the own part in the whole table
        self.tokens = nn.Embedding(numerics.vocab, numerics.hidden)
        self.positions = nn.Embedding(numerics.positions, numerics.hidden) if numerics.positions else None

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        mesh, table = context.mesh, self.tokens.weight
        if mesh.tp.size == 1:
            found = functional.embedding(tokens, table)
        else:
            at = tokens - self.first
            mine = (at >= 0) & (at < len(table))
            found = mesh.leave(functional.embedding(at.where(mine, 0), table) * mine.unsqueeze(-1))
        if self.positions is not None:
            places = context.positions
            found = found + self.positions(places.chunk(mesh.tp.size, dim=1)[mesh.tp.rank] if mesh.sp else places)
        return context.dropped(found, self.layer_name, self.dropout) if self.dropout else found


class FinalNorm(nn.Module):
    """The norm after the last block."""

    def __init__(self, kind: str, numerics: Numerics) -> None:
        super().__init__()
        self.norm = norm(kind, numerics.hidden, numerics)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        found: Tensor = self.norm(x)
        return found


class Head(nn.Module):
    """Projection to the vocabulary, or a part of it."""

    weight: Tensor

    def __init__(self, numerics: Numerics) -> None:
        super().__init__()
        self.vocabulary = numerics.vocab
        self.first = 0  # first token of the own part of the vocabulary
        self.weight = nn.Parameter(torch.empty(numerics.vocab, numerics.hidden))

    def forward(self, x: Tensor, context: Context, targets: Tensor | None = None) -> Tensor:
        """Return logits, or the sum of losses if targets are given: then the whole logits never exist."""
        x = context.mesh.enter(x)
        return (
            functional.linear(x, self.weight)
            if targets is None
            else linear_loss(x, self.weight, targets, context.mesh.tp, self.first, again=context.halved)
        )


class Decoder(nn.Module):
    """Consecutive layers of a model: all of them, or those of a pipeline stage."""

    def __init__(self, layers: Sequence[Layer], facts: Numerics) -> None:
        super().__init__()
        self.names = [layer.name for layer in layers]
        self.hidden = facts.hidden
        self.layers = nn.ModuleDict({_key(layer.name): _module(layer, facts) for layer in layers})
        self.tied = False
        # A weight that belongs to another layer has that layer's name wherever it is used.
        self.aliases = {f"{layer.name}.weight": f"{layer.tied_to}.tokens.weight" for layer in layers if layer.tied_to}
        for layer in layers:
            self.layer(layer.name).layer_name = layer.name
            if layer.tied_to in self.names:  # both layers are here and share one parameter
                self.layer(layer.name).weight = self.layer(layer.tied_to).tokens.weight
                self.tied = True
        # Layers that keep only their input, with those that follow them in a block (`recompute`).
        self.whole: dict[str, tuple[str, ...]] = {}
        self.inside: frozenset[str] = frozenset()
        self.keepers: dict[str, Keeper] = {}  # for those inputs, by the first layer

    def layer(self, name: str) -> Any:
        """Return the module of a layer."""
        return self.layers[_key(name)]

    def named(self) -> Iterator[tuple[str, Any, str]]:
        """Yield every parameter and saved buffer once: its name under every plan, its module, its name there."""
        for name in self.names:
            for part, module in self.layer(name).named_modules():
                kept = [kind for kind, _ in module.named_parameters(recurse=False)]
                kept += [kind for kind, _ in module.named_buffers(recurse=False) if kind in module.state_dict()]
                for kind in kept:
                    key = ".".join(filter(None, (name, part, kind)))
                    if not (self.tied and key in self.aliases):
                        yield self.aliases.get(key, key), module, kind

    def products(self) -> Iterator[tuple[str, Product]]:
        """Yield matrix products of the blocks by name: those of attention and dense feed-forward networks."""
        for name in self.names:
            for part, module in self.layer(name).named_children():
                if isinstance(module, Product):
                    yield f"{name}.{part}", module

    def adapt(self, rank: int) -> None:
        """Add trained adapters of rank `rank` to the products, and freeze everything else."""
        self.requires_grad_(False)
        for _, product in self.products():
            product.adapt(rank)

    def experts(self) -> Iterator[Tensor]:
        """Yield parameters of routed experts, whose replicas are on other ranks than those of the rest."""
        for name in self.names:
            if isinstance(self.layer(name), Mixture):
                yield from self.layer(name).experts.parameters()

    def forward(self, x: Tensor, context: Context | None = None, targets: Tensor | None = None) -> Tensor:
        """Return logits from tokens, or a stage's output from that of the previous stage.

        With `targets` of (batch, own tokens) the head returns the sum of their losses instead of logits.
        """
        context = context or Context.of(x)
        for name, layer in zip(self.names, self.layers.values(), strict=True):
            if name in self.inside:  # a block that is run again as a whole
                continue
            if name in self.whole:
                x = self._repeated(x, context, self.whole[name])
            elif name == "head":
                x = layer(x, context, targets)
            else:
                x = layer(x, context)
        return x

    def _repeated(self, x: Tensor, context: Context, names: Sequence[str]) -> Tensor:
        """Run a block that is recomputed from its input, wherever that is kept until then."""
        keeper, needs = self.keepers.get(names[0]), x.requires_grad
        if keeper is None or not torch.is_grad_enabled():
            return checkpoint(self._block, x, context, names, use_reentrant=False)
        kept, given = keeper.pack(x.detach()), [x]

        def block() -> Tensor:
            x = given.pop() if given else keeper.unpack(kept).detach().requires_grad_(needs)
            return self._block(x, context, names)

        found: Tensor = checkpoint(block, use_reentrant=False)
        return found

    def _block(self, x: Tensor, context: Context, names: Sequence[str]) -> Tensor:
        for name in names:
            x = self.layer(name)(x, context)
        return x


def _key(name: str) -> str:
    """Return a name without dots, as module names need."""
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


def build(
    model: Model, layers: Sequence[Layer] | None = None, *, seed: int = 0, device: str = "cpu", lora: int = 0
) -> Decoder:
    """Return a decoder with fresh weights, which depend only on the seed and the layer's name, not on the sharding.

    >>> decoder = build(Model.preset("tiny-llama"))
    >>> decoder(torch.zeros(1, 8, dtype=torch.long)).shape
    torch.Size([1, 8, 512])
    """
    facts = numerics(model)
    with torch.device(device):
        decoder = Decoder(model.layers if layers is None else layers, facts)
    if lora:
        decoder.adapt(lora)
    with torch.no_grad():
        for key, module, kind in decoder.named():
            weight = getattr(module, kind)
            weight.copy_(fresh(key, weight.shape, facts.initializer, seed))
    return decoder


def fresh(key: str, shape: Sequence[int], deviation: float, seed: int) -> Tensor:
    """Return the initial value of a parameter: norms are one, biases zero, others from a random stream of their own.

    An adapter adds nothing at first: B is zero, and A is scaled so that `x A^T` is as large as x.

    >>> fresh("norm.norm.weight", (2,), 0.02, 0)
    tensor([1., 1.])
    """
    if key.endswith((".bias", ".correction", ".lora.b")):
        return torch.zeros(*shape)
    if len(shape) == 1:
        return torch.ones(*shape)
    stream = torch.Generator("cpu").manual_seed(zlib.crc32(f"{seed} {key}".encode()))
    return torch.randn(*shape, generator=stream) * (shape[-1] ** -0.5 if key.endswith(".lora.a") else deviation)
