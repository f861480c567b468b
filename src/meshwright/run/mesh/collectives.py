"""Collectives that gradients pass through. On an axis of one rank they do nothing.

A pair of them brackets every sharded region: a gather in the forward pass is a scatter in the backward pass, and the
other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class AxisGroup:
    """Ranks along one axis of a mesh, as one of them sees it."""

    size: int = 1
    rank: int = 0
    group: Any = None  # process group; None if there is one rank


ALONE = AxisGroup()
scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _gathered(x: Tensor, axis: AxisGroup, dim: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(axis.size)]
    dist.all_gather(parts, x.contiguous(), group=axis.group)
    return torch.cat(parts, dim=dim)


def _summed(x: Tensor, axis: AxisGroup) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=axis.group)
    return total


def _scattered(x: Tensor, axis: AxisGroup, dim: int) -> Tensor:
    """Return this rank's piece of the sum: a reduce-scatter."""
    pieces = [piece.contiguous() for piece in x.chunk(axis.size, dim=dim)]
    found = torch.empty_like(pieces[0])
    scatter_tensor(found, torch.cat(pieces), group=axis.group)
    return found


def _exchanged(x: Tensor, axis: AxisGroup, cut: int, join: int) -> Tensor:
    pieces = torch.stack(x.chunk(axis.size, dim=cut)).contiguous()
    found = torch.empty_like(pieces)
    dist.all_to_all_single(found, pieces, group=axis.group)
    return torch.cat(found.unbind(), dim=join)


def _shifted(x: Tensor, axis: AxisGroup, by: int) -> Tensor:
    """Receive from the rank `by` positions before, in a ring."""
    x = x.contiguous()
    found = torch.empty_like(x)
    there, here = ((axis.rank + step) % axis.size for step in (by, -by))
    work = [
        dist.P2POp(dist.isend, x, group=axis.group, group_peer=there),
        dist.P2POp(dist.irecv, found, group=axis.group, group_peer=here),
    ]
    for one in dist.batch_isend_irecv(work):
        one.wait()
    return found


class _Pair(torch.autograd.Function):
    """Autograd function with one collective forward and another backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Any, back: Any) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def _through(x: Tensor, axis: AxisGroup, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply one collective forward and one backward; return x unchanged on an axis of one rank."""
    found: Tensor = x if axis.size == 1 else _Pair.apply(x, there, back)
    return found


def copied(x: Tensor, axis: AxisGroup) -> Tensor:
    """Return x, which is equal on all ranks; its gradients are all-reduced."""
    return _through(x, axis, lambda t: t.view_as(t), lambda g: _summed(g, axis))


def summed(x: Tensor, axis: AxisGroup) -> Tensor:
    """Return the all-reduced x; each rank gets the gradient of the sum."""
    return _through(x, axis, lambda t: _summed(t, axis), lambda g: g)


def gathered(x: Tensor, axis: AxisGroup, dim: int) -> Tensor:
    """Return the all-gathered x; gradients are reduce-scattered."""
    return _through(x, axis, lambda t: _gathered(t, axis, dim), lambda g: _scattered(g, axis, dim))


def scattered(x: Tensor, axis: AxisGroup, dim: int) -> Tensor:
    """Reduce-scatter: return this rank's piece of the sum; gradients are all-gathered."""
    return _through(x, axis, lambda t: _scattered(t, axis, dim), lambda g: _gathered(g, axis, dim))


def exchanged(x: Tensor, axis: AxisGroup, cut: int, join: int) -> Tensor:
    """Exchange by all-to-all: send a piece along one dimension to every rank, and join received ones along another."""
    return _through(x, axis, lambda t: _exchanged(t, axis, cut, join), lambda g: _exchanged(g, axis, join, cut))


def shifted(x: Tensor, axis: AxisGroup) -> Tensor:
    """Receive from the previous rank of a ring."""
    return _through(x, axis, lambda t: _shifted(t, axis, 1), lambda g: _shifted(g, axis, -1))


def parted(x: Tensor, axis: AxisGroup, dim: int) -> Tensor:
    """Return this rank's piece of a tensor that is equal on all ranks; each gets the whole gradient."""
    return _through(x, axis, lambda t: _piece(t, axis, dim), lambda g: _gathered(g, axis, dim))


def joined(x: Tensor, axis: AxisGroup, dim: int) -> Tensor:
    """Return the all-gathered x, equal on all ranks. Its gradient is equal too, so each rank takes its piece."""
    return _through(x, axis, lambda t: _gathered(t, axis, dim), lambda g: _piece(g, axis, dim))


def _piece(x: Tensor, axis: AxisGroup, dim: int) -> Tensor:
    return x.chunk(axis.size, dim=dim)[axis.rank].contiguous()


def most(count: int, axis: AxisGroup, device: torch.device) -> int:
    """Return the largest count of all ranks."""
    if axis.size == 1:
        return count
    found = torch.tensor(count, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=axis.group)
    return int(found)


def dispatched(x: Tensor, axis: AxisGroup, sent: list[int], received: list[int]) -> Tensor:
    """Exchange rows by all-to-all, with a count for each rank; received rows are concatenated."""

    def there(t: Tensor, out: list[int], back: list[int]) -> Tensor:
        found = t.new_empty(sum(back), *t.shape[1:])
        dist.all_to_all_single(found, t.contiguous(), back, out, group=axis.group)
        return found

    return _through(x, axis, lambda t: there(t, sent, received), lambda g: there(g, received, sent))
