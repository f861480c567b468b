"""Gather whole parameters from the shards of all ranks, one at a time."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.models import Model
from meshwright.run.folder.checkpoint.huggingface import Writer, of_adapter
from meshwright.run.models.linear import merged
from meshwright.run.parallel.parallel_model import Parallel


@torch.no_grad()
def write_whole(model: Model, part: Parallel, folder: str | Path) -> None:
    """Write the model as transformers reads it. The first rank holds one file's worth at a time."""
    keys = dict.fromkeys(part.copies.keys)
    own = [key for key in keys if not of_adapter(key)]
    if part.copies.rank:
        for key in own:
            _merged(part, key, keys)
        return
    with Writer(model, folder) as writer:
        for key in own:
            whole = _merged(part, key, keys)
            assert whole is not None
            writer.add(key, whole)


def _merged(part: Parallel, key: str, keys: Container[str]) -> Tensor | None:
    """Return a whole parameter on the first rank, with its adapter merged."""
    whole, product = gathered(part, key), key.removesuffix(".weight")
    if product == key or f"{product}.lora.a" not in keys:
        return whole
    a, b = (gathered(part, f"{product}.lora.{name}") for name in "ab")
    return None if whole is None or a is None or b is None else merged(whole, a, b)


def gathered(part: Parallel, key: str) -> Tensor | None:
    """Return a whole parameter on the first rank; the others send their shards and return None.

    Parameters have the type of computation, whatever they are stored in; buffers are float32.
    """
    copies = part.copies
    kind = torch.float32 if key.endswith(".correction") else part.executor.like.dtype
    mine = {piece: own for piece, own in copies.own.items() if piece.key == key and piece in copies.counted}
    views = {
        piece: list(own.span.layouts[key].pieces(own.weight.detach()))[own.place][1]
        .to(copies.device, kind)
        .contiguous()
        for piece, own in mine.items()
    }
    if copies.rank:
        for view in views.values():
            dist.send(view, 0)
        return None
    pieces = [piece for piece in copies.standing if piece.key == key]
    shape = [max(piece.box[dim][1] for piece in pieces) for dim in range(len(pieces[0].box))]
    whole = torch.empty(shape, dtype=kind, device=copies.device)
    for piece in pieces:
        target = whole[tuple(slice(*interval) for interval in piece.box)]
        if piece in views:
            target.copy_(views[piece])
        else:
            arrived = torch.empty_like(target, memory_format=torch.contiguous_format)
            dist.recv(arrived, piece.rank)
            target.copy_(arrived)
    return whole
