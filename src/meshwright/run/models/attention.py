"""Attention layers: norm, projections, attention and the residual, as one link of the chain."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.model.attention import Attention, LatentAttention
from meshwright.run.models.attend import attend
from meshwright.run.models.context import Context
from meshwright.run.models.linear import Row
from meshwright.run.models.norms import norm
from meshwright.run.models.numerics import Numerics
from meshwright.run.models.rotary import frequencies, rotate


class GroupedAttention(nn.Module):
    """MHA, GQA and MQA; q, k and v in one product."""

    inverse: Tensor

    def __init__(self, shape: Attention, numerics: Numerics) -> None:
        super().__init__()
        self.shape = shape
        self.parts: tuple[int, ...] = _widths(shape)
        self.norm = norm(shape.norm, shape.hidden, numerics)
        self.qkv = nn.Linear(shape.hidden, sum(self.parts), bias=shape.qkv_bias)
        self.proj = Row(shape.heads * shape.head_dim, shape.hidden, bias=shape.out_bias)
        self.q_norm = norm("rms", shape.head_dim, numerics) if shape.qk_norm else None
        self.k_norm = norm("rms", shape.head_dim, numerics) if shape.qk_norm else None
        inverse, self.scale = frequencies(shape.head_dim, numerics.theta, numerics.rope)
        self.register_buffer("inverse", inverse, persistent=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        s = self.shape
        parts = self.qkv(context.lane.enter(self.norm(x))).split(list(self.parts), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, s.head_dim)) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if s.rotary:
            angles = context.positions.unsqueeze(-1) * self.inverse
            q, k = (rotate(part, angles, self.scale) for part in (q, k))
        return x + self.proj(attend(q, k, v, context, s.window).flatten(2), context.lane)


def _widths(shape: Attention) -> tuple[int, int, int]:
    """Of q, k and v in their one product."""
    kv = shape.kv_heads * shape.head_dim
    return shape.heads * shape.head_dim, kv, kv


class MultiLatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, 2024)."""

    inverse: Tensor

    def __init__(self, shape: LatentAttention, numerics: Numerics) -> None:
        super().__init__()
        self.shape, self.interleaved = shape, numerics.interleaved
        queries = shape.heads * (shape.nope_dim + shape.rope_dim)
        self.norm = norm("rms", shape.hidden, numerics)
        if shape.q_rank:
            self.q_down = nn.Linear(shape.hidden, shape.q_rank, bias=shape.bias)
            self.q_norm = norm("rms", shape.q_rank, numerics)
        self.q_up = nn.Linear(shape.q_rank or shape.hidden, queries, bias=False)
        self.kv_down = nn.Linear(shape.hidden, shape.kv_rank + shape.rope_dim, bias=shape.bias)
        self.kv_norm = norm("rms", shape.kv_rank, numerics)
        self.kv_up = nn.Linear(shape.kv_rank, shape.heads * (shape.nope_dim + shape.v_dim), bias=False)
        self.proj = Row(shape.heads * shape.v_dim, shape.hidden, bias=shape.bias)
        inverse, self.scale = frequencies(shape.rope_dim, numerics.theta, numerics.rope)
        self.register_buffer("inverse", inverse, persistent=False)
        self.softmax_scale = _softmax_scale(shape, numerics)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        s, h = self.shape, context.lane.enter(self.norm(x))
        q = self.q_up(self.q_norm(self.q_down(h)) if s.q_rank else h).unflatten(-1, (s.heads, -1))
        latent, turned = self.kv_down(h).split([s.kv_rank, s.rope_dim], dim=-1)
        k, v = self.kv_up(self.kv_norm(latent)).unflatten(-1, (s.heads, -1)).split([s.nope_dim, s.v_dim], dim=-1)
        angles = context.positions.unsqueeze(-1) * self.inverse
        plain, own = q.split([s.nope_dim, s.rope_dim], dim=-1)
        own, shared = (
            rotate(part, angles, self.scale, interleaved=self.interleaved) for part in (own, turned.unsqueeze(2))
        )
        q, k = torch.cat([plain, own], dim=-1), torch.cat([k, shared.expand(-1, -1, s.heads, -1)], dim=-1)
        return x + self.proj(attend(q, k, v, context, scale=self.softmax_scale).flatten(2), context.lane)


def _softmax_scale(shape: LatentAttention, numerics: Numerics) -> float:
    """YaRN sharpens the scores of longer sequences (`mscale_all_dim`)."""
    plain = float((shape.nope_dim + shape.rope_dim) ** -0.5)
    all_dim, factor = numerics.rope.get("mscale_all_dim"), float(numerics.rope.get("factor", 1.0))
    if not all_dim or factor <= 1:
        return plain
    return plain * float(0.1 * float(all_dim) * torch.log(torch.tensor(factor, dtype=torch.float64)) + 1.0) ** 2
