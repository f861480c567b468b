"""What one process trains of one stage: its spans of layers, each cut its own way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.compression.sync import Synchroniser
from meshwright.run.mesh.mesh import SpanMesh
from meshwright.run.mesh.shards import Interval, Layout
from meshwright.run.models import Context, Decoder
from meshwright.run.models.balance import Balance, Totals
from meshwright.run.models.dropout import Masks
from meshwright.run.parallel.ddp import BucketedAllReduce
from meshwright.run.parallel.fsdp import Sharding, finish, last_micro_batch
from meshwright.run.parallel.redistribute import Bridge, Holding, redistributed

# What a token should be followed by.


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


class Part(nn.Module):
    """The spans of one stage, one after the other."""

    def __init__(self, spans: Sequence[SpanPart], rank: int, seed: int, balance: Balance, *, last: bool) -> None:
        super().__init__()
        self.seed, self.balance = seed, balance
        self.spans = list(spans)
        self.last = last
        self.decoders = nn.ModuleList([span.decoder for span in spans])
        self.own = [span.holdings[rank].samples for span in spans]

    def forward(self, x: Tensor | None, batch: MicroBatch, divisor: float, *, halved: bool = False) -> Tensor:
        """What the stage before hands on (nothing: tokens) -> what the next takes, or the loss over `divisor`.

        The loss is the sum over the tokens that this process has.
        """
        whole = Totals() if self.balance == "batch" else None
        for span, samples in zip(self.spans, self.own, strict=True):
            tokens, documents = batch.own(samples)
            masks = batch.masks(self.seed, samples) if torch.is_grad_enabled() else None
            context = Context.of(tokens, documents, span.mesh, divisor, halved=halved, masks=masks, whole=whole)
            if span.enter and x is not None:
                x = redistributed(x, *span.enter)
            targets = span.mesh.own(next_tokens(tokens, documents)) if "head" in span.decoder.names else None
            x = span.decoder(span.mesh.own(tokens) if x is None else x, context, targets)
        assert x is not None
        return x / divisor if self.last else x

    def predicted(self, batch: MicroBatch) -> Tensor:
        """How many of its tokens have a next one, in the last stage."""
        tokens, documents = batch.own(self.own[-1])
        return (self.spans[-1].mesh.own(next_tokens(tokens, documents)) >= 0).sum()

    def before(self, *, last: bool, split: bool) -> None:
        """Tell it whether the next backward pass is the last of a step, and whether it comes in two halves."""
        for span in self.spans:
            if span.sharding:
                last_micro_batch(span.decoder, span.sharding, last=last, late=split or not span.early)
            if span.reduction and last:
                span.reduction.begin()

    def after(self, *, split: bool) -> None:
        """After the last backward pass of a step."""
        for span in self.spans:
            if span.sharding and (split or not span.early):
                finish(span.decoder, gathered=split)
