"""Dense feed-forward layers: norm, products and the residual, as one link of the chain."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from meshwright.model.feed_forward import Mlp
from meshwright.run.models.context import Context
from meshwright.run.models.linear import Row
from meshwright.run.models.norms import norm
from meshwright.run.models.numerics import Numerics


def activated(x: Tensor, name: str) -> Tensor:
    """By name: silu, gelu, or gelu_tanh as GPT-2 has it."""
    if name == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


class FeedForward(nn.Module):
    """Gated (gate and up in one product) or plain."""

    def __init__(self, shape: Mlp, numerics: Numerics) -> None:
        super().__init__()
        self.shape, self.activation = shape, numerics.activation
        self.norm = norm(shape.norm, shape.hidden, numerics)
        self.up = nn.Linear(shape.hidden, shape.width * (2 if shape.gated else 1), bias=shape.bias)
        self.down = Row(shape.width, shape.hidden, bias=shape.bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        h = self.up(context.lane.enter(self.norm(x)))
        return x + self.down(inner(h, self.activation, gated=self.shape.gated), context.lane)


def inner(x: Tensor, activation: str, *, gated: bool) -> Tensor:
    """Between the two products."""
    if not gated:
        return activated(x, activation)
    gate, up = x.chunk(2, dim=-1)
    return activated(gate, activation) * up
