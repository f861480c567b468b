"""Matrix products of a layer, whole or cut by tensor parallelism, an adapter of low rank beside a frozen one; norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.run.kernels import rms_norm, rms_norm_beside
from meshwright.run.mesh.mesh import SpanMesh
from meshwright.run.models.chunked_linear import chunked_enter, chunked_leave
from meshwright.run.models.numerics import Numerics
from meshwright.run.precision.matmul import linear
from meshwright.run.precision.rounding import Watch

SCALE = 2.0  # scale of an adapter's output: alpha / rank, with the usual alpha of twice the rank


class Adapter(nn.Module):
    """LoRA (Hu et al., 2021): `scale * (x A^T) B^T` beside `x W^T`; only A and B are trained."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(weight.new_empty(rank, weight.shape[1]))
        self.b = nn.Parameter(weight.new_empty(weight.shape[0], rank))

    def added(self, found: Tensor, x: Tensor, b: Tensor) -> Tensor:
        """Return the frozen product plus the adapter's, fused with the second of its two small products."""
        low = functional.linear(x, self.a).flatten(0, -2)
        return torch.addmm(found.flatten(0, -2), low, b.t(), alpha=SCALE).view(found.shape)


def merged(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return a weight merged with its adapter, rounded once.

    >>> merged(torch.ones(2, 2), torch.ones(1, 2), torch.tensor([[0.0], [1.0]]))
    tensor([[1., 1.],
            [3., 3.]])
    """
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=SCALE).to(weight.dtype)


class Product(nn.Linear):
    """Matrix product of a block; under tensor parallelism each rank has some of its outputs, or all."""

    lora: Adapter | None

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.register_module("lora", None)
        self.computed_in = ""  # a type of `matmul.LADDER`; empty: that of the input
        self.watch: Watch | None = None  # measures rounding errors

    def adapt(self, rank: int) -> None:
        """Freeze the weight, and train an adapter instead."""
        self.requires_grad_(False)
        self.lora = Adapter(self.weight, rank)

    def in_chunks(self, mesh: SpanMesh) -> bool:
        """Return True if collectives overlap with this product."""
        return mesh.chunks > 1 and self.lora is None and not self.computed_in

    def forward(self, x: Tensor) -> Tensor:
        found = self._times(x, self.weight, self.bias)
        return found if self.lora is None else self.lora.added(found, x, self.lora.b)

    def entered(self, x: Tensor, mesh: SpanMesh) -> Tensor:
        """Return the product of an input that has not yet entered the tensor-parallel region: it is gathered in chunks."""
        found = chunked_enter(x, self.weight, mesh.tp, mesh.chunks, sp=mesh.sp)
        return found if self.bias is None else found + self.bias

    def part(self, x: Tensor, index: int, of: int) -> Tensor:
        """One of so many equal parts of its outputs."""
        weight, bias = (one if one is None else one.chunk(of)[index] for one in (self.weight, self.bias))
        found = self._times(x, weight, bias)
        return found if self.lora is None else self.lora.added(found, x, self.lora.b.chunk(of)[index])

    def _times(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        typed = self.computed_in
        found = linear(x, weight, bias, typed) if typed else functional.linear(x, weight, bias)
        if self.watch is not None and found.requires_grad:
            self.watch.saw(x, weight, found)
        return found


class Row(Product):
    """Row-parallel product: each rank has some inputs (columns of the weight); all-reduce results, add the bias once."""

    def forward(self, x: Tensor, mesh: SpanMesh) -> Tensor:  # type: ignore[override]
        if self.in_chunks(mesh):
            found = chunked_leave(x, self.weight, mesh.tp, mesh.chunks, sp=mesh.sp)
        else:
            found = self._times(x, self.weight, None)
            found = mesh.leave(found if self.lora is None else self.lora.added(found, x, self.lora.b))
        return found if self.bias is None else found + self.bias


class RMSNorm(nn.RMSNorm):
    """One kernel on accelerators."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm, and its input for the residual."""
        return rms_norm_beside(x, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """With the same names."""

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm, and its input for the residual."""
        return self(x), x


def norm(kind: str, width: int, numerics: Numerics) -> RMSNorm | LayerNorm:
    """`rms` or `layer`."""
    return RMSNorm(width, eps=numerics.eps) if kind == "rms" else LayerNorm(width, eps=numerics.eps)


def entered(x: Tensor, norm: RMSNorm | LayerNorm, mesh: SpanMesh, *, later: bool = False) -> tuple[Tensor, Tensor]:
    """The norm of x on all members of a tensor-parallel line, and x for the residual; `later`: a product brings it in."""
    normed, x = norm.beside(x)
    return normed if later else mesh.enter(normed), x
