"""Cross entropy over a vocabulary of which every member of a tensor-parallel line has a part."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.run.collectives import ALONE, Line, summed


def token_losses(logits: Tensor, targets: Tensor, line: Line = ALONE, ignored: int = -100) -> Tensor:
    """Of (.., own part of the vocabulary) logits and targets of (..); nothing where a target is ignored.

    >>> token_losses(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([4.])
    """
    logits = logits.float()
    most = logits.detach().amax(dim=-1)
    if line.size > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=line.group)
    shifted = logits - most.unsqueeze(-1)
    total = summed(shifted.exp().sum(dim=-1), line).log()
    at = targets - line.rank * logits.shape[-1]
    mine = (at >= 0) & (at < logits.shape[-1])
    chosen = shifted.gather(-1, at.where(mine, 0).unsqueeze(-1)).squeeze(-1)
    found = total - summed(chosen * mine, line)
    return found.where(targets != ignored, 0.0)


def next_tokens(tokens: Tensor, documents: Tensor | None = None, ignored: int = -100) -> Tensor:
    """What each token should be followed by: the next of its document."""
    found = torch.full_like(tokens, ignored)
    found[:, :-1] = tokens[:, 1:]
    if documents is not None:
        found[:, :-1] = found[:, :-1].where(documents[:, 1:] == documents[:, :-1], ignored)
    return found
