"""Collectives that gradients pass through. Each is nothing where its axis has one member.

A pair of them brackets every cut: what gathers forward scatters backward, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Line:
    """The processes along one axis of a grid, as one of them sees it."""

    size: int = 1
    rank: int = 0
    group: Any = None  # a process group; None where there is one member


ALONE = Line()
scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _gathered(x: Tensor, line: Line, dim: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(line.size)]
    dist.all_gather(parts, x.contiguous(), group=line.group)
    return torch.cat(parts, dim=dim)


def _summed(x: Tensor, line: Line) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=line.group)
    return total


def _scattered(x: Tensor, line: Line, dim: int) -> Tensor:
    """The own piece of the sum."""
    pieces = [piece.contiguous() for piece in x.chunk(line.size, dim=dim)]
    found = torch.empty_like(pieces[0])
    scatter_tensor(found, torch.cat(pieces), group=line.group)
    return found


def _exchanged(x: Tensor, line: Line, cut: int, join: int) -> Tensor:
    pieces = torch.stack(x.chunk(line.size, dim=cut)).contiguous()
    found = torch.empty_like(pieces)
    dist.all_to_all_single(found, pieces, group=line.group)
    return torch.cat(found.unbind(), dim=join)


def _shifted(x: Tensor, line: Line, by: int) -> Tensor:
    """From the member `by` places before, in a ring."""
    x = x.contiguous()
    found = torch.empty_like(x)
    there, here = ((line.rank + step) % line.size for step in (by, -by))
    work = [
        dist.P2POp(dist.isend, x, group=line.group, group_peer=there),
        dist.P2POp(dist.irecv, found, group=line.group, group_peer=here),
    ]
    for one in dist.batch_isend_irecv(work):
        one.wait()
    return found


class _Pair(torch.autograd.Function):
    """One function forward, another one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Any, back: Any) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def _through(x: Tensor, line: Line, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """One way forward and one backward; nothing where there is one member."""
    found: Tensor = x if line.size == 1 else _Pair.apply(x, there, back)
    return found


def copied(x: Tensor, line: Line) -> Tensor:
    """The same on all members, whose gradients are summed."""
    return _through(x, line, lambda t: t.view_as(t), lambda g: _summed(g, line))


def summed(x: Tensor, line: Line) -> Tensor:
    """The sum over all members, each of whom gets its gradient."""
    return _through(x, line, lambda t: _summed(t, line), lambda g: g)


def gathered(x: Tensor, line: Line, dim: int) -> Tensor:
    """All pieces; gradients of a piece are summed."""
    return _through(x, line, lambda t: _gathered(t, line, dim), lambda g: _scattered(g, line, dim))


def scattered(x: Tensor, line: Line, dim: int) -> Tensor:
    """The own piece of the sum over all members."""
    return _through(x, line, lambda t: _scattered(t, line, dim), lambda g: _gathered(g, line, dim))


def exchanged(x: Tensor, line: Line, cut: int, join: int) -> Tensor:
    """All-to-all: a piece along one dimension to every member, their pieces joined along another."""
    return _through(x, line, lambda t: _exchanged(t, line, cut, join), lambda g: _exchanged(g, line, join, cut))


def shifted(x: Tensor, line: Line) -> Tensor:
    """What the member before has, in a ring."""
    return _through(x, line, lambda t: _shifted(t, line, 1), lambda g: _shifted(g, line, -1))


def parted(x: Tensor, line: Line, dim: int) -> Tensor:
    """The own piece of what all members have alike; all get the whole gradient."""
    return _through(x, line, lambda t: _piece(t, line, dim), lambda g: _gathered(g, line, dim))


def joined(x: Tensor, line: Line, dim: int) -> Tensor:
    """All pieces, which all members then have alike: of a gradient that is the same everywhere each takes its piece."""
    return _through(x, line, lambda t: _gathered(t, line, dim), lambda g: _piece(g, line, dim))


def _piece(x: Tensor, line: Line, dim: int) -> Tensor:
    return x.chunk(line.size, dim=dim)[line.rank].contiguous()


def most(count: int, line: Line, device: torch.device) -> int:
    """Return the largest count of all members."""
    if line.size == 1:
        return count
    found = torch.tensor(count, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=line.group)
    return int(found)


def dispatched(x: Tensor, line: Line, sent: list[int], received: list[int]) -> Tensor:
    """Rows to every member, so many each; what they send, one below the other."""

    def there(t: Tensor, out: list[int], back: list[int]) -> Tensor:
        found = t.new_empty(sum(back), *t.shape[1:])
        dist.all_to_all_single(found, t.contiguous(), back, out, group=line.group)
        return found

    return _through(x, line, lambda t: there(t, sent, received), lambda g: there(g, received, sent))
