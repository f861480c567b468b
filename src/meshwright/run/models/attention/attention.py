"""Attention layers: norm, projections, attention and the residual stream, as one layer of the chain."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.models.attention import Attention, LatentAttention
from meshwright.run.kernels import split_turned, turned
from meshwright.run.memory.checkpointing import Keeper, operators
from meshwright.run.models.attention.dropout_attention import Drop
from meshwright.run.models.attention.sequence_parallel import attend
from meshwright.run.models.context import Context
from meshwright.run.models.linear import Product, Row, entered, norm
from meshwright.run.models.numerics import Numerics
from meshwright.run.models.rotary import Turns, halves


class GroupedAttention(nn.Module):
    """MHA, GQA and MQA; q, k and v are one matrix product."""

    def __init__(self, shape: Attention, numerics: Numerics) -> None:
        super().__init__()
        self.shape = shape
        self.parts: tuple[int, ...] = _widths(shape)
        self.norm = norm(shape.norm, shape.hidden, numerics)
        self.qkv = Product(shape.hidden, sum(self.parts), bias=shape.qkv_bias)
        self.proj = Row(shape.heads * shape.head_dim, shape.hidden, bias=shape.out_bias)
        self.q_norm = norm("rms", shape.head_dim, numerics) if shape.qk_norm else None
        self.k_norm = norm("rms", shape.head_dim, numerics) if shape.qk_norm else None
        self.turns = Turns.of(shape.head_dim, numerics.theta, numerics.rope) if shape.rotary else None
        self.layer_name = ""
        self.repeated: frozenset[str] = frozenset()
        self.keeper: Keeper | None = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        later = self.qkv.in_chunks(context.mesh)
        with operators(self) as run:
            normed, x = run("norm", partial(entered, norm=self.norm, mesh=context.mesh, later=later), x)
            q, k, v = run("qkv", partial(self._qkv, context=context), normed)
            if self.q_norm is not None:
                q, k = run("qk_norm", partial(self._normed, context=context), q, k)
            found = run("core", partial(self._core, context=context), q, k, v)
            return x + run("proj", partial(self._proj, context=context), found)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        drop = Drop(f"{self.layer_name}.core", self.shape.score_dropout)
        return attend(q, k, v, context, self.shape.window, drop=drop).flatten(2)

    def _proj(self, found: Tensor, context: Context) -> Tensor:
        return context.dropped(self.proj(found, context.mesh), f"{self.layer_name}.proj", self.shape.dropout)

    def _qkv(self, normed: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return heads of queries, keys and values; rotated, unless they are normed first."""
        size, later = self.shape.head_dim, self.qkv.in_chunks(context.mesh)
        product = self.qkv.entered(normed, context.mesh) if later else self.qkv(normed)
        heads = [part // size for part in self.parts]
        if self.turns is None or self.q_norm is not None:
            return product.unflatten(-1, (-1, size)).split(heads, dim=2)  # type: ignore[no-any-return]
        return split_turned(product, *context.turns(self.turns), heads, size)

    def _normed(self, q: Tensor, k: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None
        assert self.k_norm is not None
        q, k = self.q_norm(q), self.k_norm(k)
        if self.turns is None:
            return q, k
        cos, sin = context.turns(self.turns)
        return turned(q, cos, sin), turned(k, cos, sin)


def _widths(shape: Attention) -> tuple[int, int, int]:
    """Return the widths of q, k and v in their joint product."""
    kv = shape.kv_heads * shape.head_dim
    return shape.heads * shape.head_dim, kv, kv


class MultiLatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, 2024)."""

    def __init__(self, shape: LatentAttention, numerics: Numerics) -> None:
        super().__init__()
        self.shape, self.interleaved = shape, numerics.interleaved
        queries = shape.heads * (shape.nope_dim + shape.rope_dim)
        self.norm = norm("rms", shape.hidden, numerics)
        if shape.q_rank:
            self.q_down = Product(shape.hidden, shape.q_rank, bias=shape.bias)
            self.q_norm = norm("rms", shape.q_rank, numerics)
        self.q_up = Product(shape.q_rank or shape.hidden, queries, bias=False)
        self.kv_down = Product(shape.hidden, shape.kv_rank + shape.rope_dim, bias=shape.bias)
        self.kv_norm = norm("rms", shape.kv_rank, numerics)
        self.kv_up = Product(shape.kv_rank, shape.heads * (shape.nope_dim + shape.v_dim), bias=False)
        self.proj = Row(shape.heads * shape.v_dim, shape.hidden, bias=shape.bias)
        self.turns = Turns.of(shape.rope_dim, numerics.theta, numerics.rope)
        self.softmax_scale = _softmax_scale(shape, numerics)
        self.layer_name = ""
        self.repeated: frozenset[str] = frozenset()
        self.keeper: Keeper | None = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        s = self.shape
        with operators(self) as run:
            normed, x = run("norm", partial(entered, norm=self.norm, mesh=context.mesh), x)
            if s.q_rank:
                latent = run("q_norm", self.q_norm, run("q_down", self.q_down, normed))
            q = run(
                "q_up" if s.q_rank else "q", partial(self._queries, context=context), latent if s.q_rank else normed
            )
            latent, shared = run("kv_down", lambda t: self.kv_down(t).split([s.kv_rank, s.rope_dim], dim=-1), normed)
            latent = run("kv_norm", self.kv_norm, latent)
            k, v = run("kv_up", partial(self._keys, context=context), latent, shared)
            found = run("core", partial(self._core, context=context), q, k, v)
            return x + run("proj", lambda t: self.proj(t, context.mesh), found)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        drop = Drop(f"{self.layer_name}.core", self.shape.score_dropout)
        return attend(q, k, v, context, scale=self.softmax_scale, drop=drop).flatten(2)

    def _queries(self, latent: Tensor, context: Context) -> Tensor:
        s = self.shape
        plain, own = (
            self.q_up(latent).unflatten(-1, (-1, s.nope_dim + s.rope_dim)).split([s.nope_dim, s.rope_dim], dim=-1)
        )
        return torch.cat([plain, self._turned(own, context)], dim=-1)

    def _keys(self, latent: Tensor, shared: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return keys, of which a part is the same for all heads, and values."""
        s = self.shape
        k, v = self.kv_up(latent).unflatten(-1, (-1, s.nope_dim + s.v_dim)).split([s.nope_dim, s.v_dim], dim=-1)
        own = self._turned(shared.unsqueeze(2), context).expand(-1, -1, k.shape[2], -1)
        return torch.cat([k, own], dim=-1), v

    def _turned(self, x: Tensor, context: Context) -> Tensor:
        return turned(halves(x) if self.interleaved else x, *context.turns(self.turns))


def _softmax_scale(shape: LatentAttention, numerics: Numerics) -> float:
    """Return the scale of the softmax; YaRN sharpens the scores of longer sequences (`mscale_all_dim`)."""
    plain = float((shape.nope_dim + shape.rope_dim) ** -0.5)
    all_dim, factor = numerics.rope.get("mscale_all_dim"), float(numerics.rope.get("factor", 1.0))
    if not all_dim or factor <= 1:
        return plain
    return plain * (0.1 * float(all_dim) * math.log(factor) + 1.0) ** 2
