"""The part of a whole tensor that a rank has.

Fresh weights, weights from files, checkpoints and all-reduces between differently sharded copies use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

Interval = tuple[int, int]  # first index, and one past the last
Box = tuple[Interval, ...]  # an interval in every dimension


@dataclass(frozen=True)
class Layout:
    """Boxes of a whole tensor, joined along one dimension.

    >>> Layout((6, 2), (((0, 1), (0, 2)), ((3, 4), (0, 2)))).of(torch.arange(12).view(6, 2))
    tensor([[0, 1],
            [6, 7]])
    """

    shape: tuple[int, ...]  # shape of the whole
    boxes: tuple[Box, ...]
    dim: int = 0

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Layout:
        """Return the layout of an unsharded tensor."""
        return Layout(shape, (tuple((0, size) for size in shape),))

    @staticmethod
    def rows(shape: tuple[int, ...], intervals: list[Interval], dim: int = 0) -> Layout:
        """Return the layout of intervals along one dimension, whole in the others."""
        every = [(0, size) for size in shape]
        return Layout(shape, tuple((*every[:dim], some, *every[dim + 1 :]) for some in intervals), dim)

    @property
    def local(self) -> tuple[int, ...]:
        """Shape of the local part."""
        sizes = [_size(box) for box in self.boxes]
        first = list(sizes[0])
        first[self.dim] = sum(size[self.dim] for size in sizes)
        return tuple(first)

    def of(self, whole: Tensor) -> Tensor:
        """Return the local part of a whole tensor."""
        return torch.cat([whole[_slices(box)] for box in self.boxes], dim=self.dim)

    def pieces(self, tensor: Tensor, cut_as: Tensor | None = None) -> Iterator[tuple[Box, Tensor]]:
        """Yield boxes of the whole with views of the local tensor, whose rows replicas may have sharded further.

        `cut_as` is the parameter whose row sharding applies to a tensor that is only the local part.
        """
        first, count = own_rows(tensor if cut_as is None else cut_as)
        mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        at = 0
        for box in self.boxes:
            size = list(_size(box))
            if self.dim == 0:  # boxes follow each other by rows
                low, high = max(first, at), min(first + count, at + size[0])
                if low < high:
                    rows = (box[0][0] + low - at, box[0][0] + high - at)
                    yield (rows, *box[1:]), mine[low - first : high - first]
                at += size[0]
            elif count:
                rows = (box[0][0] + first, box[0][0] + first + count)
                yield (rows, *box[1:]), mine.narrow(self.dim, at, size[self.dim])
                at += size[self.dim]


def own_rows(tensor: Tensor) -> tuple[int, int]:
    """Return the first row and number of rows of a tensor that replicas shard; all rows of a plain tensor."""
    if not isinstance(tensor, DTensor):
        return 0, tensor.shape[0]
    count = tensor.to_local().shape[0]
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            each = -(-tensor.shape[0] // tensor.device_mesh.size(dim))
            return min(each * tensor.device_mesh.get_local_rank(dim), tensor.shape[0]), count
    return 0, count


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes."""
    found = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return found if all(low < high for low, high in found) else None


def inside(box: Box, part: Box) -> tuple[slice, ...]:
    """Return the slices of a part within a box."""
    return tuple(slice(p[0] - b[0], p[1] - b[0]) for b, p in zip(box, part, strict=True))


def _size(box: Box) -> tuple[int, ...]:
    return tuple(high - low for low, high in box)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*interval) for interval in box)
