"""What every layer needs beside its input: where tokens stand, and which of them belong together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Context:
    """Of one micro-batch of (batch, sequence) tokens.

    >>> Context.of(torch.zeros(1, 4)).positions
    tensor([[0, 1, 2, 3]])
    """

    positions: Tensor  # (batch, sequence)
    documents: Tensor | None = None  # (batch, sequence): number of the document, where several are packed

    @staticmethod
    def of(tokens: Tensor, documents: Tensor | None = None) -> Context:
        """Positions count from the start of a sample, or of a document."""
        count = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
        if documents is None:
            return Context(count)
        new = torch.ones_like(documents, dtype=torch.bool)
        new[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts = torch.where(new, count, 0).cummax(dim=1).values
        return Context(count - starts, documents)

    def mask(self, window: int = 0) -> Tensor | None:
        """(batch, 1, query, key): which keys a query sees; None where all before it and its own."""
        if self.documents is None and not window:
            return None
        place = torch.arange(self.positions.shape[1], device=self.positions.device)
        behind = place[:, None] - place[None, :]
        seen = behind >= 0
        if window:
            seen = seen & (behind < window)
        seen = seen[None, None]
        if self.documents is not None:
            seen = seen & (self.documents[:, None, :, None] == self.documents[:, None, None, :])
        return seen
