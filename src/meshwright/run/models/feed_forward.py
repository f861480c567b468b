"""Dense feed-forward layers: norm, products and the residual stream, as one layer of the chain."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from meshwright.models.feed_forward import Mlp
from meshwright.run.kernels import gated as gated_silu
from meshwright.run.memory.checkpointing import Keeper, Run, operators
from meshwright.run.models.context import Context
from meshwright.run.models.linear import Product, Row, entered, norm
from meshwright.run.models.numerics import Numerics


def activated(x: Tensor, name: str) -> Tensor:
    """Apply an activation function by name: silu, gelu, or gelu_tanh as in GPT-2."""
    if name == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


class FeedForward(nn.Module):
    """Feed-forward network, gated (gate and up in one product) or plain."""

    def __init__(self, shape: Mlp, numerics: Numerics) -> None:
        super().__init__()
        self.shape, self.activation = shape, numerics.activation
        self.layer_name = ""
        self.norm = norm(shape.norm, shape.hidden, numerics)
        self.up = Product(shape.hidden, shape.width * (2 if shape.gated else 1), bias=shape.bias)
        self.down = Row(shape.width, shape.hidden, bias=shape.bias)
        self.repeated: frozenset[str] = frozenset()
        self.keeper: Keeper | None = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        mesh = context.mesh
        later = self.up.in_chunks(mesh) and not _apart(self.repeated, gated=self.shape.gated)
        up = partial(self.up.entered, mesh=mesh) if later else self.up
        with operators(self) as run:
            normed, x = run("norm", partial(entered, norm=self.norm, mesh=mesh, later=later), x)
            wide = widened(run, normed, up, self.repeated, gated=self.shape.gated)
            product = run("activation", lambda *t: inner(t, self.activation, gated=self.shape.gated), *wide)
            return x + run("down", partial(self._down, context=context), product)

    def _down(self, product: Tensor, context: Context) -> Tensor:
        return context.dropped(self.down(product, context.mesh), f"{self.layer_name}.down", self.shape.dropout)


def widened(
    run: Run, x: Tensor, up: Product | Callable[[Tensor], Tensor], repeated: frozenset[str], *, gated: bool,
    prefix: str = "",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return gate and up from one product, or from two if a plan recomputes only one of them."""
    names = (f"{prefix}gate", f"{prefix}up") if gated else (f"{prefix}up",)
    if not isinstance(up, Product) or not _apart(repeated, gated=gated, prefix=prefix):
        return (run(names[0], up, x),)
    product = up

    def half(i: int) -> Callable[[Tensor], Tensor]:
        return lambda t: product.part(t, i, 2)

    return tuple(run(name, half(i), x) for i, name in enumerate(names))


def _apart(repeated: frozenset[str], *, gated: bool, prefix: str = "") -> bool:
    """Return True if exactly one of gate and up is recomputed."""
    return gated and len(repeated & {f"{prefix}gate", f"{prefix}up"}) == 1


def inner(x: tuple[Tensor, ...], activation: str, *, gated: bool) -> Tensor:
    """Apply the activation between the two products; gates and ups are side by side in one tensor, or in two."""
    if not gated:
        return activated(x[0], activation)
    if activation == "silu" and len(x) == 1:
        return gated_silu(x[0])
    gate, up = x if len(x) == 2 else x[0].chunk(2, dim=-1)
    return activated(gate, activation) * up
