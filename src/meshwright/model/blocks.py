"""The parts transformers are built from, each as a `Layer` with its operators written out.

Widths are elements per token. What each operator keeps follows Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (2022): a matrix product keeps its input, a
norm keeps its input, an activation function keeps its input, a dropout keeps its mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from meshwright.model.layer import Kept, Layer, Op, Pairs, Scope, Weight

NormKind = Literal["layer", "rms"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer stands in the chain."""

    name: str
    block: str = ""
    opens_block: bool = True
    tokens: int = 0
    carried: float = 0.0


def matmul(
    name: str,
    k: int,
    n: int,
    *,
    bias: bool = False,
    cut: Literal["column", "row", "none"] = "column",
    units: int = 0,
    keeps: Sequence[Kept] = (),
    tied: bool = False,
) -> Op:
    """A dense layer. Column-cut biases are cut too, row-cut ones are whole on every rank (Megatron)."""
    if cut == "none":
        weights: tuple[Weight, ...] = (Weight(k * n + (n if bias else 0)),)
    else:
        inside = n if cut == "column" else k
        along = Weight(k * n + (n if bias and cut == "column" else 0), "tensor", units or inside)
        weights = (along, Weight(n)) if bias and cut == "row" else (along,)
    scope: Scope = "sequence" if cut == "none" else "tensor"
    return Op(name, "matmul", 2.0 * k * n, k=k, n=n, scope=scope, weights=weights, keeps=tuple(keeps), tied=tied)


def norm(
    name: str, width: int, kind: NormKind, *, bias: bool = True, per_token: int = 1, scope: Scope = "sequence"
) -> Op:
    """A norm keeps its statistics; its output is kept as the input of the next matrix product."""
    weights = Weight(width * (2 if kind == "layer" and bias else 1))
    statistics = Kept("statistics", per_token * (2 if kind == "layer" else 1), dtype="fp32", scope=scope)
    output = Kept("normed", per_token * width, dtype="matmul", scope=scope)
    return Op(name, "norm", scope=scope, weights=(weights,), keeps=(statistics, output))


def residual(width: int) -> Op:
    """The layer's input on the residual stream, which the norm needs again."""
    return Op("input", "elementwise", scope="sequence", keeps=(Kept("input", width),))


def dropout_mask(width: int, rate: float) -> tuple[Kept, ...]:
    return (Kept("dropout_mask", width, dtype="byte"),) if rate else ()


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
    norm_bias: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    score_dropout: float = 0.0
    relative_bias: int = 0  # learned bias entries per head, where this layer holds the table

    def layer(self, place: Place, *, cross: bool = False) -> Layer:
        return Layer(
            place.name, "cross_attention" if cross else "attention", self.ops(cross), self.hidden, place.block,
            place.opens_block, self.hidden, place.tokens, carried=place.carried, heads=self.heads, kv_heads=self.kv_heads,
        )  # fmt: skip

    @lru_cache(maxsize=1024)  # noqa: B019 - the blocks of a model share one tuple of operators
    def ops(self, cross: bool = False) -> tuple[Op, ...]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ops = [residual(self.hidden), norm("norm", self.hidden, self.norm, bias=self.norm_bias)]
        ops.append(self._project_qkv(q, kv))
        if self.qk_norm:
            # RMS over each head; the un-normed q and k stay for its backward.
            weights = (Weight(2 * self.head_dim),)
            unnormed = Kept("unnormed_qk", q + kv, scope="tensor")
            statistics = Kept("statistics", self.heads + self.kv_heads, dtype="fp32", scope="tensor")
            ops.append(Op("qk_norm", "norm", scope="tensor", weights=weights, keeps=(unnormed, statistics)))
        pairs: Pairs = "causal" if self.causal and not cross else "full"
        ops.append(
            Op(
                "core",
                "attention",
                flops_per_pair=4.0 * q,
                pairs=pairs,
                window=self.window,
                weights=relative_table(self.relative_bias, self.heads),
                keeps=core_keeps(q, self.heads, self.score_dropout),
            )
        )
        ops.append(
            matmul(
                "proj",
                q,
                self.hidden,
                bias=self.out_bias,
                cut="row",
                units=self.heads,
                keeps=dropout_mask(self.hidden, self.dropout),
            )
        )
        return tuple(ops)

    def _project_qkv(self, q: int, kv: int) -> Op:
        """One product for q, k and v; the cut keeps whole heads, and repeats k/v heads when tp outnumbers them."""
        bias = int(self.qkv_bias)
        weights = (
            Weight((self.hidden + bias) * q, "tensor", self.heads),
            Weight((self.hidden + bias) * kv, "tensor", self.kv_heads),
            Weight((self.hidden + bias) * kv, "tensor", self.kv_heads),
        )
        keeps = (Kept("q", q, scope="tensor"), Kept("k", kv, scope="tensor"), Kept("v", kv, scope="tensor"))
        n = q + 2 * kv
        return Op("qkv", "matmul", 2.0 * self.hidden * n, k=self.hidden, n=n, weights=weights, keeps=keeps)


