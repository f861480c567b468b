"""Operators of transformer layers, and the place of a layer in the chain.

Widths are elements per token. Kept tensors follow Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (2022). A matrix product, a norm and an activation function keep their input; a dropout keeps its
mask. A tensor is listed once, with the operator that produces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.models.layer import Kept, Layer, LayerKind, Op, Scope, Weight

NormKind = Literal["layer", "rms"]


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a layer in the chain."""

    name: str
    block: str = ""
    opens_block: bool = True
    tokens: int = 0
    carried: float = 0.0

    def layer(
        self, kind: LayerKind, ops: tuple[Op, ...], width_in: float, width_out: float | None = None, **facts: Any
    ) -> Layer:
        """Return the layer at this place; by default its output is as wide as its input."""
        return Layer(
            self.name, kind, ops, width_in if width_out is None else width_out, self.block, self.opens_block,
            width_in, self.tokens, self.carried, **facts,
        )  # fmt: skip


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
    """Return a dense layer. Column-cut biases are cut too, row-cut ones are whole on every rank (Megatron)."""
    if cut == "none":
        weights: tuple[Weight, ...] = (Weight(k * n + (n if bias else 0)),)
    else:
        inside = n if cut == "column" else k
        along = Weight(k * n + (n if bias and cut == "column" else 0), "tensor", units or inside)
        weights = (along, Weight(n)) if bias and cut == "row" else (along,)
    scope: Scope = "sequence" if cut == "none" else "tensor"
    return Op(
        name, "matmul", 2.0 * k * n, k=k, n=n, cut=cut, scope=scope, weights=weights, keeps=tuple(keeps), tied=tied
    )  # fmt: skip


def norm(name: str, width: int, kind: NormKind) -> Op:
    """Return a norm that keeps its statistics; its output is kept as the input of the next matrix product."""
    output = Kept("normed", width, dtype="matmul")
    keeps = (statistics(kind), output)
    return Op(name, "norm", scope="sequence", moves=2.0 * width, weights=(norm_weight(width, kind),), keeps=keeps)


def residual(width: int) -> Op:
    """Return the addition to the residual stream that ends a layer: two reads, one write, nothing kept."""
    return Op("residual", "stream", scope="sequence", moves=3.0 * width)


def rotary(width: int) -> Op:
    """Return the rotary position embedding of queries and keys: one read, one write, nothing kept."""
    return Op("rotary", "stream", moves=2.0 * width)


def norm_weight(width: int, kind: NormKind) -> Weight:
    return Weight(width * (2 if kind == "layer" else 1))


def statistics(kind: NormKind) -> Kept:
    """Return mean and reciprocal deviation of a layer norm, the latter alone for an RMS norm."""
    return Kept("statistics", 2 if kind == "layer" else 1, dtype="fp32")


def layer_input(width: int) -> Op:
    """Return the layer's input on the residual stream, which the norm needs again."""
    return Op("input", "input", scope="sequence", keeps=(Kept("input", width),))


def dropout_mask(width: int, rate: float) -> tuple[Kept, ...]:
    return (Kept("dropout_mask", width, dtype="byte"),) if rate else ()


def dropout(width: int, rate: float) -> tuple[Op, ...]:
    if not rate:
        return ()
    return (Op("dropout", "elementwise", scope="sequence", moves=2.5 * width, keeps=dropout_mask(width, rate)),)
