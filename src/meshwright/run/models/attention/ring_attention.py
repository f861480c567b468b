"""Causal ring attention (Liu et al., "Ring Attention", 2023), without a matrix of scores anywhere.

Every rank has one piece from the front of the sequence and one from the back (zig-zag). So in each step all ranks have
the same work, and no step needs a mask:

    keys of            my front sees    my back sees
    myself             causal           all before it
    a rank before      its front        its front
    a rank behind      nothing          both its pieces

Packed documents cut this into rectangles. At most one document is in two given pieces; all its tokens in the later
piece see all those in the earlier one.

Sending keys and values of the next step overlaps with this step's computation. In the backward pass they are sent
around once more, with their gradients, which arrive home after a whole round. Partial gradients follow from the outputs
and softmax sums of all steps together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.run.mesh.collectives import AxisGroup
from meshwright.run.torch_private import flash_backward, flash_forward

Bounds = Sequence[Sequence[int]]  # for every sample: starts of its documents, and the end of the last


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, axis: AxisGroup, scale: float, documents: Bounds | None = None
) -> Tensor:
    """Return attention of (batch, own tokens, head, dim); each head of keys and values may serve several of queries."""
    found: Tensor = _Ring.apply(q, k, v, axis, scale, documents)
    return found


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: AxisGroup, scale: float, documents: Bounds | None
    ) -> Tensor:
        width, padded = v.shape[-1], _wide(v, q.shape[-1])
        q_, kv = q.transpose(1, 2).contiguous(), torch.stack([k, padded]).transpose(2, 3).contiguous()
        out = torch.zeros_like(q_, dtype=torch.float32)
        total = torch.full(q_.shape[:3], -torch.inf, device=q.device)
        here = kv
        for step in range(axis.size):
            coming = _sent(here, axis) if step + 1 < axis.size else None
            for of, rows, keys, causal in _seen(axis, step, q_.shape[2], documents):
                kv_ = _repeated(here[:, of, :, keys], q_)
                some, weight = flash_forward(q_[of, :, rows].contiguous(), *kv_, causal, scale)
                _merge(out[of, :, rows], total[of, :, rows], some, weight)
            if coming is not None:
                here = _arrived(coming)
        ctx.save_for_backward(q_, kv, out.to(q.dtype), total)
        ctx.axis, ctx.scale, ctx.width, ctx.documents = axis, scale, width, documents
        return out[..., :width].transpose(1, 2).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, total = ctx.saved_tensors
        axis, shared = ctx.axis, q.shape[1] // kv.shape[2]
        d_out = _wide(grads[0], q.shape[-1]).transpose(1, 2).contiguous()
        dq = torch.zeros_like(q, dtype=torch.float32)
        here, d_here = kv, torch.zeros_like(kv, dtype=torch.float32)
        for step in range(axis.size):
            coming = _sent(here, axis) if step + 1 < axis.size else None
            for of, rows, keys, causal in _seen(axis, step, q.shape[2], ctx.documents):
                parts = [part[of, :, rows].contiguous() for part in (d_out, q, out, total)]
                some = _repeated(here[:, of, :, keys], q)
                dq_, dk, dv = flash_backward(parts[0], parts[1], *some, parts[2], parts[3], causal, ctx.scale)
                dq[of, :, rows] += dq_
                both = torch.stack([dk, dv]).float()
                d_here[:, of, :, keys] += both.unflatten(2, (-1, shared)).sum(dim=3)
            d_here = _arrived(_sent(d_here, axis)) if axis.size > 1 else d_here
            if coming is not None:
                here = _arrived(coming)
        dk, dv = d_here.transpose(2, 3).to(q.dtype)
        return dq.transpose(1, 2).to(q.dtype), dk, dv[..., : ctx.width], None, None, None


class _Rectangle(NamedTuple):
    """Rectangle of queries and keys: all pairs, or a causal mask."""

    samples: slice
    rows: slice
    keys: slice
    causal: bool


def _seen(axis: AxisGroup, step: int, tokens: int, documents: Bounds | None) -> Iterator[_Rectangle]:
    """Yield the rectangles of own queries and one rank's keys; without documents one rectangle."""
    source, half, every = (axis.rank - step) % axis.size, tokens // 2, slice(None)
    if documents is not None:
        for sample, bounds in enumerate(documents):
            yield from _documents(axis, source, half, slice(sample, sample + 1), bounds)
    elif source == axis.rank:
        yield _Rectangle(every, every, every, True)
    elif source < axis.rank:
        yield _Rectangle(every, every, slice(0, half), False)
    else:
        yield _Rectangle(every, slice(half, None), every, False)


def _documents(axis: AxisGroup, source: int, half: int, of: slice, bounds: Sequence[int]) -> Iterator[_Rectangle]:
    """Yield the rectangles of one sample's documents.

    Pieces are numbered along the sequence: a rank has one from the front and one from the back.
    """
    own, theirs = ((rank, 2 * axis.size - 1 - rank) for rank in (axis.rank, source))
    for (place, i), (other, j) in product(enumerate(own), enumerate(theirs)):
        first, last = i * half, (i + 1) * half
        here, there = place * half - first, other * half - j * half  # from positions in the sample to own positions
        if i == j:
            inside = [first, *(at for at in bounds if first < at < last), last]
            for low, high in pairwise(inside):
                yield _Rectangle(of, slice(here + low, here + high), slice(there + low, there + high), True)
        elif j < i:
            after = bisect_right(bounds, (j + 1) * half - 1)  # document of the last token in the earlier piece
            begin, end = bounds[after - 1], bounds[after]
            if end > first:
                keys = slice(there + max(begin, j * half), there + (j + 1) * half)
                yield _Rectangle(of, slice(here + first, here + min(end, last)), keys, False)


def _repeated(kv: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values for every head of queries."""
    k, v = kv.repeat_interleave(q.shape[1] // kv.shape[2], dim=2)
    return k.contiguous(), v.contiguous()


def _merge(out: Tensor, total: Tensor, some: Tensor, weight: Tensor) -> None:
    """Merge two softmaxes over different keys, by the logarithms of their sums."""
    both = torch.logaddexp(total, weight)
    out.mul_((total - both).exp().unsqueeze(-1)).add_(some * (weight - both).exp().unsqueeze(-1))
    total.copy_(both)


def _wide(x: Tensor, width: int) -> Tensor:
    """Pad heads of values: kernels want them as wide as those of keys (latent attention has narrower ones)."""
    return torch.nn.functional.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _sent(x: Tensor, axis: AxisGroup) -> tuple[Tensor, list[Any]]:
    """Send to the next rank, and receive from the previous one."""
    found = torch.empty_like(x)
    there, here = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    work = [
        dist.P2POp(dist.isend, x, group=axis.group, group_peer=there),
        dist.P2POp(dist.irecv, found, group=axis.group, group_peer=here),
    ]
    return found, dist.batch_isend_irecv(work)


def _arrived(coming: tuple[Tensor, list[Any]]) -> Tensor:
    for work in coming[1]:
        work.wait()
    return coming[0]
