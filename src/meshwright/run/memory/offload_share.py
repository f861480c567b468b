"""Choose which of many tensors of different sizes are offloaded: a fraction of them, spread evenly."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass
class OffloadShare:
    """Chooser that takes items in turn, so that the taken share stays as close to the fraction as sizes allow.

    >>> half = OffloadShare(0.5)
    >>> [half.takes(8) for _ in range(4)]
    [True, False, True, False]
    """

    fraction: float
    seen: int = 0
    moved: int = 0

    def takes(self, size: int, *, must: bool = False) -> bool:
        """Return True if the next item is taken."""
        self.seen += size
        goes = must or (self.fraction > 0 and self.moved + size / 2 <= self.fraction * self.seen)
        self.moved += size if goes else 0
        return goes


def keep_on_host(weights: Sequence[Tensor], fraction: float, always: Collection[Tensor] = ()) -> None:
    """Mark weights that make up a fraction of all elements: their states will be offloaded.

    Weights in `always`, which are offloaded themselves, count first.

    >>> import torch
    >>> weights = [torch.nn.Parameter(torch.ones(8)) for _ in range(4)]
    >>> keep_on_host(weights, 0.5)
    >>> [on_host(weight) for weight in weights]
    [True, False, True, False]
    """
    share = OffloadShare(fraction)
    for weight in sorted(weights, key=lambda weight: weight not in always):
        if share.takes(weight.numel(), must=weight in always):
            weight.states_on_host = True


def on_host(weight: Tensor) -> bool:
    """Return True if the states of a weight are to be offloaded."""
    return getattr(weight, "states_on_host", False)
