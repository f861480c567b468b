"""Tensor and expert parallelism: every member keeps some heads, some of the inner width, vocabulary and experts.

Cuts are those that the cost model counts: columns of what enters a layer, rows of what leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.run.mesh.collectives import AxisGroup
from meshwright.run.mesh.mesh import SpanMesh
from meshwright.run.mesh.shards import Interval, Layout
from meshwright.run.models.attention.attention import GroupedAttention, MultiLatentAttention
from meshwright.run.models.decoder import Decoder, Embedding, FinalNorm, Head
from meshwright.run.models.feed_forward import FeedForward
from meshwright.run.models.linear import Product, Row
from meshwright.run.models.mixture import Mixture

Shape = tuple[int, ...]


def cut(decoder: Decoder, mesh: SpanMesh, dtype: torch.dtype = torch.float32) -> dict[str, Layout]:
    """Keep this member's part of every layer, with parameters left to be filled; the part of each, by its name."""
    found: dict[str, Layout] = {}
    cuts = {name: _cuts(decoder.layer(name), mesh) for name in decoder.names}
    for key, module, kind in list(decoder.named()):
        weight = getattr(module, kind)
        whole = tuple(weight.shape)
        layer, own = _split(decoder, key)
        found[key] = cuts[layer].get(own) or Layout.whole(whole)
        if isinstance(weight, nn.Parameter):
            mine = torch.empty(found[key].local, dtype=dtype, device=weight.device)
            setattr(module, kind, nn.Parameter(mine, requires_grad=weight.requires_grad))
    for name in decoder.names:
        _tell(decoder.layer(name), mesh)
    if decoder.tied:
        decoder.layer("head").weight = decoder.layer("embed").tokens.weight
    return found


def _split(decoder: Decoder, key: str) -> tuple[str, str]:
    """Layer and name inside it; a head that is alone has the embedding's weights."""
    here = {shared: own for own, shared in decoder.aliases.items()} if not decoder.tied else {}
    key = here.get(key, key)
    layer = next(name for name in decoder.names if key.startswith(f"{name}."))
    return layer, key[len(layer) + 1 :]


def _cuts(module: Any, mesh: SpanMesh) -> dict[str, Layout]:
    """Parts of the parameters of a layer that are cut, by their names in it."""
    if isinstance(module, Mixture):
        return _mixture(module, mesh)
    if mesh.tp.size == 1:
        return {}
    if isinstance(module, GroupedAttention):
        return _attention(module, mesh.tp)
    if isinstance(module, MultiLatentAttention):
        return _latent(module, mesh.tp)
    if isinstance(module, FeedForward):
        parts = [module.shape.width] * (2 if module.shape.gated else 1)
        return _columns("down", module.down, mesh.tp) | _rows("up", module.up, _pieces(parts, mesh.tp))
    if isinstance(module, Embedding):
        return {"tokens.weight": _vocabulary(tuple(module.tokens.weight.shape), mesh.tp)}
    if isinstance(module, Head):
        return {"weight": _vocabulary(tuple(module.weight.shape), mesh.tp)}
    return {}


