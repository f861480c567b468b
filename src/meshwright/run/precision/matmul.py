"""A matrix product computed in 8, 16 or 32 bits, whatever type its operands have."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.run.torch_private import scaled_mm

LADDER = ("fp8", "bf16", "fp32")  # types of a product, the coarsest first
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2  # gradients need range (Micikevicius et al., 2022)
_WIDE = {"bf16": torch.bfloat16, "fp32": torch.float32}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str = "") -> Tensor:
    """Return `x W^T + b` in the type of x, with the product computed in `kind`; if empty, in the type of x.

    >>> linear(torch.ones(1, 16), torch.full((2, 16), 1.03), None, "fp8")
    tensor([[16., 16.]])
    """
    if kind == "fp8":
        found: Tensor = _Float8.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
        return found if bias is None else found + bias
    if _WIDE.get(kind, x.dtype) == x.dtype:
        return functional.linear(x, weight, bias)
    found = functional.linear(x.to(_WIDE[kind]), weight.to(_WIDE[kind])).to(x.dtype)
    return found if bias is None else found + bias


class Scaled(NamedTuple):
    """Values in 8 bits, with their scale."""

    values: Tensor
    scale: Tensor

    def t(self) -> Scaled:
        """Transpose in memory: kernels read both operands along the dimension that is summed over."""
        return Scaled(self.values.t().contiguous(), self.scale)


def scaled(x: Tensor, kind: torch.dtype) -> Scaled:
    """Scale so that the largest value lies in the upper half of the type's range.

    Scales are powers of two: dividing by them is exact in any type, and values are rounded once. Infinities and NaN
    stay.

    >>> scaled(torch.tensor([3072.0, 1.0, 0.001]), torch.float8_e4m3fn)
    Scaled(values=tensor([3.8400e+02, 1.2500e-01, 0.0000e+00], dtype=torch.float8_e4m3fn), scale=tensor(8.))
    """
    most = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    part = most / torch.finfo(kind).max
    mantissa = torch.frexp(part).mantissa
    scale = torch.where(mantissa > 0, part / mantissa, 1.0).clamp(min=torch.finfo(torch.float32).tiny)
    return Scaled((x / scale.to(x.dtype)).to(kind), scale)


class _Float8(torch.autograd.Function):
    """Linear layer in 8 bits: forward e4m3 x e4m3, backward e5m2 x e4m3, all summed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = scaled(x, FORWARD)
        # The saved input stays in 8 bits. The weight is converted again: a saved copy would undo what ZeRO-3 frees.
        kept = rows if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(weight, *kept)
        return _times(rows, scaled(weight, FORWARD), x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight, values, scale = ctx.saved_tensors
        grad = scaled(grads[0], BACKWARD)
        for_x, for_weight = ctx.needs_input_grad
        dx = _times(grad, scaled(weight, FORWARD).t(), grads[0].dtype) if for_x else None
        return dx, _times(grad.t(), Scaled(values, scale).t(), weight.dtype) if for_weight else None


def _times(a: Scaled, b: Scaled, kind: torch.dtype) -> Tensor:
    """Return `a b^T`; devices without 8-bit products use a wider type, which holds the same values exactly."""
    if has_float8(a.values.device) and not (a.values.shape[1] % 16 or b.values.shape[0] % 16):
        return scaled_mm(a.values, b.values.t(), a.scale, b.scale, out_dtype=kind)
    return (a.values.to(kind) @ b.values.to(kind).t()) * (a.scale * b.scale).to(kind)


@cache
def has_float8(device: torch.device) -> bool:
    """Return True if a device multiplies 8-bit values itself: NVIDIA's from Ada and Hopper on."""
    if device.type != "cuda" or torch.version.hip:
        return False
    found: bool = torch.cuda.get_device_capability(device) >= (8, 9)
    return found
