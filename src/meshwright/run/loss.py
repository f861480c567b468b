"""What a token should be followed by."""

from __future__ import annotations

import torch
from torch import Tensor


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