def _attention(module: GroupedAttention, axis: AxisGroup) -> dict[str, Layout]:
    """Whole heads; where there are more members than heads of keys, several have the same one."""
    shape = module.shape
    intervals = _pieces([module.parts[0]], axis)
    for first in (module.parts[0], module.parts[0] + module.parts[1]):
        heads = max(shape.kv_heads // axis.size, 1)
        at = first + axis.rank * shape.kv_heads // axis.size * shape.head_dim
        intervals.append((at, at + heads * shape.head_dim))
    return _rows("qkv", module.qkv, intervals) | _columns("proj", module.proj, axis)


def _latent(module: MultiLatentAttention, axis: AxisGroup) -> dict[str, Layout]:
    """Heads; what descends to the latents is small and whole on every member."""
    found = _columns("proj", module.proj, axis)
    for name, up in (("q_up", module.q_up), ("kv_up", module.kv_up)):
        found |= _rows(name, up, _pieces([up.out_features], axis))
    return found


def _mixture(module: Mixture, mesh: SpanMesh) -> dict[str, Layout]:
    """Some of the experts, and of each some of its width; of the shared ones as of a dense layer."""
    width, up, down = module.shape.width, tuple(module.experts.up.shape), tuple(module.experts.down.shape)
    (mine,) = _pieces([up[0]], mesh.ep)
    inner = _pieces([width, width], mesh.etp)
    found = {
        "experts.up": Layout(up, tuple((mine, rows, (0, up[2])) for rows in inner), dim=1),
        "experts.down": Layout(down, ((mine, (0, down[1]), inner[0]),)),
    }
    if module.shape.shared_width and mesh.tp.size > 1:
        parts = _pieces([module.shape.shared_width] * 2, mesh.tp)
        found |= _rows("shared_up", module.shared_up, parts) | _columns("shared_down", module.shared_down, mesh.tp)
    return found


def _pieces(parts: list[int], axis: AxisGroup) -> list[Interval]:
    """The own interval of each of several parts that lie below each other."""
    found, at = [], 0
    for part in parts:
        each = part // axis.size
        found.append((at + axis.rank * each, at + (axis.rank + 1) * each))
        at += part
    return found


def _rows(name: str, module: Product, intervals: list[Interval]) -> dict[str, Layout]:
    """Some outputs: rows of the weight, the bias and an adapter's B; its A is whole on every member."""
    parts = {kind: tuple(part.shape) for kind, part in module.named_parameters() if kind != "lora.a"}
    return {f"{name}.{kind}": Layout.rows(shape, intervals) for kind, shape in parts.items()}


def _columns(name: str, module: Product, axis: AxisGroup) -> dict[str, Layout]:
    """Some inputs: columns of the weight and an adapter's A; its B is whole on every member."""
    parts = {kind: tuple(part.shape) for kind, part in module.named_parameters() if kind in ("weight", "lora.a")}
    return {f"{name}.{kind}": Layout.rows(s, _pieces([s[1]], axis), dim=1) for kind, s in parts.items()}


def _vocabulary(shape: Shape, axis: AxisGroup) -> Layout:
    """Rows as even as they go: the last members may have fewer."""
    each = -(-shape[0] // axis.size)
    first = min(axis.rank * each, shape[0])
    return Layout.rows(shape, [(first, min(first + each, shape[0]))])


def _tell(module: Any, mesh: SpanMesh) -> None:
    """Modules that work with more than their parameters' shapes."""
    if isinstance(module, GroupedAttention):
        kv = max(module.shape.kv_heads // mesh.tp.size, 1) * module.shape.head_dim
        module.parts = (module.parts[0] // mesh.tp.size, kv, kv)
    elif isinstance(module, Embedding | Head):
        module.first = min(mesh.tp.rank * -(-module.vocabulary // mesh.tp.size), module.vocabulary)


@dataclass(frozen=True)
class Partial:
    """Rows of a parameter that several members hold alike but see only some heads or tokens of: gradients are summed."""

    weight: Tensor
    axis: AxisGroup
    first: int = 0  # row that they begin with


def partial(decoder: Decoder, mesh: SpanMesh) -> Iterator[Partial]:
    """Return the partial gradients of all parameters, in the order of the layers."""
    for name in decoder.names if mesh.tp.size > 1 else []:
        module = decoder.layer(name)
        for part in (*_partial(module, mesh), *_adapters(module)):
            if part is not None:
                for weight in [part] if isinstance(part, Tensor) else part.parameters():
                    yield Partial(weight, mesh.tp)
        if isinstance(module, GroupedAttention) and mesh.tp.size > module.shape.kv_heads:
            axis = mesh.sharers[mesh.tp.size // module.shape.kv_heads]  # of one head of keys and values
            for kind, weight in module.qkv.named_parameters():
                if kind != "lora.a":
                    yield Partial(weight, axis, module.parts[0])


def _adapters(module: nn.Module) -> Iterator[Tensor]:
    """Return the adapter parts that every member holds whole: each sees some outputs, or some inputs."""
    for name, product in module.named_children():
        if isinstance(product, Product) and product.lora is not None and name not in ("q_down", "kv_down"):
            yield product.lora.b if isinstance(product, Row) else product.lora.a


def _partial(module: Any, mesh: SpanMesh) -> list[nn.Module | Tensor | None]:
    found: list[nn.Module | Tensor | None] = []
    if isinstance(module, GroupedAttention):
        found = [module.q_norm, module.k_norm]
    elif isinstance(module, MultiLatentAttention):
        found = [module.kv_down, module.kv_norm, *([module.q_down, module.q_norm] if module.shape.q_rank else [])]
    elif isinstance(module, Mixture):
        found = [module.router, getattr(module, "descend", None), getattr(module, "ascend", None)]
    if not mesh.sp:
        return found
    if isinstance(module, Embedding):
        return [module.positions]
    if isinstance(module, GroupedAttention | MultiLatentAttention):
        return [*found, module.norm, module.proj.bias]
    if isinstance(module, FeedForward):
        return [module.norm, module.down.bias]
    if isinstance(module, Mixture):
        return [*found, module.norm, getattr(module, "shared_gate", None)]
    return [module.norm] if isinstance(module, FinalNorm) else []
