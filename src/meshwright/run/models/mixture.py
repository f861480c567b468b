"""Mixtures of experts: a router, experts that take whatever comes (dropless), experts that all tokens share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.model.feed_forward import Moe
from meshwright.run.models.context import Context
from meshwright.run.models.feed_forward import inner
from meshwright.run.models.norms import norm
from meshwright.run.models.numerics import Numerics, Routing


class Router(nn.Module):
    """Which experts a token goes to, and with what weights."""

    correction: Tensor

    def __init__(self, shape: Moe, routing: Routing) -> None:
        super().__init__()
        self.shape, self.routing = shape, routing
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        if routing.corrected:
            self.register_buffer("correction", torch.zeros(shape.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of (token, hidden): weights and experts of (token, top_k), and the scores of all in float32."""
        logits = functional.linear(x.float(), self.weight.float())
        scores = logits.sigmoid() if self.routing.sigmoid else logits.softmax(dim=-1)
        experts = self._among(scores).topk(self.shape.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(-1, experts)
        if self.routing.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + (1e-20 if self.routing.sigmoid else 0.0))
        return (weights * self.routing.scale).to(x.dtype), experts, scores

    def _among(self, scores: Tensor) -> Tensor:
        """What the choice is made by: corrected scores, of the best groups only (DeepSeek-V3)."""
        r = self.routing
        found = scores + self.correction if r.corrected else scores
        if r.groups <= 1 or r.top_groups >= r.groups:
            return found
        grouped = found.unflatten(-1, (r.groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1).topk(r.top_groups, dim=-1).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        return grouped.masked_fill(~kept.unsqueeze(-1), 0.0).flatten(-2)


class Experts(nn.Module):
    """Gated feed-forward networks side by side: (expert, out, in)."""

    def __init__(self, experts: int, hidden: int, width: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Of rows in the order of the experts, so many for each."""
        return grouped(inner(grouped(x, self.up, counts), self.activation, gated=True), self.down, counts)


def grouped(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Rows times the transposed weights of their expert; one kernel on accelerators."""
    if x.is_cuda:
        ends = counts.cumsum(0).to(torch.int32)
        return functional.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    parts = x.split(counts.tolist())
    return torch.cat([functional.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


class Mixture(nn.Module):
    """Norm, routed and shared experts and the residual, as one link of the chain."""

    def __init__(self, shape: Moe, numerics: Numerics) -> None:
        super().__init__()
        self.shape = shape
        self.norm = norm("rms", shape.hidden, numerics)
        self.router = Router(shape, numerics.routing)
        self.experts = Experts(shape.experts, shape.inner, shape.width, numerics.activation)
        if shape.bottleneck:  # BigMac: tokens travel narrow
            self.descend = nn.Linear(shape.hidden, shape.inner, bias=False)
            self.ascend = nn.Linear(shape.inner, shape.hidden, bias=False)
        if shape.shared_width:
            self.shared_up = nn.Linear(shape.hidden, 2 * shape.shared_width, bias=False)
            self.shared_down = nn.Linear(shape.shared_width, shape.hidden, bias=False)
        if shape.shared_gate:
            self.shared_gate = nn.Linear(shape.hidden, 1, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        h = self.norm(x).flatten(0, 1)
        weights, experts, _ = self.router(h)
        found = self._routed(self.descend(h) if self.shape.bottleneck else h, weights, experts)
        if self.shape.bottleneck:
            found = self.ascend(found)
        if self.shape.shared_width:
            found = found + self._shared(h)
        return x + found.view_as(x)

    def _routed(self, h: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Rows in the order of the experts, through them, and back."""
        order = experts.flatten().argsort(stable=True)
        token = order // self.shape.top_k
        counts = torch.bincount(experts.flatten(), minlength=self.shape.experts)
        rows = self.experts(h[token], counts) * weights.flatten()[order, None]
        return torch.zeros_like(h).index_add(0, token, rows)

    def _shared(self, h: Tensor) -> Tensor:
        found: Tensor = self.shared_down(inner(self.shared_up(h), self.experts.activation, gated=True))
        return found * self.shared_gate(h).sigmoid() if self.shape.shared_gate else found
