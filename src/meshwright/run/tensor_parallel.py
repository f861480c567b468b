"""Tensor parallelism: every member keeps some heads, some of the inner width, some of the vocabulary.

Cuts are those that the cost model counts: columns of what enters a layer, rows of what leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.run.collectives import Line
from meshwright.run.lane import Lane
from meshwright.run.models.attention import GroupedAttention
from meshwright.run.models.decoder import Decoder, Embedding, FinalNorm, Head
from meshwright.run.models.feed_forward import FeedForward
from meshwright.run.models.mixture import Mixture


def cut(decoder: Decoder, lane: Lane) -> None:
    """Keep this member's part of every layer."""
    for name in decoder.names:
        module = decoder.layer(name)
        if isinstance(module, Mixture):
            _cut_mixture(module, lane, name)
        elif lane.tp.size == 1:
            continue
        elif isinstance(module, GroupedAttention):
            _cut_attention(module, lane.tp, name)
        elif isinstance(module, FeedForward):
            _cut_rows(module.up, lane.tp, [module.shape.width] * (2 if module.shape.gated else 1), name)
            _cut_columns(module.down, lane.tp)
        elif isinstance(module, Embedding):
            _cut_rows(module.tokens, lane.tp, [len(module.tokens.weight)], name)
        elif isinstance(module, Head) and not decoder.tied:
            _cut_rows(module, lane.tp, [len(module.weight)], name)
        elif not isinstance(module, FinalNorm | Head):
            raise InputError(f"{name} cannot be cut by tensor parallelism yet", field="tp", valid="1")
    if decoder.tied:
        decoder.layer("head").weight = decoder.layer("embed").tokens.weight


def _cut_mixture(module: Mixture, lane: Lane, name: str) -> None:
    """Some of the experts, and of each some of its width; of the shared ones as of a dense layer."""
    width, own = module.shape.width, module.experts
    if module.shape.experts % lane.ep.size or width % lane.etp.size:
        raise InputError(f"{module.shape.experts} experts of width {width} in {name} do not divide", field="ep, etp")
    ups = [part.chunk(lane.etp.size, dim=1)[lane.etp.rank] for part in own.up.split(width, dim=1)]
    down = own.down.chunk(lane.etp.size, dim=2)[lane.etp.rank]
    for kind, weight in (("up", torch.cat(ups, dim=1)), ("down", down)):
        mine = weight.chunk(lane.ep.size)[lane.ep.rank]
        setattr(own, kind, nn.Parameter(mine.detach().clone()))
    if module.shape.shared_width and lane.tp.size > 1:
        _cut_rows(module.shared_up, lane.tp, [module.shape.shared_width] * 2, name)
        _cut_columns(module.shared_down, lane.tp)


def _cut_attention(module: GroupedAttention, line: Line, name: str) -> None:
    shape = module.shape
    if shape.heads % line.size or shape.kv_heads % line.size:
        raise InputError(
            f"{line.size} does not divide {shape.heads} heads and {shape.kv_heads} of keys in {name}", field="tp"
        )
    _cut_rows(module.qkv, line, module.parts, name)
    _cut_columns(module.proj, line)
    module.parts = tuple(part // line.size for part in module.parts)


def _cut_rows(module: nn.Module, line: Line, parts: Sequence[int], name: str) -> None:
    """Of every part that stands below the others in one weight, the own piece."""
    if any(part % line.size for part in parts):
        raise InputError(f"{line.size} does not divide {parts[0]} rows of {name}", field="tp")
    for kind, weight in list(module.named_parameters(recurse=False)):
        pieces = [part.chunk(line.size)[line.rank] for part in weight.split(list(parts))]
        setattr(module, kind, nn.Parameter(torch.cat(pieces).detach().clone()))


def _cut_columns(module: nn.Linear, line: Line) -> None:
    module.weight = nn.Parameter(module.weight.chunk(line.size, dim=1)[line.rank].detach().clone())


def partial(decoder: Decoder, lane: Lane) -> Iterator[Tensor]:
    """Parameters that every member holds whole but sees only some heads or tokens of: gradients are summed."""
    for name in decoder.names if lane.tp.size > 1 else []:
        module = decoder.layer(name)
        found: list[nn.Module | Tensor | None] = []
        if isinstance(module, GroupedAttention):
            found = [module.q_norm, module.k_norm, *([module.norm, module.proj.bias] if lane.sp else [])]
        elif lane.sp and isinstance(module, FeedForward):
            found = [module.norm, module.down.bias]
        elif isinstance(module, Mixture):
            found = [module.router, getattr(module, "descend", None), getattr(module, "ascend", None)]
            found += [module.norm, getattr(module, "shared_gate", None)] if lane.sp else []
        elif lane.sp and isinstance(module, Embedding):
            found = [module.positions]
        elif lane.sp and isinstance(module, FinalNorm):
            found = [module.norm]
        for part in found:
            if part is not None:
                yield from [part] if isinstance(part, Tensor) else part.parameters()
