"""The part of a model that one process trains: what it reads, how it steps, what all processes agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.compression.sync import Synchroniser
from meshwright.plans import Plan
from meshwright.run.mesh.mesh import local
from meshwright.run.mesh.shards import Interval, own_rows
from meshwright.run.models.linear import Product
from meshwright.run.parallel.executor import Executor
from meshwright.run.parallel.fsdp import no_gradient
from meshwright.run.parallel.replica_sync import ReplicaSync
from meshwright.run.parallel.stage import MicroBatch, SpanPart


class Outcome(NamedTuple):
    """Result of one step, reduced over all processes."""

    loss: float  # the sum over all tokens, over the divisor
    tokens: float  # that had a next one
    votes: float  # what the processes said beside it, summed


@dataclass
class Parallel:
    """The part of a model that one process trains."""

    plan: Plan
    pipeline: int  # number of the pipeline that it works in
    spans: list[SpanPart]
    executor: Executor
    copies: ReplicaSync

    def __post_init__(self) -> None:
        self.corrected = sorted(key for key in self.copies.keys if key.endswith(".router.correction"))

    def rows(self, micro_batch: int) -> Interval:
        """Return the samples of the global batch that this process needs of a micro-batch."""
        first = sum(p.batch for p in self.plan.pipelines[: self.pipeline])
        first += micro_batch * self.plan.pipelines[self.pipeline].samples
        own = [samples for stage in self.executor.stages for samples in stage.own]
        return first + min(low for low, _ in own), first + max(high for _, high in own)

    def micro_batches(self, tokens: Tensor, documents: Tensor | None = None, step: int = 0) -> list[MicroBatch]:
        """Return those of this process, from a whole global batch of (sample, sequence)."""
        found = []
        for i in range(self.plan.pipelines[self.pipeline].micro_batches):
            low, high = self.rows(i)
            found.append(self.batch(i, step, tokens[low:high], None if documents is None else documents[low:high]))
        return found

    def batch(self, micro_batch: int, step: int, tokens: Tensor, documents: Tensor | None = None) -> MicroBatch:
        """Return a micro-batch of the samples that `rows` asked for."""
        own = [samples for stage in self.executor.stages for samples in stage.own]
        return MicroBatch(tokens, documents, min(low for low, _ in own), self.rows(micro_batch)[0], step)

    def step(self, batches: Sequence[MicroBatch], divisor: float, votes: float = 0.0) -> Outcome:
        """Return the result of a training step; parameters get the gradients of all tokens, over `divisor`.

        `executor` has its parts, for a step that stops on the way; `sum_gradients` and `outcome` follow them.
        """
        loss = self.executor.step(batches, divisor)
        self.sum_gradients()
        return self.outcome(loss, votes)

    def evaluate(self, batches: Sequence[MicroBatch], divisor: float) -> Outcome:
        """Return the same result without gradients."""
        return self.outcome(self.executor.step(batches, divisor, backward=False))

    def outcome(self, loss: Tensor, votes: float = 0.0) -> Outcome:
        """Return the result of the executor's last step, from the loss of this process and its vote."""
        said = torch.zeros(3, dtype=torch.float64, device=loss.device)
        said[2] = votes
        last = self.executor.stages[-1]
        if (
            last.is_last and not last.spans[-1].mesh.tp.rank
        ):  # all members of a tensor-parallel group have the same losses
            said[0] = loss
            said[1] = last.predicted
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(said)
        return Outcome(*said.tolist())

    def sum_gradients(self) -> None:
        """Sum gradients over all that hold the same parameters and saw other heads, tokens, samples or uses."""
        for span in self.spans:
            if span.reduction:
                span.reduction.finish()
            for part in span.partial:
                if part.weight.requires_grad:
                    _sum_rows(part.weight, part.axis.group, part.first, self.copies.device)
        self.copies.sum_gradients()

    @torch.no_grad()
    def correct_routers(self, speed: float = 1e-3) -> None:
        """After a step: experts that got more rows than the mean are chosen less readily, the others more (DeepSeek-V3)."""
        keys = self.corrected
        if not keys:
            return
        mine = {
            key: module for span in self.spans for key, module, _ in span.decoder.named() if key in keys
        }  # of this process
        device = self.executor.like.device
        sizes = {piece.key: piece.box[0][1] for piece in self.copies.standing if piece.key in keys}
        load = torch.zeros(len(keys), max(sizes.values()), device=device)
        for i, key in enumerate(keys):
            if key in mine and mine[key].load is not None:
                load[i, : sizes[key]] = mine[key].load
                mine[key].load = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(load)
        for key, module in mine.items() if speed else ():
            if not module.weight.requires_grad:
                continue
            rows = load[keys.index(key), : sizes[key]]
            module.correction += speed * (rows.mean() - rows).sign()

    def trained(self) -> int:
        """Return the number of trained elements of the whole model."""
        counted = [piece for piece in self.copies.counted if self.copies.own[piece].weight.requires_grad]
        total = torch.tensor(sum(prod(high - low for low, high in piece.box) for piece in counted))
        if dist.is_initialized() and dist.get_world_size() > 1:
            total = total.to(self.copies.device)
            dist.all_reduce(total)
        return int(total)

    def products(self) -> dict[str, Product]:
        """Matrix products of the blocks, by name."""
        return {name: product for span in self.spans for name, product in span.decoder.products()}

    def synchronisers(self) -> list[Synchroniser]:
        """Return the synchronisers of compressed gradients."""
        return [sync for span in self.spans for sync in span.synchronisers]

    def parameters(self) -> list[Tensor]:
        """Return the parameters of all spans."""
        return [weight for span in self.spans for weight in span.decoder.parameters()]


def _sum_rows(weight: Tensor, group: object, first: int, device: str) -> None:
    if weight.grad is None:
        weight.grad = no_gradient(weight)
    at, count = own_rows(weight)
    some = local(weight.grad)[max(first - at, 0) :]
    if len(some) and first < at + count:
        whole = some.contiguous().to(device)
        dist.all_reduce(whole, group=group)
        if whole.data_ptr() != some.data_ptr():
            some.copy_(whole)