def relative_table(entries: int, heads: int) -> tuple[Weight, ...]:
    return (Weight(entries * heads, "tensor", heads),) if entries else ()


def core_keeps(context: int, heads: int, score_dropout: float) -> tuple[Kept, ...]:
    """Either the score matrices (5 a s^2 b bytes with dropout) or, fused, one log-sum-exp per row."""
    keeps = [
        Kept("context", context, dtype="matmul", scope="tensor"),
        Kept("row_statistics", heads, dtype="fp32", scope="tensor"),
        Kept("scores", per_pair=heads, scope="tensor"),
    ]
    if score_dropout:
        keeps.append(Kept("score_mask", per_pair=heads, dtype="byte", scope="tensor"))
        keeps.append(Kept("dropped_scores", per_pair=heads, scope="tensor"))
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
    norm: NormKind = "rms"
    bias: bool = False

    def layer(self, place: Place) -> Layer:
        return Layer(
            place.name, "attention", self.ops(), self.hidden, place.block, place.opens_block, self.hidden,
            heads=self.heads, kv_heads=self.heads,
        )  # fmt: skip

    @lru_cache(maxsize=1024)  # noqa: B019
    def ops(self) -> tuple[Op, ...]:
        qk = self.heads * (self.nope_dim + self.rope_dim)
        v, up = self.heads * self.v_dim, self.heads * (self.nope_dim + self.v_dim)
        q_kept, kv_kept = (
            (Kept("q", qk, scope="tensor"),),
            (Kept("k", qk, scope="tensor"), Kept("v", v, scope="tensor")),
        )
        ops = [residual(self.hidden), norm("norm", self.hidden, self.norm)]
        if self.q_rank:
            latent = Kept("q_latent", self.q_rank)
            ops.append(matmul("q_down", self.hidden, self.q_rank, bias=self.bias, cut="none", keeps=(latent,)))
            ops.append(norm("q_norm", self.q_rank, "rms"))
            ops.append(matmul("q_up", self.q_rank, qk, units=self.heads, keeps=q_kept))
        else:
            ops.append(matmul("q", self.hidden, qk, units=self.heads, keeps=q_kept))
        latent = Kept("kv_latent", self.kv_rank + self.rope_dim)
        ops.append(
            matmul("kv_down", self.hidden, self.kv_rank + self.rope_dim, bias=self.bias, cut="none", keeps=(latent,))
        )
        ops.append(norm("kv_norm", self.kv_rank, "rms"))
        ops.append(matmul("kv_up", self.kv_rank, up, units=self.heads, keeps=kv_kept))
        core = core_keeps(v, self.heads, 0.0)
        ops.append(Op("core", "attention", flops_per_pair=2.0 * (qk + v), pairs="causal", keeps=core))
        ops.append(matmul("proj", v, self.hidden, bias=self.bias, cut="row", units=self.heads))
        return tuple(ops)


