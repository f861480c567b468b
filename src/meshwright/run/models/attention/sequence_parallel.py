"""Attention over tokens that are sharded over ranks: Ulysses, ring attention, or both (USP)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.run.mesh.collectives import AxisGroup, exchanged, shifted
from meshwright.run.models.attention.dropout_attention import NEVER, Drop, Pairs, dropped_block
from meshwright.run.models.attention.ring_attention import ring_attention
from meshwright.run.models.context import Context
from meshwright.run.torch_private import packed_attention

# On Hopper cuDNN's kernel is faster than FlashAttention 2 (docs/measurements.md); kernels that do not support a case
# are skipped.
_FASTEST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_Block = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]  # attention to the keys of a rank in the ring


def attend(
    q: Tensor, k: Tensor, v: Tensor, context: Context, window: int = 0, scale: float | None = None,
    drop: Drop | None = None,
) -> Tensor:  # fmt: skip
    """Return causal attention of (batch, own tokens, head, dim); heads of keys and values may serve several of queries.

    Ulysses (Jacobs et al., 2023) exchanges tokens for heads before and after it. In a ring (Liu et al., 2023) keys and
    values are sent around.
    """
    axis = context.mesh.ulysses
    if axis.size > 1:
        k, v = (_enough(part, axis.size) for part in (k, v))
        q, k, v = _to_heads((q, k, v), axis)
    if drop is not None and drop.rate and context.masks is not None:
        pairs = Pairs(context, window, drop, context.masks, q.shape[-1] ** -0.5 if scale is None else scale)
        # Dropout acts after the softmax over all keys, so partial softmaxes merge as they do without it.
        found = _in_turns(q, k, v, context.mesh.ring, partial(dropped_block, pairs=pairs)).to(v.dtype)
    else:
        found = (_ring if context.mesh.ring.size > 1 else _whole)(q, k, v, context, window, scale)
    return exchanged(found, axis, 1, 2) if axis.size > 1 else found


def _to_heads(parts: Sequence[Tensor], axis: AxisGroup) -> list[Tensor]:
    """Exchange own tokens of all heads for all tokens of own heads: queries, keys and values in one all-to-all."""
    mine = [part.unflatten(2, (axis.size, -1)).flatten(3) for part in parts]  # (batch, tokens, rank, width)
    joined = exchanged(torch.cat(mine, dim=3), axis, 2, 1).squeeze(2)
    own = joined.split([part.shape[3] for part in mine], dim=2)
    return [x.unflatten(2, (-1, part.shape[3])) for x, part in zip(own, parts, strict=True)]


def _enough(x: Tensor, members: int) -> Tensor:
    """Repeat heads if there are fewer than ranks."""
    return x.repeat_interleave(members // gcd(members, x.shape[2]), dim=2)


def _whole(q: Tensor, k: Tensor, v: Tensor, context: Context, window: int, scale: float | None) -> Tensor:
    if q.is_cuda and q.element_size() == 2 and (window or context.documents is not None):
        return _packed(q, k, v, context, window, scale)
    mask, shared = context.mask(window), q.shape[2] != k.shape[2]
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    with sdpa_kernel(_FASTEST, set_priority=True):
        found = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=shared
        )
    return found.transpose(1, 2)


def _packed(q: Tensor, k: Tensor, v: Tensor, context: Context, window: int, scale: float | None) -> Tensor:
    """Attend within each document, one after the other: a mask of all pairs would be the largest tensor of all."""
    flat = [part.flatten(0, 1) for part in (q, k, v)]
    seen = (window - 1 if window else -1, 0)
    found = packed_attention(flat[0], flat[1], flat[2], context.ends(), context.length, scale, seen)
    return found.reshape(*q.shape[:3], v.shape[3])


def _ring(q: Tensor, k: Tensor, v: Tensor, context: Context, window: int, scale: float | None) -> Tensor:
    """Attend in a ring with masks, and so with all scores of a step: sliding windows need them."""
    axis = context.mesh.ring
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not window and (not q.is_cuda or q.dtype != torch.float32):
        return ring_attention(q, k, v, axis, scale, context.documents_of_samples())

    def block(q: Tensor, k: Tensor, v: Tensor, source: int) -> tuple[Tensor, Tensor]:
        return _block(q, k, v, context.mask(window, source))

    return _in_turns(q * scale, k, v, axis, block).to(v.dtype)


def _in_turns(q: Tensor, k: Tensor, v: Tensor, axis: AxisGroup, block: _Block) -> Tensor:
    """Attend to own keys first, then to those of each previous rank; partial softmaxes are merged by their weights."""
    found, weight = block(q, k, v, axis.rank)
    for step in range(1, axis.size):
        k, v = shifted(k, axis), shifted(v, axis)
        more, other = block(q, k, v, (axis.rank - step) % axis.size)
        total = torch.logaddexp(weight, other)
        found = found * (weight - total).exp() + more * (other - total).exp()
        weight = total
    return found.transpose(1, 2)


def _block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (batch, head, query, dim) for one block of keys in float32, and the log of its softmax's sum."""
    repeats = q.shape[2] // k.shape[2]
    q, k, v = (part.transpose(1, 2).float() for part in (q, k, v))
    k, v = (part.repeat_interleave(repeats, dim=1) for part in (k, v))
    scores = q @ k.transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill(~mask, NEVER)
    weight = scores.logsumexp(dim=-1, keepdim=True)
    return (scores - weight).exp() @ v, weight
