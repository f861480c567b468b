"""Attention layers: multi-head, grouped, sliding, windowed, cross, and multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.models.layer import Kept, Layer, LayerKind, Op, Pairs, Weight
from meshwright.models.operators import NormKind, Place, dropout_mask, layer_input, matmul, norm, residual, rotary


@dataclass(frozen=True, slots=True)
class Attention:
    """Multi-head attention: MHA when kv_heads == heads, GQA or MQA below that."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    window: int = 0
    norm: NormKind = "rms"
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    score_dropout: float = 0.0
    rotary: bool = False
    relative_bias: int = 0  # learned bias entries per head, where this layer holds the table

    def layer(self, place: Place, *, cross: bool = False) -> Layer:
        kind: LayerKind = "cross_attention" if cross else "attention"
        reads = "encoder.norm" if cross else ""
        ops = self.ops(cross)
        return place.layer(kind, ops, self.hidden, heads=self.heads, kv_heads=self.kv_heads, reads=reads, shape=self)

    @lru_cache(maxsize=1024)  # noqa: B019 - the blocks of a model share one tuple of operators
    def ops(self, cross: bool = False) -> tuple[Op, ...]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ops = [layer_input(self.hidden), norm("norm", self.hidden, self.norm), self._project_qkv(q, kv)]
        if self.qk_norm:
            ops.append(self._norm_qk(q, kv))
        if self.rotary:
            ops.append(rotary(q + kv))
        pairs: Pairs = "causal" if self.causal and not cross else "full"
        keeps = core_keeps(q, self.heads, self.score_dropout)
        table = relative_table(self.relative_bias, self.heads)
        ops.append(
            Op("core", "attention", flops_per_pair=4.0 * q, pairs=pairs, window=self.window, weights=table, keeps=keeps)
        )
        mask = dropout_mask(self.hidden, self.dropout)
        ops.append(matmul("proj", q, self.hidden, bias=self.out_bias, cut="row", units=self.heads, keeps=mask))
        return (*ops, residual(self.hidden))

    def _project_qkv(self, q: int, kv: int) -> Op:
        """Return one matrix product for q, k and v.

        A cut keeps whole heads; beyond the number of k and v heads, it replicates them.
        """
        rows = self.hidden + int(self.qkv_bias)
        weights = (
            Weight(rows * q, "tensor", self.heads),
            Weight(rows * kv, "tensor", self.kv_heads),
            Weight(rows * kv, "tensor", self.kv_heads),
        )
        keeps = (
            Kept("q", q, scope="tensor"),
            Kept("k", kv, scope="tensor", heads=self.kv_heads),
            Kept("v", kv, scope="tensor", heads=self.kv_heads),
        )
        n = q + 2 * kv
        return Op(
            "qkv", "matmul", 2.0 * self.hidden * n, k=self.hidden, n=n, cut="column", weights=weights, keeps=keeps
        )

    def _norm_qk(self, q: int, kv: int) -> Op:
        """Return RMS norms over each head of q and k (Qwen3); their inputs are kept for the backward pass."""
        keeps = (
            Kept("unnormed_q", q, scope="tensor"),
            Kept("unnormed_k", kv, scope="tensor", heads=self.kv_heads),
            Kept("statistics", self.heads + self.kv_heads, dtype="fp32", scope="tensor"),
        )
        return Op(
            "qk_norm", "norm", scope="tensor", moves=2.0 * (q + kv), weights=(Weight(2 * self.head_dim),), keeps=keeps
        )


def relative_table(entries: int, heads: int) -> tuple[Weight, ...]:
    """Return a learned bias per head and relative position (T5, Swin)."""
    return (Weight(entries * heads, "tensor", heads),) if entries else ()


def core_keeps(context: int, heads: int, score_dropout: float) -> tuple[Kept, ...]:
    """Return the score matrices (5 a s^2 b bytes with dropout) or, if fused, one log-sum-exp per row."""
    keeps = [
        Kept("context", context, dtype="matmul", scope="tensor", needed_next=True),
        Kept("row_statistics", heads, dtype="fp32", scope="tensor", when="fused"),
        Kept("scores", per_pair=heads, scope="tensor", when="unfused"),
    ]
    if score_dropout:
        keeps.append(Kept("score_mask", per_pair=heads, dtype="byte", scope="tensor", when="unfused"))
        keeps.append(Kept("dropped_scores", per_pair=heads, scope="tensor", when="unfused"))
    return tuple(keeps)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024): q, k and v come from low-rank latents.

    The down-projections are small and whole on every tensor-parallel rank, as in Megatron-Core.
    """

    hidden: int
    heads: int
    q_rank: int  # 0: queries are projected directly
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool = False
    score_dropout: float = 0.0

    def layer(self, place: Place) -> Layer:
        return place.layer("attention", self.ops(), self.hidden, heads=self.heads, kv_heads=self.heads, shape=self)

    @lru_cache(maxsize=1024)  # noqa: B019
    def ops(self) -> tuple[Op, ...]:
        qk, v = self.heads * (self.nope_dim + self.rope_dim), self.heads * self.v_dim
        keeps = core_keeps(v, self.heads, self.score_dropout)
        core = Op("core", "attention", flops_per_pair=2.0 * (qk + v), pairs="causal", keeps=keeps)
        return (
            layer_input(self.hidden),
            norm("norm", self.hidden, "rms"),
            *self._queries(qk),
            *self._keys_and_values(qk, v),
            # Queries and keys are copied together from their rotated and unrotated parts.
            rotary(2 * qk),
            core,
            matmul("proj", v, self.hidden, bias=self.bias, cut="row", units=self.heads),
            residual(self.hidden),
        )

    def _queries(self, qk: int) -> list[Op]:
        kept = (Kept("q", qk, scope="tensor"),)
        if not self.q_rank:
            return [matmul("q", self.hidden, qk, units=self.heads, keeps=kept)]
        latent = (Kept("q_latent", self.q_rank),)
        return [
            matmul("q_down", self.hidden, self.q_rank, bias=self.bias, cut="none", keeps=latent),
            norm("q_norm", self.q_rank, "rms"),
            matmul("q_up", self.q_rank, qk, units=self.heads, keeps=kept),
        ]

    def _keys_and_values(self, qk: int, v: int) -> list[Op]:
        latent = (Kept("kv_latent", self.kv_rank + self.rope_dim),)
        kept = (Kept("k", qk, scope="tensor"), Kept("v", v, scope="tensor"))
        up = self.heads * (self.nope_dim + self.v_dim)
        return [
            matmul("kv_down", self.hidden, self.kv_rank + self.rope_dim, bias=self.bias, cut="none", keeps=latent),
            norm("kv_norm", self.kv_rank, "rms"),
            matmul("kv_up", self.kv_rank, up, units=self.heads, keeps=kept),
        ]
