"""Mixture of experts: a router, routed experts without a capacity limit (dropless), and shared experts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from meshwright.models.feed_forward import Moe
from meshwright.run.memory.checkpointing import Keeper, Run, operators, plainly
from meshwright.run.mesh.collectives import ALONE, dispatched, gathered, joined, most, parted, scattered
from meshwright.run.mesh.mesh import SpanMesh
from meshwright.run.models.balance import Routed, sample_gradient, with_gradient
from meshwright.run.models.context import Context
from meshwright.run.models.feed_forward import inner, widened
from meshwright.run.models.linear import Product, Row, norm
from meshwright.run.models.numerics import Numerics, Routing


class Router(nn.Module):
    """Router that chooses each token's experts and their weights."""

    correction: Tensor

    def __init__(self, shape: Moe, routing: Routing) -> None:
        super().__init__()
        self.shape, self.routing = shape, routing
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        self.load: Tensor | None = None  # rows of every expert since the last bias correction
        if routing.corrected:
            self.register_buffer("correction", torch.zeros(shape.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights and experts of (token, top_k), and all scores in float32, for (token, hidden)."""
        logits = functional.linear(x.float(), self.weight.float())
        scores = logits.sigmoid() if self.routing.sigmoid else logits.softmax(dim=-1)
        experts = self._among(scores).topk(self.shape.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(-1, experts)
        if self.routing.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + (1e-20 if self.routing.sigmoid else 0.0))
        return (weights * self.routing.scale).to(x.dtype), experts, scores

    def count(self, rows: Tensor) -> None:
        """Add the rows that every expert got."""
        self.load = rows if self.load is None else self.load + rows

    def _among(self, scores: Tensor) -> Tensor:
        """Return the scores for the choice: with bias correction, of the best groups only (DeepSeek-V3)."""
        r = self.routing
        found = scores + self.correction if r.corrected else scores
        if r.groups <= 1 or r.top_groups >= r.groups:
            return found
        grouped = found.unflatten(-1, (r.groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1).topk(r.top_groups, dim=-1).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        return grouped.masked_fill(~kept.unsqueeze(-1), 0.0).flatten(-2)


class Experts(nn.Module):
    """Gated feed-forward networks of all experts: (expert, out, in)."""

    def __init__(self, experts: int, hidden: int, width: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor, counts: Tensor, run: Run = plainly) -> Tensor:
        """Return the experts' outputs for rows in the order of experts, `counts` for each."""
        wide = run("expert_up", lambda t: grouped(t, self.up, counts), x, part=self)
        product = run("expert_activation", lambda t: inner((t,), self.activation, gated=True), wide)
        found: Tensor = run("expert_down", lambda t: grouped(t, self.down, counts), product, part=self)
        return found


def grouped(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply rows by the transposed weights of their expert; one kernel on accelerators."""
    if x.is_cuda:
        ends = counts.cumsum(0).to(torch.int32)
        return functional.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    parts = x.split(counts.tolist())
    return torch.cat([functional.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


class Mixture(nn.Module):
    """Norm, routed and shared experts and the residual stream, as one layer of the chain."""

    def __init__(self, shape: Moe, numerics: Numerics) -> None:
        super().__init__()
        self.shape = shape
        self.norm = norm("rms", shape.hidden, numerics)
        self.router = Router(shape, numerics.routing)
        self.balance = numerics.routing.balance
        self.experts = Experts(shape.experts, shape.inner, shape.width, numerics.activation)
        if shape.bottleneck:  # BigMac: tokens are sent at a narrow width
            self.descend = nn.Linear(shape.hidden, shape.inner, bias=False)
            self.ascend = nn.Linear(shape.inner, shape.hidden, bias=False)
        if shape.shared_width:
            self.shared_up = Product(shape.hidden, 2 * shape.shared_width, bias=False)
            self.shared_down = Row(shape.shared_width, shape.hidden, bias=False)
        if shape.shared_gate:
            self.shared_gate = nn.Linear(shape.hidden, 1, bias=False)
        self.layer_name = ""
        self.repeated: frozenset[str] = frozenset()
        self.keeper: Keeper | None = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        mesh = context.mesh
        with operators(self) as run:
            normed, x = run("norm", self.norm.beside, x)
            # Where all ranks of a tensor-parallel group have the same tokens, each routes some of them.
            once = mesh.tp if not mesh.sp else ALONE
            flat = normed.flatten(0, 1)
            h = parted(functional.pad(flat, (0, 0, 0, -len(flat) % once.size)), once, 0)
            weights, experts, scores = self.router(h)
            if context.divisor and torch.is_grad_enabled():
                weights = self._balanced(weights, Routed(scores, experts, context.samples_of_rows()), context)
            narrow = run("descend", self.descend, h) if self.shape.bottleneck else h
            found = self._routed(run, narrow, weights, experts, mesh)
            if self.shape.bottleneck:
                found = run("ascend", self.ascend, found)
            x = x + joined(found, once, 0)[: len(flat)].view_as(x)
            return x + self._shared(run, normed, mesh) if self.shape.shared_width else x

    def _balanced(self, weights: Tensor, routed: Routed, context: Context) -> Tensor:
        """Balance the load of experts: count rows for the bias correction, or add the loss's gradient to the scores."""
        samples = len(context.positions)
        if self.router.routing.corrected and self.layer_name not in context.counted:
            context.counted.add(self.layer_name)  # a recomputed layer counts once
            self.router.count(routed.rows(samples).sum(dim=0))
        if not self.balance:
            return weights
        rows, (tokens, weight) = routed.rows(samples), context.sizes()
        factor, sums = self.balance / context.divisor, routed.sums_of_scores(samples)
        if context.whole is None:
            gradient = factor * sample_gradient(rows, tokens, weight, context.mesh.fellows)
            return with_gradient(weights, sums, lambda: gradient)
        whole, own = context.whole, (routed.samples >= 0).sum().float()
        # these ranks have the same samples, and each a part of their weight
        whole.add(
            self.layer_name, rows.sum(dim=0), own, weight.sum() / context.mesh.fellows.size, context.mesh.everyone
        )
        return with_gradient(weights, sums.sum(dim=0), lambda: factor * whole.gradient())

    def _routed(self, run: Run, h: Tensor, weights: Tensor, experts: Tensor, mesh: SpanMesh) -> Tensor:
        """Send rows to the ranks that own their experts, apply the experts, and send the results back.

        Ranks of an expert's tensor-parallel group (etp) have the same rows, and all-reduce their results.
        """
        own = len(h)
        if mesh.uneven:  # ranks' pieces must be equal: rows of zero weight are added
            missing = most(own, mesh.etp, h.device) - own
            h, weights, experts = (functional.pad(part, (0, 0, 0, missing)) for part in (h, weights, experts))
        h, weights = (gathered(part, mesh.etp, 0) for part in (h, weights))
        experts = gathered(experts, mesh.etp, 0)
        order = experts.flatten().argsort(stable=True)
        token = order // self.shape.top_k
        counts = torch.bincount(experts.flatten(), minlength=self.shape.experts)
        rows = self._elsewhere(run, h, token, counts, mesh) * weights.flatten()[order, None]
        return scattered(torch.zeros_like(h).index_add(0, token, rows), mesh.etp, 0)[:own]

    def _elsewhere(self, run: Run, h: Tensor, token: Tensor, counts: Tensor, mesh: SpanMesh) -> Tensor:
        """Apply experts on the ranks that own them to rows in the order of all experts, `counts` for each."""
        if mesh.ep.size == 1:
            found: Tensor = self.experts(run("dispatch", lambda t: t[token], h), counts, run)
            return found
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=mesh.ep.group)
        theirs = theirs.view(mesh.ep.size, -1)  # (rank, own expert): rows that it sends
        sent, received = counts.view(mesh.ep.size, -1).sum(dim=1).tolist(), theirs.sum(dim=1).tolist()
        # Rows arrive ordered by rank, and are needed ordered by expert.
        own = torch.arange(theirs.shape[1], device=h.device)
        order = own.repeat(mesh.ep.size).repeat_interleave(theirs.flatten()).argsort(stable=True)
        arrived = run("dispatch", lambda t: dispatched(t[token], mesh.ep, sent, received)[order], h)
        done = self.experts(arrived, theirs.sum(dim=0), run)
        return dispatched(done[order.argsort()], mesh.ep, received, sent)

    def _shared(self, run: Run, normed: Tensor, mesh: SpanMesh) -> Tensor:
        """Return the shared experts' output for all tokens; tensor parallelism shards them like a dense layer."""
        wide = widened(run, mesh.enter(normed), self.shared_up, self.repeated, gated=True, prefix="shared_")
        product = run("shared_activation", lambda *t: inner(t, self.experts.activation, gated=True), *wide)
        found: Tensor = run("shared_down", lambda t: self.shared_down(t, mesh), product)
        return found * self.shared_gate(normed).sigmoid() if self.shape.shared_gate else found
