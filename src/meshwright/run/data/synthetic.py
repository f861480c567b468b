"""Learnable tokens that need no files: a sparse Markov chain over a part of any vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.run.data.batches import Samples, Split, check_rows
from meshwright.run.data.shuffle import Numbers, mixed

_STATES = 256  # maximum: the loss falls within a few dozen steps, however large the vocabulary is
_PHRASE = 64  # tokens between two starts of the chain, so that a long sample needs few steps in Python
# Each token has four successors, with probabilities 1/2, 1/4, 1/8, 1/8: 1.21 nats.
_CHOICES = np.array([0, 0, 0, 0, 1, 1, 2, 3])


class Synthetic:
    """Synthetic samples with the interface of `Batches`; a sample depends on the seed, the step and the row.

    >>> first = Synthetic(vocabulary=1000, seq_len=8, global_batch=4, seed=0).samples(step=0, rows=[2])
    >>> first.tokens.shape, bool((first.tokens < 1000).all()), first.documents is None
    ((1, 8), True, True)
    """

    def __init__(self, *, vocabulary: int, seq_len: int, global_batch: int, seed: int, split: Split = "train") -> None:
        self.vocabulary, self.seq_len, self.global_batch = vocabulary, seq_len, global_batch
        self._stream = int(mixed(seed, int(split == "evaluation")))
        states = min(vocabulary, _STATES)
        self._names = np.arange(states) * (vocabulary // states)  # spread over the vocabulary
        self._next = _table(seed, states)

    def samples(self, step: int, rows: Sequence[int]) -> Samples:
        """Return some rows, of 0 .. global_batch-1, of a step."""
        places = step * self.global_batch + check_rows(step, rows, self.global_batch)
        phrases = -(-self.seq_len // _PHRASE)
        cells = np.arange(phrases * _PHRASE, dtype=np.uint64).reshape(phrases, _PHRASE)
        chance = mixed(self._stream, places.astype(np.uint64)[:, None, None], cells)
        states = self._walk(chance).reshape(len(places), phrases * _PHRASE)
        return Samples(self._names[states[:, : self.seq_len]], None)

    def _walk(self, chance: Numbers) -> NDArray[np.int64]:
        states = np.empty(chance.shape, np.int64)
        states[..., 0] = chance[..., 0] % np.uint64(len(self._names))
        choices = _CHOICES[(chance >> np.uint64(61)).astype(np.int64)]
        for i in range(1, _PHRASE):
            states[..., i] = self._next[states[..., i - 1], choices[..., i]]
        return states


def _table(seed: int, states: int) -> NDArray[np.int64]:
    """Return the four possible successors of each state."""
    cells = np.arange(4 * states, dtype=np.uint64).reshape(states, 4)
    return (mixed(seed, 2, cells) % np.uint64(states)).astype(np.int64)