@dataclass(frozen=True, slots=True)
class Mlp:
    """A feed-forward layer: gated (SwiGLU: gate and up in one product) or plain (GELU, ReLU)."""

    hidden: int
    width: int
    gated: bool = True
    norm: NormKind = "rms"
    norm_bias: bool = True
    bias: bool = False
    dropout: float = 0.0
    inner_dropout: float = 0.0  # after the activation function (T5)

    def feed_forward(self) -> list[Op]:
        """The feed-forward operators without the norm before them."""
        wide = self.width * (2 if self.gated else 1)
        up = matmul(
            "up", self.hidden, wide, bias=self.bias, units=self.width, keeps=(Kept("up", wide, scope="tensor"),)
        )
        activated = [Kept("activated", self.width, dtype="matmul", scope="tensor")]
        if self.inner_dropout:
            activated.append(Kept("inner_mask", self.width, dtype="byte", scope="tensor"))
        activation = Op("activation", "elementwise", keeps=tuple(activated))
        down = matmul(
            "down", self.width, self.hidden, bias=self.bias, cut="row", keeps=dropout_mask(self.hidden, self.dropout)
        )
        return [up, activation, down]

    @lru_cache(maxsize=1024)  # noqa: B019
    def ops(self) -> tuple[Op, ...]:
        return residual(self.hidden), norm("norm", self.hidden, self.norm, bias=self.norm_bias), *self.feed_forward()

    def layer(self, place: Place) -> Layer:
        return Layer(
            place.name, "mlp", self.ops(), self.hidden, place.block, place.opens_block, self.hidden,
            place.tokens, carried=place.carried,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Moe:
    """A mixture of experts. Dropless unless `capacity` bounds what each expert takes.

    With `bottleneck` set it takes BigMac's form (2025): a shared projection descends to that width
    before the tokens travel, the experts live in the narrow space, and a shared one ascends after
    they return, so both all-to-alls move `bottleneck` instead of `hidden` elements per token.
    """

    hidden: int
    width: int
    experts: int
    top_k: int
    shared_width: int = 0
    shared_gate: bool = False  # the shared expert is weighed by a sigmoid of its own (Qwen2-MoE)
    gated: bool = True
    capacity: float = 0.0  # 0: dropless
    bottleneck: int = 0
    norm: NormKind = "rms"

    def layer(self, place: Place) -> Layer:
        return Layer(
            place.name, "moe", self.ops(), self.hidden, place.block, place.opens_block, self.hidden,
            experts=self.experts, top_k=self.top_k, dispatch_width=self.rows * self.inner,
        )  # fmt: skip

    @property
    def inner(self) -> int:
        """Width in which tokens travel and experts live."""
        return self.bottleneck or self.hidden

    @property
    def rows(self) -> float:
        """Expert rows per token under balanced routing."""
        return self.top_k * (self.capacity or 1.0)

    @lru_cache(maxsize=1024)  # noqa: B019
    def ops(self) -> tuple[Op, ...]:
        inner, routed = self.inner, self.rows
        ops = [residual(self.hidden), norm("norm", self.hidden, self.norm)]
        router_keeps = (
            Kept("router_logits", self.experts, dtype="fp32"),
            Kept("router_weights", self.top_k, dtype="fp32"),
        )
        ops.append(matmul("router", self.hidden, self.experts, cut="none", keeps=router_keeps))
        if self.bottleneck:
            ops.append(matmul("descend", self.hidden, inner, cut="none"))
        ops.append(Op("dispatch", "elementwise", scope="routed",
                      keeps=(Kept("dispatched", routed * inner, dtype="matmul", scope="routed"),)))  # fmt: skip
        ops += self._experts(inner, routed)
        if self.bottleneck:
            combined = Kept("combined", inner, dtype="matmul")
            ops.append(Op("combine", "elementwise", scope="sequence", keeps=(combined,)))
            ops.append(matmul("ascend", inner, self.hidden, cut="none"))
        if self.shared_width:
            shared = Mlp(self.hidden, self.shared_width, self.gated).feed_forward()
            ops += [replace(op, name=f"shared_{op.name}") for op in shared]
        if self.shared_gate:
            ops.append(matmul("shared_gate", self.hidden, 1, cut="none"))
        return tuple(ops)

    def _experts(self, inner: int, routed: float) -> list[Op]:
        wide = self.width * (2 if self.gated else 1)

        def grouped(name: str, k: int, n: int, keeps: tuple[Kept, ...]) -> Op:
            weights = (Weight(self.experts * k * n, "expert", experts=self.experts),)
            return Op(
                name, "matmul", 2.0 * routed * k * n, k=k, n=n, scope="routed_tensor", weights=weights, keeps=keeps
            )

        up_kept = (Kept("expert_up", routed * wide, scope="routed_tensor"),)
        act_kept = (Kept("expert_activated", routed * self.width, dtype="matmul", scope="routed_tensor"),)
        return [
            grouped("expert_up", inner, wide, up_kept),
            Op("expert_activation", "elementwise", scope="routed_tensor", keeps=act_kept),
            grouped("expert_down", self.width, inner, ()),
        ]


def embedding(
    place: Place, vocab: int, hidden: int, *, positions: int = 0, types: int = 0, norm_kind: NormKind | None = None,
    dropout: float = 0.0, tied_to: str = "", carried: float = 0.0,
) -> Layer:  # fmt: skip
    """Token (and position, and type) lookup; the table is cut over the vocabulary."""
    table = Weight(vocab * hidden, "tensor", vocab)
    ops = [Op("lookup", "lookup", weights=(table,), tied=bool(tied_to))]
    if positions or types:
        ops.append(Op("positions", "lookup", scope="sequence", weights=(Weight((positions + types) * hidden),)))
    if norm_kind:
        summed = Op("input", "elementwise", scope="sequence", keeps=(Kept("input", hidden),))
        statistics = Kept("statistics", 2 if norm_kind == "layer" else 1, dtype="fp32")
        weights = (Weight(hidden * (2 if norm_kind == "layer" else 1)),)
        ops += [summed, Op("norm", "norm", scope="sequence", weights=weights, keeps=(statistics,))]
    if dropout:
        ops.append(Op("dropout", "elementwise", scope="sequence", keeps=dropout_mask(hidden, dropout)))
    return Layer(place.name, "embedding", tuple(ops), hidden, carried=carried, tied_to=tied_to)


def final_norm(place: Place, hidden: int, kind: NormKind, *, dropout: float = 0.0, bias: bool = True) -> Layer:
    """The norm after the last block; its output is kept by whatever follows it."""
    ops = [residual(hidden), norm("norm", hidden, kind, bias=bias)]
    if dropout:
        ops.append(Op("dropout", "elementwise", scope="sequence", keeps=dropout_mask(hidden, dropout)))
    return Layer(place.name, "norm", tuple(ops), hidden, width_in=hidden, tokens=place.tokens, carried=place.carried)


def language_head(place: Place, vocab: int, hidden: int, *, tied_to: str = "", bias: bool = False) -> Layer:
    """Projection to the vocabulary and the loss, which keeps the logits in float32."""
    logits = Kept("logits", vocab, dtype="fp32", scope="tensor")
    ops = (
        matmul("logits", hidden, vocab, bias=bias, units=vocab, keeps=(logits,), tied=bool(tied_to)),
        Op("loss", "loss"),
    )
    return Layer(place.name, "head", ops, 0.0, width_in=hidden, tied_to=tied_to)
