"""Sums of gradients over replicas that hold everything alike (ZeRO 0), hidden under the backward pass.

Gradients are summed in buckets, the last layers first, as soon as a bucket is complete (Li et al., "PyTorch Distributed",
2020). Buckets start in one fixed order, so that all replicas agree on it whatever becomes ready first. Some may travel
compressed, in buckets of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.compression.sync import Gradients, Synchroniser
from meshwright.run.mesh.collectives import AxisGroup
from meshwright.run.mesh.mesh import SpanMesh
from meshwright.run.models import Decoder
from meshwright.run.parallel.compression import Synchronisers
from meshwright.run.parallel.fsdp import no_gradient

# Bytes of a bucket: large enough for the links; small models still get several, so that sums start early.
_LEAST, _MOST, _SEVERAL = 2**20, 25 * 2**20, 16


class BucketedAllReduce:
    """All-reduce of the gradients of one span, in buckets; not `early`: all after the backward pass."""

    def __init__(self, decoder: Decoder, mesh: SpanMesh, ways: Synchronisers, *, early: bool = True) -> None:
        self.early = early
        experts = {id(weight) for weight in decoder.experts()}
        trained = [weight for weight in decoder.parameters() if weight.requires_grad][::-1]
        trained = [weight for weight in trained if not isinstance(weight, DTensor)]  # whose sums `fully_shard` makes
        bucket = min(max(sum(weight.nbytes for weight in trained) // _SEVERAL, _LEAST), _MOST)
        self.buckets = [
            _Bucket(axis, some, ways)
            for axis, weights in (
                (mesh.replicas, [weight for weight in trained if id(weight) not in experts]),
                (mesh.expert_replicas, [weight for weight in trained if id(weight) in experts]),
            )
            if axis.size > 1
            for some in _filled(weights, bucket, ways)
        ]
        for i, each in enumerate(self.buckets):
            each.number, each.ends = i, all(each.sync is not other.sync for other in self.buckets[i + 1 :])
        self._of = {id(weight): each for each in self.buckets for weight in each.weights}
        self._started, self._under_way = 0, False
        for each in self.buckets:
            for weight in each.weights:
                weight.register_post_accumulate_grad_hook(self._ready)

    def begin(self) -> None:
        """The next backward pass is the last of a step."""
        self._started, self._under_way = 0, self.early
        for bucket in self.buckets:
            bucket.missing = len(bucket.weights)

    def _ready(self, weight: Tensor) -> None:
        if not self._under_way:
            return
        self._of[id(weight)].missing -= 1
        while self._started < len(self.buckets) and self.buckets[self._started].missing == 0:
            self.buckets[self._started].start()
            self._started += 1

    def finish(self) -> None:
        """After the last backward pass: what has not started starts, and all is waited for."""
        for bucket in self.buckets[self._started if self._under_way else 0 :]:
            bucket.start()
        self._under_way = False
        for bucket in self.buckets:
            bucket.finish()


class _Bucket:
    def __init__(self, axis: AxisGroup, weights: list[Tensor], ways: Synchronisers) -> None:
        self.axis, self.weights = axis, weights
        self.missing = len(weights)
        self.number, self.ends = 0, False  # its place among all; whether it is the last that its synchroniser gets
        rule = ways.rules.get(id(weights[0]))
        self.sync: Synchroniser | None = ways.synchroniser(axis, rule) if rule else None
        self._gradients = Gradients(
            tuple(weight.key for weight in weights), tuple(tuple(weight.shape) for weight in weights)
        )
        self._flat: Tensor | None = None
        self._work: Any = None

    def start(self) -> None:
        for weight in self.weights:
            if weight.grad is None:
                weight.grad = no_gradient(weight)
        grads = [weight.grad for weight in self.weights]
        # Sums over many replicas are rounded once: in float32.
        alone = grads[0] if len(grads) == 1 and grads[0].is_contiguous() and grads[0].dtype == torch.float32 else None
        self._flat = torch.cat([grad.flatten().float() for grad in grads]) if alone is None else alone.view(-1)
        if self.sync:
            self._work = self.sync.submit(self._flat, self._gradients, self.number, last=self.ends)
        else:
            self._work = dist.all_reduce(self._flat, group=self.axis.group, async_op=True)

    def finish(self) -> None:
        assert self._flat is not None
        if self.sync:
            self.sync.wait(self._work)
        else:
            self._work.wait()
        at = 0
        for weight in self.weights:
            if self._flat.data_ptr() != weight.grad.data_ptr():
                weight.grad.copy_(self._flat[at : at + weight.numel()].view_as(weight))
            at += weight.numel()
        self._flat = self._work = None  # gloo's work holds the gradients that it summed


def _filled(weights: Sequence[Tensor], bytes_: int, ways: Synchronisers) -> list[list[Tensor]]:
    """Consecutive weights of one type that travel alike, of about so many bytes together."""
    found: list[list[Tensor]] = []
    size, kind = 0, None
    for weight in weights:
        before, kind = kind, (weight.dtype, id(ways.rules.get(id(weight))))
        if not found or size >= bytes_ or kind != before:
            found.append([])
            size = 0
        found[-1].append(weight)
        size += weight.nbytes
    return found
