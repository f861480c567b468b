"""The loss that keeps experts equally busy (Shazeer et al., 2017; Fedus et al., "Switch Transformers", 2021).

Of one layer and micro-batch: experts x sum over experts of (rows routed to it per token) x (its mean score). Rows are
counted over all processes that share the micro-batch, so that the loss does not depend on how tokens are dealt out; each
process then adds the part of its own tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.run.collectives import Line


def balance_loss(scores: Tensor, experts: Tensor, everyone: Line) -> Tensor:
    """The part of the own tokens, times the number of all tokens: (token, expert) scores and (token, top_k) experts.

    >>> even = torch.full((4, 2), 0.5)
    >>> balance_loss(even, torch.tensor([[0], [1], [0], [1]]), Line()) / 4
    tensor(1.)
    """
    count = scores.shape[1]
    rows = torch.bincount(experts.flatten(), minlength=count).to(torch.float32)
    tokens = torch.tensor([float(len(scores))], device=rows.device)
    said = torch.cat([rows, tokens])
    if everyone.size > 1:
        dist.all_reduce(said, group=everyone.group)
    share = said[:count] / said[count]
    mean = scores / scores.sum(dim=-1, keepdim=True)
    return count * (mean.sum(dim=0) * share).sum()


class _With(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones_like(ctx.like)


def with_loss(x: Tensor, loss: Tensor) -> Tensor:
    """`x`, whose gradient brings that of a loss along: so a layer adds to the loss wherever its stage is."""
    found: Tensor = _With.apply(x, loss)
    return found
