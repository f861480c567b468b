"""Attention with dropout of its probabilities: explicit scores, of one sample and some queries at a time.

Fused kernels draw masks of their own, which depend on the sharding of heads and tokens. Here a mask belongs to (head,
query, key) in the whole sample. No scores are kept: the backward pass recomputes them and the same masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.run.models.context import Context
from meshwright.run.models.dropout import Masks

NEVER = -1e30  # a masked score: finite, so that gradients are no NaN where a whole row is masked
_SCORES = 2**24  # scores that exist at a time


@dataclass(frozen=True)
class Drop:
    """Name of an attention layer, and the share of its probabilities that are dropped."""

    site: str
    rate: float


@dataclass(frozen=True)
class Pairs:
    """Pairs of own queries and keys: which are seen and which are dropped, by their positions in the whole sample."""

    context: Context
    window: int
    drop: Drop
    masks: Masks
    scale: float

    def seen(self, sample: int, rows: slice, source: int) -> Tensor:
        """Return True where a query sees a key of a rank in the ring: (query, key)."""
        mesh, documents = self.context.mesh, self.context.documents
        queries, keys = self._places(mesh.ring.rank)[rows], self._places(source)
        behind = queries[:, None] - keys[None, :]
        found = (behind >= 0) & (behind < self.window) if self.window else behind >= 0
        if documents is not None:
            found &= documents[sample][queries][:, None] == documents[sample][keys][None, :]
        return found

    def kept(self, sample: int, rows: slice, source: int, heads: int) -> Tensor:
        """Return True where a probability is kept: (own head, query, key)."""
        mesh, keys = self.context.mesh, self.context.keys(source)
        every = heads * mesh.tp.size * mesh.ulysses.size
        first = (mesh.tp.rank * mesh.ulysses.size + mesh.ulysses.rank) * heads
        queries = self._places(mesh.ring.rank)[rows]
        which = torch.arange(first, first + heads, device=queries.device) + (self.masks.first + sample) * every
        return self.masks.kept(self.drop.site, self.drop.rate, which, queries, keys)

    def _places(self, member: int) -> Tensor:
        device = self.context.positions.device
        return torch.cat([torch.arange(low, high, device=device) for low, high in self.context.keys(member)])


def dropped_block(q: Tensor, k: Tensor, v: Tensor, source: int, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return attention to the keys of a rank in the ring, and the log of its softmax's sum before dropout."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (part.repeat_interleave(repeats, dim=2) for part in (k, v))
    found: tuple[Tensor, Tensor] = _DroppedBlock.apply(*(part.transpose(1, 2) for part in (q, k, v)), source, pairs)
    return found


class _DroppedBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, source: int, pairs: Pairs) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v)
        ctx.source, ctx.pairs = source, pairs
        found = q.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float32)
        weight = q.new_empty(*q.shape[:3], 1, dtype=torch.float32)
        for sample, rows in _pieces(q, k):
            some = q[sample, :, rows], k[sample], v[sample]
            found[sample, :, rows], weight[sample, :, rows] = _attention(*some, sample, rows, source, pairs)
        return found, weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        sums = [torch.zeros_like(part, dtype=torch.float32) for part in (q, k, v)]
        for sample, rows in _pieces(q, k):
            some = [part.detach().requires_grad_() for part in (q[sample, :, rows], k[sample], v[sample])]
            with torch.enable_grad():
                made = _attention(some[0], some[1], some[2], sample, rows, ctx.source, ctx.pairs)
            more = torch.autograd.grad(made, some, [grad[sample, :, rows] for grad in grads])
            sums[0][sample, :, rows] = more[0]
            sums[1][sample] += more[1]
            sums[2][sample] += more[2]
        return *(total.to(part.dtype) for total, part in zip(sums, (q, k, v), strict=True)), None, None


def _pieces(q: Tensor, k: Tensor) -> Iterator[tuple[int, slice]]:
    """Samples, and so many queries of each that their scores stay few."""
    each = max(1, _SCORES // (q.shape[1] * k.shape[2]))
    for sample in range(len(q)):
        for first in range(0, q.shape[2], each):
            yield sample, slice(first, min(first + each, q.shape[2]))


def _attention(
    q: Tensor, k: Tensor, v: Tensor, sample: int, rows: slice, source: int, pairs: Pairs
) -> tuple[Tensor, Tensor]:
    """Return, for one sample, (head, query, dim) and (head, query, 1)."""
    scores = q.float() @ k.float().transpose(1, 2) * pairs.scale
    scores = scores.masked_fill(~pairs.seen(sample, rows, source), NEVER)
    weight = scores.logsumexp(dim=-1, keepdim=True)
    kept = pairs.kept(sample, rows, source, len(q))
    shares = torch.where(kept, (scores - weight).exp() * (1.0 / (1.0 - pairs.drop.rate)), 0.0)
    return shares @ v.float(), weight
