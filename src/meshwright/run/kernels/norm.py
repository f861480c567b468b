"""RMS norm (Zhang and Sennrich, 2019), computed in float32 and rounded once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.run.kernels.device import fused


class _Norm(torch.autograd.Function):
    """RMS norm that also returns its input: the residual stream's gradient is added inside the backward kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from meshwright.run.kernels.triton import norm as kernel

        y, rstd = kernel.forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.set_materialize_grads(False)
        return y, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        from meshwright.run.kernels.triton import norm as kernel

        dy, beside = grads
        if dy is None:
            return beside, None, None
        x, weight, rstd = ctx.saved_tensors
        return *kernel.backward(dy, x, weight, rstd, beside), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm over the last dimension.

    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), 0.0) * 12.5**0.5
    tensor([3., 4.])
    """
    return rms_norm_beside(x, weight, eps)[0]


def rms_norm_beside(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x, and x for the residual stream: this saves one pass over memory where their gradients meet.

    >>> [part.shape for part in rms_norm_beside(torch.ones(2, 8), torch.ones(8), 1e-6)]
    [torch.Size([2, 8]), torch.Size([2, 8])]
    """
    if fused(x, weight):
        found: tuple[Tensor, Tensor] = _Norm.apply(x, weight, eps)
        return found
    return functional.rms_norm(x, weight.shape, weight, eps), x
