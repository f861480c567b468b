"""SwiGLU (Shazeer, 2020): silu(gate) * up, with gates and ups side by side in one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.run.kernels.device import fused


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from meshwright.run.kernels.triton import gated as kernel

        x = x.contiguous()
        ctx.save_for_backward(x)
        return kernel.forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        from meshwright.run.kernels.triton import gated as kernel

        return kernel.backward(grads[0].contiguous(), *ctx.saved_tensors)


def gated(x: Tensor) -> Tensor:
    """Return SwiGLU of (.., 2 width) as (.., width).

    >>> gated(torch.tensor([0.0, 1.0, 5.0, 2.0]))
    tensor([0.0000, 1.4621])
    """
    if fused(x):
        found: Tensor = _Gated.apply(x)
        return found
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up
