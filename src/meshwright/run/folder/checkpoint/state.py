"""The training state as PyTorch's distributed checkpoint takes it: pieces of whole tensors, by name.

Pieces are boxes of the whole tensor, so that a checkpoint written under one plan is read under any other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from meshwright.run.mesh.shards import Box
from meshwright.run.parallel.parallel_model import Parallel


class Pieces:
    """Boxes of one whole tensor, with the method names that PyTorch's planner calls."""

    def __init__(self, shape: tuple[int, ...], parts: list[tuple[Box, Tensor]]) -> None:
        self.shape, self.parts = shape, parts

    def copied(self) -> Pieces:
        """Return a copy in host memory, so that training may go on."""
        return Pieces(self.shape, [(box, part.detach().to("cpu", copy=True)) for box, part in self.parts])

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        found = []
        for chunk, (_, part) in zip(self.__create_chunk_list__(), self.parts, strict=True):
            facts = TensorWriteData(chunk, TensorProperties.create_from_tensor(part), torch.Size(self.shape))
            found.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=facts))
        return found

    def __create_chunk_list__(self) -> list[Any]:
        return [
            ChunkStorageMetadata(torch.Size([low for low, _ in box]), torch.Size([high - low for low, high in box]))
            for box, _ in self.parts
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        # A rank may read one box twice, for two copies: the number of the part tells which.
        likely = self.parts[index.index : index.index + 1] if index.index is not None else []
        for box, part in [*likely, *self.parts]:
            if tuple(low for low, _ in box) == tuple(index.offset):
                return part
        raise KeyError(index)


class Saver(dcp.DefaultSavePlanner):
    """Save planner that finds pieces where PyTorch looks for tensors."""

    def lookup_object(self, index: Any) -> Any:
        return _piece(self.state_dict, index)


class Loader(dcp.DefaultLoadPlanner):
    """Load planner that finds pieces where PyTorch looks for tensors."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({}, metadata, is_coordinator)  # PyTorch's own preparation handles tensors only
        self.state_dict = self.original_state_dict = state_dict

    def lookup_tensor(self, index: Any) -> Any:
        return _piece(self.state_dict, index)


def _piece(state: Any, index: Any) -> Tensor:
    found: Pieces = state[index.fqn]
    return found.__get_tensor_shard__(index)


# A parameter and its optimizer states, by the identity of the parameter.
States = dict[int, tuple[Tensor, dict[str, Tensor]]]


def states_of(part: Parallel, optimizer: Any) -> States:
    """Return the states of every trained parameter, read once: an optimizer may return copies."""
    weights = {id(own.weight): own.weight for own in part.copies.own.values() if own.weight.requires_grad}
    return {key: (weight, optimizer.states(weight)) for key, weight in weights.items()}


def state_of(part: Parallel, states: States, *, once: bool) -> dict[str, Pieces]:
    """Return this rank's weights and optimizer states by name; with `once`, without pieces that another rank writes."""
    found: dict[str, Pieces] = {}
    for piece, own in part.copies.own.items():
        if once and piece not in part.copies.counted:
            continue
        layout, kept = own.span.layouts[piece.key], dict(states[id(own.weight)][1]) if id(own.weight) in states else {}
        # The float32 copy of a 16-bit weight is the model: a sharded plan has no other.
        tensors = {"model": kept.pop("master", own.weight.detach())}
        tensors |= {f"optimizer.{name}": state for name, state in kept.items()}
        for name, tensor in tensors.items():
            view = list(layout.pieces(tensor, own.weight))[own.place]
            found.setdefault(f"{name}.{piece.key}", Pieces(layout.shape, [])).parts.append(view)
    return found
