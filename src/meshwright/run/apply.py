"""(model, plan, process) -> the parallel model, in one readable order.

What a plan asks for and this cannot run yet is refused by name before anything is built.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from meshwright.errors import InputError
from meshwright.model import Model
from meshwright.plan import Plan, Span
from meshwright.run.lane import ONE, Groups, Lane
from meshwright.run.loss import next_tokens, token_losses
from meshwright.run.models import Context, Decoder, build
from meshwright.run.sharding import last_micro_batch, local, shard
from meshwright.run.tensor_parallel import cut, partial


@dataclass
class Parallel:
    """The part of a model that one process trains."""

    decoder: Decoder
    lane: Lane
    zero: int = 0  # level at which the replicas shard states

    def loss(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """The sum over the own tokens of whole samples of (batch, sequence), of which `own_samples` are given."""
        context = Context.of(tokens, documents, self.lane)
        logits = self.decoder(self.lane.own(tokens), context)
        return token_losses(logits, self.lane.own(next_tokens(tokens, documents)), self.lane.tp).sum()

    def own_samples(self, batch: Tensor) -> Tensor:
        """The samples of a micro-batch that this process' replica takes."""
        return batch.chunk(self.lane.dp.size)[self.lane.dp.rank]

    def sum_gradients(self) -> None:
        """Over all that hold the same parameters and saw other heads, tokens or samples."""
        for weight in partial(self.decoder, self.lane):
            dist.all_reduce(local(weight.grad), group=self.lane.tp.group)
        experts = {id(weight) for weight in self.decoder.experts()}
        for weight in self.decoder.parameters() if not self.zero else []:
            line = self.lane.expert_replicas if id(weight) in experts else self.lane.replicas
            if line.size > 1:
                dist.all_reduce(weight.grad, group=line.group)

    def before(self, *, last: bool) -> None:
        """Tell it whether the next micro-batch is the last of a step."""
        if self.zero:
            last_micro_batch(self.decoder, self.zero, last=last)


def apply(model: Model, plan: Plan, *, seed: int = 0, groups: Groups | None = None) -> Parallel:
    """Build what this process runs of a plan; fresh weights are the same under every plan.

    Every process of the plan calls it. `groups` keeps process groups for a later plan on the same processes.
    """
    span, ranks = _only_span(plan)
    lane = Lane.of(span, ranks, groups) if len(ranks) > 1 else ONE
    decoder = build(model, seed=seed)
    cut(decoder, lane)
    zero = span.zero if lane.replicas.size > 1 else 0
    if zero:
        shard(decoder, lane, zero, "cpu")
    return Parallel(decoder, lane, zero)


def _only_span(plan: Plan) -> tuple[Span, tuple[int, ...]]:
    """Of a plan of one stage whose layers are all run alike."""
    if len(plan.pipelines) > 1 or len(plan.pipelines[0].stages) > 1:
        raise InputError("pipelines cannot be run yet", field="pp", valid="1")
    stage = plan.pipelines[0].stages[0]
    if len(stage.spans) > 1:
        raise InputError("spans of different strategies cannot be run yet", field="spans", valid="one span")
    span = stage.spans[0]
    for name, usual in (
        ("zero_group", 0),
        ("recompute", "none"),
        ("swap", None),
        ("shares", ()),
    ):
        if getattr(span, name) != usual:
            raise InputError(f"{getattr(span, name)} cannot be run yet", field=name, valid=str(usual))
    return span, stage.ranks
