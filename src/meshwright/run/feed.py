"""Micro-batches of a process, step by step: it reads the samples that its stages need, and no others."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.run.data import Source
from meshwright.run.data.device import device_batches
from meshwright.run.parallel import Parallel
from meshwright.run.part import MicroBatch


class Feed:
    """(step, micro-batches) of a range of steps, read ahead of their use."""

    def __init__(self, source: Source, part: Parallel, steps: range, device: str) -> None:
        self.part = part
        self._rows = [range(*part.rows(i)) for i in range(part.plan.pipelines[part.pipeline].micro_batches)]
        every = [row for rows in self._rows for row in rows]
        self._batches = device_batches(source, every, device, first=steps.start, last=steps.stop)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self._batches.close()

    def __iter__(self) -> Iterator[tuple[int, list[MicroBatch]]]:
        sizes = [len(rows) for rows in self._rows]
        for batch in self._batches:
            tokens = batch.tokens.split(sizes)
            documents = [None] * len(sizes) if batch.documents is None else batch.documents.split(sizes)
            pairs = enumerate(zip(tokens, documents, strict=True))
            yield batch.step, [self.part.batch(i, batch.step, some, which) for i, (some, which) in pairs]
