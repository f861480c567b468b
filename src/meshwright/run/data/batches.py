"""Samples of each step, computed from the seed and the step alone, so that nothing else must be saved.

The order knows nothing of ranks or plans. A rank asks for the rows it needs and reads no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError
from meshwright.run.data.dataset import Dataset
from meshwright.run.data.shuffle import mixed, shuffled

Split = Literal["train", "evaluation"]
PADDING = -1  # document number of padding tokens


@dataclass(frozen=True)
class Samples:
    """Rows of a step. `documents` numbers the documents of a sample from 0; -1 is padding."""

    tokens: NDArray[np.int64]  # (rows, seq_len)
    documents: NDArray[np.int64] | None  # the same shape; None where a sample is one document


class Source(Protocol):
    """Data source of training: prepared tokens or synthetic ones."""

    vocabulary: int
    seq_len: int
    global_batch: int

    def samples(self, step: int, rows: Sequence[int]) -> Samples:
        """Return some rows, of 0 .. global_batch-1, of a step."""


class Batches:
    """Samples of a dataset: each one once per epoch, in a new order every epoch."""

    def __init__(
        self, dataset: Dataset, *, seq_len: int, global_batch: int, seed: int, packed: bool = True,
        held_out: float = 0, split: Split = "train",
    ) -> None:  # fmt: skip
        self.vocabulary, self.seq_len, self.global_batch = dataset.manifest.vocabulary, seq_len, global_batch
        self._dataset, self._seed, self._packed, self._split = dataset, seed, packed, split
        self._all = dataset.manifest.tokens // seq_len if packed else dataset.manifest.documents
        self._held = _held_out(held_out, self._all)
        self.count = self._held if split == "evaluation" else self._all - self._held
        if self.count < global_batch:
            whole = f" ({self._held:,} of {self._all:,} are held out for evaluation)" if self._held else ""
            problem = f"holds {self.count:,} samples{whole} for {split}, one step needs {global_batch:,}"
            raise InputError(problem, file=str(dataset.folder), field="global_batch", valid=self._enough())

    def _enough(self) -> str:
        unit = f"samples of {self.seq_len:,} tokens" if self._packed else "documents"
        return f"more {unit}" + (f", or a global batch of at most {self.count:,}" if self.count else "")

    def samples(self, step: int, rows: Sequence[int]) -> Samples:
        """Return some rows, of 0 .. global_batch-1, of a step."""
        read = self._packed_sample if self._packed else self._padded_sample
        found = [read(int(number)) for number in self.numbers(step, rows)]
        shape = (len(found), self.seq_len)
        tokens, documents = (np.array([pair[i] for pair in found], np.int64).reshape(shape) for i in (0, 1))
        return Samples(tokens, documents)

    def numbers(self, step: int, rows: Sequence[int]) -> NDArray[np.int64]:
        """Return the numbers of the dataset's samples that the rows are."""
        places = step * self.global_batch + check_rows(step, rows, self.global_batch)
        chosen = np.empty_like(places)
        for epoch in np.unique(places // self.count):
            here = places // self.count == epoch
            chosen[here] = shuffled(places[here] % self.count, self.count, int(mixed(self._seed, int(epoch))))
        if self._split == "evaluation":  # spread evenly: the j-th of h in n is ceil((j+1) n / h) - 1 ...
            return ((chosen + 1) * self._all + self._held - 1) // self._held - 1
        return chosen * self._all // (self._all - self._held)  # ... and the j-th of the others floor(j n / (n-h))

    def _packed_sample(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        start = number * self.seq_len
        stop = start + self.seq_len
        return self._dataset.tokens(start, stop), self._dataset.documents(start, stop)

    def _padded_sample(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        start, stop = self._dataset.bounds(number)
        tokens = np.full(self.seq_len, self._dataset.manifest.end_of_document)
        documents = np.full(self.seq_len, PADDING)
        length = min(stop - start, self.seq_len)
        tokens[:length] = self._dataset.tokens(start, start + length)
        documents[:length] = 0
        return tokens, documents


def check_rows(step: int, rows: Sequence[int], global_batch: int) -> NDArray[np.int64]:
    """Return rows as an array. A row outside the step is refused: it would silently be a sample of another step."""
    found = np.asarray(rows, np.int64)
    if step < 0 or (len(found) and not 0 <= found.min() <= found.max() < global_batch):
        raise ValueError(f"step {step} has no rows {list(rows)[:8]}: rows are 0 .. {global_batch - 1}")
    return found


def _held_out(asked: float, count: int) -> int:
    """Return the number of held-out samples from a count or a fraction; at least one if any is requested."""
    held = asked if isinstance(asked, int) else max(1, round(asked * count)) if asked else 0
    if asked < 0 or held >= count > 0:
        raise InputError(
            f"{asked} of {count:,} samples leaves none to train on" if asked > 0 else f"is {asked}",
            field="held_out", valid="a fraction below 1, or a count of samples below all",
        )  # fmt: skip
    return held
