"""Load-balancing loss of experts (Shazeer et al., 2017; Fedus et al., "Switch Transformers", 2021).

`sample`: every layer has a loss for every sample (DeepSeek-V3's sequence-wise loss, 2024),

    experts x sum over experts of (rows routed to it per token) x (its mean score),

with the sample's weight in the mean cross entropy. No sharding of a batch changes it.

`batch`: the same formula once, over the tokens of all samples and layers together, as in transformers. The loss is no
sum over samples, so that a step must be one micro-batch.

Counts of rows have no gradient. So the gradient of the scores is constant, and known when the backward pass begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.run.mesh.collectives import AxisGroup

Balance = Literal["sample", "batch"]


@dataclass(frozen=True)
class Routed:
    """Routing of the own tokens of some samples."""

    scores: Tensor  # (token, expert)
    experts: Tensor  # (token, top_k)
    samples: Tensor  # (token,): its sample, from 0; -1 is padding

    def rows(self, samples: int) -> Tensor:
        """Return the rows of each sample that every expert gets: (sample, expert).

        >>> routed = Routed(torch.ones(3, 2), torch.tensor([[0], [1], [1]]), torch.tensor([0, 0, -1]))
        >>> routed.rows(1)
        tensor([[1., 1.]])
        """
        count = self.scores.shape[1]
        places = (self.samples[:, None] * count + self.experts)[self.samples >= 0].flatten()
        return torch.bincount(places, minlength=samples * count).view(samples, count).to(torch.float32)

    def sums_of_scores(self, samples: int) -> Tensor:
        """Return the experts' shares of a token's scores, summed over the tokens of each sample: (sample, expert)."""
        shares = self.scores / self.scores.sum(dim=-1, keepdim=True)
        real = (self.samples >= 0)[:, None]
        into = self.samples.clamp(min=0)
        return shares.new_zeros(samples, shares.shape[1]).index_add(0, into, shares * real)


@dataclass(frozen=True)
class Totals:
    """Routing of a whole step: complete once its forward pass is over."""

    rows: dict[str, Tensor] = field(
        default_factory=dict
    )  # of a layer: rows of every expert, tokens, weight of the step

    def add(self, layer: str, rows: Tensor, tokens: Tensor, weight: Tensor, everyone: AxisGroup) -> None:
        """Add a layer's rows of all ranks; a recomputed layer counts once."""
        if layer in self.rows:
            return
        found = torch.cat([rows, torch.stack([tokens, weight])])
        if everyone.size > 1:
            dist.all_reduce(found, group=everyone.group)
        self.rows[layer] = found

    def gradient(self) -> Tensor:
        """Return the gradient of an expert's summed scores, times the weight of the step."""
        found = torch.stack(list(self.rows.values()))
        tokens = found[:, -2].sum()
        return (len(found[0]) - 2) * found[0, -1] * found[:, :-2].sum(dim=0) / tokens.square()


def sample_gradient(rows: Tensor, tokens: Tensor, weight: Tensor, fellows: AxisGroup) -> Tensor:
    """Return the gradient of (sample, expert) sums of scores, from the rows of the own tokens.

    >>> sample_gradient(torch.tensor([[2.0, 2.0]]), torch.tensor([4.0]), torch.tensor([4.0]), AxisGroup())
    tensor([[1., 1.]])
    """
    if fellows.size > 1:
        rows = rows.clone()
        dist.all_reduce(rows, group=fellows.group)
    return rows.shape[1] * (weight / tokens.clamp(min=1.0).square())[:, None] * rows


class _With(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, totals: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
        ctx.gradient = gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.gradient(), None


def with_gradient(x: Tensor, totals: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
    """Return `x`; its backward pass also gives `totals` a gradient, so that a layer adds to another stage's loss."""
    found: Tensor = _With.apply(x, totals, gradient)
    return found
