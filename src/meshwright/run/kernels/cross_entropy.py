"""Fused output projection and cross entropy, in chunks of tokens: the whole logits never exist.

For every chunk the forward pass also computes the gradients of the hidden states and of the weight, so that nothing as
wide as the vocabulary stays. The backward pass only scales them (Hsu et al., "Liger Kernel", 2024).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.cost.memory.transient import loss_chunk
from meshwright.run.kernels.fused import fused
from meshwright.run.mesh.collectives import ALONE, AxisGroup


def linear_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, axis: AxisGroup = ALONE, first: int = 0, *, chunk: int = 0,
    ignored: int = -100, again: bool = False,
) -> Tensor:  # fmt: skip
    """Return the sum over tokens of the cross entropy of `hidden @ weight.T`, in float32.

    `weight` holds this rank's part of the vocabulary in its tensor-parallel group, from the token `first` on. By
    default a chunk is an eighth of the tokens, and 4,096 at least. `again`: the backward pass may come twice, in two
    halves.

    >>> linear_loss(torch.zeros(1, 3, 8), torch.ones(4, 8), torch.tensor([[1, 2, -100]])).exp()
    tensor(16.)
    """
    chunk = chunk or int(loss_chunk(targets.numel()))
    how = (axis, first, chunk, ignored, again, torch.is_grad_enabled())
    found: Tensor = _LinearLoss.apply(hidden, weight, targets, *how)
    return found


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, axis: AxisGroup, first: int, chunk: int, ignored: int,
        again: bool, trains: bool,
    ) -> Tensor:  # fmt: skip
        flat, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        for_hidden, for_weight = (trains and need for need in ctx.needs_input_grad[:2])
        dx = torch.empty_like(flat) if for_hidden else None
        dw: Tensor | None = None
        total = torch.zeros((), dtype=torch.float32, device=flat.device)
        wide = _aligned(weight, axis)
        for start in range(0, len(flat), chunk):
            some = slice(start, start + chunk)
            logits = flat[some] @ wide.t()
            logits[:, len(weight) :] = -torch.inf  # padding tokens have no probability, and get no gradient
            losses, gradients = _losses(logits, targets[some], axis, first, ignored, for_hidden or for_weight)
            total += losses.sum()
            if dx is not None:
                torch.mm(gradients, wide, out=dx[some])
            if for_weight:
                dw = gradients.t() @ flat[some] if dw is None else dw.addmm_(gradients.t(), flat[some])
            del logits, gradients  # before those of the next chunk exist
        dw = dw if dw is None else dw[: len(weight)]
        ctx.shape, ctx.found, ctx.again, ctx.scaled = hidden.shape, (dx, dw), again, False
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients in place: a copy of the weight's gradient would be the largest tensor of a step."""
        if ctx.found is None:
            raise RuntimeError("the gradients of this loss have been used: compute it again for another backward pass")
        dx, dw = ctx.found
        for found in (dx, dw):
            if found is None or ctx.scaled:
                continue
            if fused(found):
                from meshwright.run.kernels.triton import cross_entropy as kernel

                kernel.scale(found, grads[0])
            else:
                found.mul_(grads[0])
        ctx.found, ctx.scaled = ctx.found if ctx.again else None, True
        return None if dx is None else dx.view(ctx.shape), dw, None, None, None, None, None, None, None


def _aligned(weight: Tensor, axis: AxisGroup) -> Tensor:
    """Pad rows with zeros to a multiple of 64: matrix units take several times longer otherwise (50,257 tokens)."""
    missing = -len(weight) % 64
    if not missing or axis.size > 1 or not fused(weight):
        return weight
    return torch.cat([weight, weight.new_zeros(missing, weight.shape[1])])


def _losses(
    logits: Tensor, targets: Tensor, axis: AxisGroup, first: int, ignored: int, gradients: bool
) -> tuple[Tensor, Tensor]:
    """Return losses of (token,), and the gradients of their logits, which overwrite them."""
    if fused(logits):
        from meshwright.run.kernels.triton import cross_entropy as kernel

        most, total, chosen = kernel.statistics(logits, targets, first)
        log_total, chosen = _over(axis, most, total, chosen)
        if gradients:
            kernel.to_gradients(logits, targets, log_total, first, ignored)
        return (log_total - chosen).where(targets != ignored, 0.0), logits
    wide = logits.float()
    at = targets - first
    mine = (at >= 0) & (at < wide.shape[1])
    most = wide.amax(dim=1)
    chosen = wide.gather(1, at.where(mine, 0)[:, None])[:, 0] * mine
    # In place where possible: each copy of the logits would be the largest tensor of a step.
    log_total, chosen = _over(axis, most, (wide - most[:, None]).exp_().sum(dim=1), chosen)
    losses = (log_total - chosen).where(targets != ignored, 0.0)
    if not gradients:
        return losses, wide
    wide.sub_(log_total[:, None]).exp_()
    wide[mine.nonzero()[:, 0], at[mine]] -= 1.0
    return losses, wide.mul_((targets != ignored)[:, None]).to(logits.dtype)


def _over(axis: AxisGroup, most: Tensor, total: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the softmax's sum and the target's logit, over all ranks of the axis."""
    if axis.size > 1:
        highest = most.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=axis.group)
        both = torch.stack([total * (most - highest).exp(), chosen])
        dist.all_reduce(both, group=axis.group)
        (total, chosen), most = both, highest
    return total.log() + most, chosen
