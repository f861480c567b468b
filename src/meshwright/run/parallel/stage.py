"""The part of one pipeline stage on this rank: spans of layers, each with its own mesh.

A stage computes. The executor sends and receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.compression.sync import Synchroniser
from meshwright.run.mesh.mesh import SpanMesh
from meshwright.run.mesh.shards import Interval, Layout
from meshwright.run.models import Context, Decoder
from meshwright.run.models.balance import Balance, Totals
from meshwright.run.models.dropout import Masks
from meshwright.run.parallel.ddp import BucketedAllReduce
from meshwright.run.parallel.fsdp import Sharding, finish, last_micro_batch
from meshwright.run.parallel.redistribute import Bridge, Holding, redistributed
from meshwright.run.parallel.tensor_parallel import Partial
from meshwright.run.torch_private import can_split, stage_backward, stage_backward_input, stage_backward_weight


def next_tokens(tokens: Tensor, documents: Tensor | None = None, ignored: int = -100) -> Tensor:
    """The next of its document, for every token; a document below 0 is padding.

    >>> next_tokens(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 0, 1, -1]]))
    tensor([[   6, -100, -100, -100]])
    """
    found = torch.full_like(tokens, ignored)
    found[:, :-1] = tokens[:, 1:]
    if documents is not None:
        same = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
        found[:, :-1] = found[:, :-1].where(same, ignored)
    return found


@dataclass(frozen=True)
class MicroBatch:
    """Whole samples of a micro-batch, from some sample on: (sample, sequence)."""

    tokens: Tensor
    documents: Tensor | None = None
    first: int = 0  # number in the micro-batch of the first sample
    row: int = 0  # number in the global batch of the first sample
    step: int = 0  # from 0

    def own(self, samples: Interval) -> tuple[Tensor, Tensor | None]:
        """Tokens and documents of some samples."""
        rows = slice(samples[0] - self.first, samples[1] - self.first)
        return self.tokens[rows], None if self.documents is None else self.documents[rows]

    def masks(self, seed: int, samples: Interval) -> Masks:
        """Return where the dropout masks of some samples come from."""
        return Masks(seed, self.step, self.row + samples[0] - self.first)


@dataclass
class SpanPart:
    """Consecutive layers that are cut alike."""

    number: tuple[int, int, int]  # pipeline, stage, span
    decoder: Decoder
    mesh: SpanMesh
    layouts: dict[str, Layout]
    holdings: dict[int, Holding]  # of every process of the stage
    enter: tuple[Bridge, Bridge] | None = None  # from the span before in the same stage, and back
    sharding: Sharding | None = None  # what is gathered before it is used
    reduction: BucketedAllReduce | None = None  # over replicas that hold everything alike
    synchronisers: Sequence[Synchroniser] = ()  # of gradients that travel compressed
    early: bool = True  # gradients are summed under the backward pass
    partial: Sequence[Partial] = ()  # parameters whose gradients members of a tensor-parallel line sum


class Stage:
    """The spans of one stage, one after the other, and what it keeps of the micro-batches of a step."""

    def __init__(
        self, spans: Sequence[SpanPart], index: int, of: int, rank: int, *, seed: int, balance: Balance,
        micro_batches: int, halved: bool,
    ) -> None:  # fmt: skip
        """Stand at place `index` of so many stages; `halved`: backward passes of its pipeline come in two halves."""
        self.spans, self.index, self.is_last = list(spans), index, index == of - 1
        self.seed, self.balance = seed, balance
        self.micro_batches, self.halved = micro_batches, halved
        self.splits = can_split()  # else the first half of a backward pass is all of it
        self.own = [span.holdings[rank].samples for span in spans]
        self.begin()

    def parameters(self) -> Iterator[Any]:
        """Return those of all spans."""
        return (weight for span in self.spans for weight in span.decoder.parameters())

    def begin(self) -> None:
        """Forget the micro-batches of the last step."""
        self._inputs: dict[int, Tensor | None] = {}
        self._outputs: dict[int, Tensor] = {}
        self._second_halves: dict[int, Callable[[], Any]] = {}
        self._backwards = 0
        self.predicted: Tensor | int = 0  # tokens of the last stage that have a next one

    def forward(
        self, micro_batch: int, x: Tensor | None, batch: MicroBatch, divisor: float, *, backward: bool
    ) -> Tensor:
        """Return what the next stage takes, or the sum of the losses of the own tokens over `divisor`, without a graph.

        `x` is what the stage before hands on; the first stage takes tokens. `backward`: keep what a backward pass needs.
        """
        given = x = None if x is None else x.requires_grad_(backward)
        whole = Totals() if self.balance == "batch" else None
        with torch.set_grad_enabled(backward):
            for span, samples in zip(self.spans, self.own, strict=True):
                tokens, documents = batch.own(samples)
                masks = batch.masks(self.seed, samples) if backward else None
                context = Context.of(
                    tokens, documents, span.mesh, divisor, halved=self.halved, masks=masks, whole=whole
                )
                if span.enter and x is not None:
                    x = redistributed(x, *span.enter)
                targets = None
                if "head" in span.decoder.names:
                    targets = span.mesh.own(next_tokens(tokens, documents))
                    self.predicted += (targets >= 0).sum()
                x = span.decoder(span.mesh.own(tokens) if x is None else x, context, targets)
            assert x is not None
            output = x / divisor if self.is_last else x
        if backward:
            self._inputs[micro_batch], self._outputs[micro_batch] = given, output
        return output.detach()

    def backward(self, micro_batch: int, grad: Tensor | None, *, whole: bool) -> Tensor | None:
        """Return the gradient of the stage's input, from that of its output; the last stage begins with its loss.

        Not `whole`: gradients of weights are left for `backward_weights`.
        """
        x, output = self._inputs.pop(micro_batch), self._outputs.pop(micro_batch)
        self._backwards += 1
        last = self._backwards == self.micro_batches and not self.halved
        for span in self.spans:
            if span.sharding:
                last_micro_batch(span.decoder, span.sharding, last=last, late=self.halved or not span.early)
            if span.reduction and last:
                span.reduction.begin()
        if x is None:
            everything = partial(stage_backward, output, grad, ())
            if whole:
                everything()
            else:  # nobody waits for a gradient: all of it is left for the second half
                self._second_halves[micro_batch] = everything
            return None
        if whole or not self.splits:
            found = stage_backward(output, grad, (x,))
        else:
            found, groups = stage_backward_input([output], None if grad is None else [grad], [x], self.parameters())
            self._second_halves[micro_batch] = lambda: stage_backward_weight(self.parameters(), groups)
            x.grad = None
        return found[0]

    def backward_weights(self, micro_batch: int) -> None:
        """Compute the gradients of weights that `backward` left."""
        if micro_batch in self._second_halves:
            self._second_halves.pop(micro_batch)()

    def finish(self) -> None:
        """Sum sharded gradients that were left whole, after the last action of a step."""
        for span in self.spans:
            if span.sharding and (self.halved or not span.early):
                finish(span.decoder, gathered=self.halved)
