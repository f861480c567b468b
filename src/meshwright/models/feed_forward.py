"""Feed-forward layers: dense (GELU, SwiGLU) and mixtures of experts.

Gate and up are two products of one input, so that a plan may recompute either. A gated activation is one fused
operator: it keeps both inputs and passes on its product. In a mixture the routing weights multiply that product inside
the same operator, as in Megatron-Core, so the experts' outputs need not be kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.models.layer import Kept, Layer, Op, Weight
from meshwright.models.operators import NormKind, Place, dropout_mask, layer_input, matmul, norm, residual


@dataclass(frozen=True, slots=True)
class Mlp:
    """Dense feed-forward layer: gated (SwiGLU: gate and up in one product) or plain (GELU, ReLU)."""

    hidden: int
    width: int
    gated: bool = True
    norm: NormKind = "rms"
    bias: bool = False
    dropout: float = 0.0
    inner_dropout: float = 0.0  # after the activation function (T5)

    def layer(self, place: Place) -> Layer:
        return place.layer("mlp", self.ops(), self.hidden, shape=self)

    @lru_cache(maxsize=1024)  # noqa: B019 - the blocks of a model share one tuple of operators
    def ops(self) -> tuple[Op, ...]:
        return layer_input(self.hidden), norm("norm", self.hidden, self.norm), *self.products(), residual(self.hidden)

    def products(self) -> list[Op]:
        """Return gate, up, activation and down, without the norm before them."""
        wide = self.width * (2 if self.gated else 1)
        up = matmul(
            "up", self.hidden, self.width, bias=self.bias, units=self.width,
            keeps=(Kept("up", self.width, scope="tensor"),),
        )  # fmt: skip
        gate = replace(up, name="gate", keeps=(Kept("gate", self.width, scope="tensor"),))
        activated = [Kept("activated", self.width, dtype="matmul", scope="tensor")]
        if self.inner_dropout:
            activated.append(Kept("inner_mask", self.width, dtype="byte", scope="tensor"))
        mask = dropout_mask(self.hidden, self.dropout)
        return [
            *([gate, replace(up, shares_input=True)] if self.gated else [up]),
            Op("activation", "elementwise", moves=float(wide + self.width), keeps=tuple(activated)),
            matmul("down", self.width, self.hidden, bias=self.bias, cut="row", keeps=mask),
        ]


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture of experts, dropless unless `capacity` bounds the rows of an expert.

    With `bottleneck` set it takes BigMac's form (2025). A shared projection reduces tokens to that width before
    dispatch, the experts work at that width, and a shared one expands them after combine. Both all-to-alls then move
    `bottleneck` instead of `hidden` elements per token.
    """

    hidden: int
    width: int
    experts: int
    top_k: int
    shared_width: int = 0
    shared_gate: bool = False  # a sigmoid of its own weights the shared expert (Qwen2-MoE)
    capacity: float = 0.0  # 0: dropless
    bottleneck: int = 0

    @property
    def inner(self) -> int:
        """Width of dispatched tokens and of the experts' input."""
        return self.bottleneck or self.hidden

    @property
    def rows(self) -> float:
        """Expert rows per token under balanced routing."""
        return self.top_k * (self.capacity or 1.0)

    def layer(self, place: Place) -> Layer:
        return place.layer(
            "moe", self.ops(), self.hidden, experts=self.experts, top_k=self.top_k,
            dispatch_width=self.rows * self.inner, shape=self,
        )  # fmt: skip

    @lru_cache(maxsize=1024)  # noqa: B019
    def ops(self) -> tuple[Op, ...]:
        ops = [layer_input(self.hidden), norm("norm", self.hidden, "rms"), self._router()]
        if self.bottleneck:
            ops.append(matmul("descend", self.hidden, self.inner, cut="none"))
        ops += self._routed()
        if self.bottleneck:
            ops.append(matmul("ascend", self.inner, self.hidden, cut="none"))
        if self.shared_width:
            ops += self._shared()
        return (*ops, residual(self.hidden))

    def _router(self) -> Op:
        keeps = (
            Kept("router_logits", self.experts, dtype="fp32"),
            Kept("router_weights", self.top_k, dtype="fp32"),
        )
        return matmul("router", self.hidden, self.experts, cut="none", keeps=keeps)

    def _routed(self) -> list[Op]:
        """Return dispatch, the experts' products on the rows that arrive, and combine."""
        wide = 2 * self.width
        arrived = (Kept("dispatched", self.rows * self.inner, dtype="matmul", scope="routed"),)
        up_kept = (Kept("expert_up", self.rows * wide, scope="routed_tensor"),)
        act_kept = (Kept("expert_activated", self.rows * self.width, dtype="matmul", scope="routed_tensor"),)
        combined = (Kept("combined", self.inner, dtype="matmul"),) if self.bottleneck else ()
        return [
            # Rows are copied into expert order, before and after the all-to-all.
            Op("dispatch", "dispatch", scope="routed", moves=4.0 * self.rows * self.inner, keeps=arrived),
            self._grouped("expert_up", self.inner, wide, up_kept),
            Op(
                "expert_activation", "elementwise", scope="routed_tensor", moves=self.rows * (wide + self.width),
                keeps=act_kept,
            ),
            self._grouped("expert_down", self.width, self.inner, ()),
            Op("combine", "combine", scope="routed", moves=(3.0 * self.rows + 1) * self.inner, keeps=combined),
        ]  # fmt: skip

    def _grouped(self, name: str, k: int, n: int, keeps: tuple[Kept, ...]) -> Op:
        weights = (Weight(self.experts * k * n, "expert", experts=self.experts),)
        return Op(
            name, "matmul", 2.0 * self.rows * k * n, k=k, n=n, rows=self.rows, cut="expert", scope="routed_tensor",
            weights=weights, keeps=keeps,
        )  # fmt: skip

    def _shared(self) -> list[Op]:
        ops = [replace(op, name=f"shared_{op.name}") for op in Mlp(self.hidden, self.shared_width).products()]
        if self.shared_gate:
            output = Kept("shared_output", self.hidden)
            ops.append(matmul("shared_gate", self.hidden, 1, cut="none", keeps=(output, Kept("shared_weight", 1))))
        return ops
