"""Read the next steps and copy them to the device while this one is computed."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.run.data.batches import Source
from meshwright.run.parallel.parallel_model import Parallel
from meshwright.run.parallel.stage import MicroBatch

# Micro-batches of a rank, step by step: it reads only the samples that its stages need.


class Feed:
    """Iterator of (step, micro-batches) over a range of steps, read ahead."""

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


@dataclass(frozen=True)
class Batch:
    """Rows of a step on one rank's device."""

    step: int
    tokens: Tensor  # (rows, seq_len), int64
    documents: Tensor | None


class DeviceBatches:
    """Steps in order, read and copied by a thread at most `depth` steps ahead; see `device_batches`."""

    def __init__(self, source: Source, rows: Sequence[int], device: torch.device, steps: range, depth: int) -> None:
        self._source, self._rows, self._device, self._steps = source, rows, device, steps
        self._ready: queue.Queue[tuple[Batch, torch.Event | None] | BaseException | None] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, name="meshwright-data", daemon=True)
        self._thread.start()

    def __enter__(self) -> DeviceBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        while not self._closed.is_set():
            found = self._ready.get()
            if found is None or isinstance(found, BaseException):
                self.close()
                if found is not None:
                    raise found
                return
            batch, copied = found
            if copied is not None:
                self._hand_over(batch, copied)
            yield batch

    def close(self) -> None:
        """End the thread, and drop what it has read."""
        self._closed.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):  # the thread may wait for room in the queue
                self._ready.get_nowait()
            self._thread.join(0.01)

    def _read(self) -> None:
        try:
            stream = torch.Stream(self._device) if self._device.type != "cpu" else None
            for step in self._steps:
                if self._closed.is_set():
                    return
                self._ready.put(self._load(step, stream))
            self._ready.put(None)
        except BaseException as error:  # any exception: it is raised in the thread that waits
            self._ready.put(error)

    def _load(self, step: int, stream: torch.Stream | None) -> tuple[Batch, torch.Event | None]:
        found = self._source.samples(step, self._rows)
        if stream is None:
            return Batch(step, *(self._on_device(part) for part in (found.tokens, found.documents))), None
        with stream:
            batch = Batch(step, *(self._on_device(part) for part in (found.tokens, found.documents)))
            return batch, stream.record_event()

    def _on_device(self, part: NDArray[np.int64] | None) -> Tensor | None:
        if part is None:
            return None
        tensor = torch.from_numpy(part)
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)

    def _hand_over(self, batch: Batch, copied: torch.Event) -> None:
        """Make the caller's stream wait for the copy on the device; memory is not reused before that work is done."""
        stream = torch.accelerator.current_stream(self._device)
        stream.wait_event(copied)
        for tensor in (batch.tokens, batch.documents):
            if tensor is not None:
                tensor.record_stream(stream)


def device_batches(
    source: Source,
    rows: Sequence[int],
    device: torch.device | str = "cpu",
    *,
    first: int = 0,
    last: int,
    depth: int = 2,
) -> DeviceBatches:
    """Return the rows of steps first .. last-1 on a device, read ahead. Use it in a `with` block.

    >>> from meshwright.run.data import open_data
    >>> source = open_data("synthetic", vocab=64, seq_len=8, global_batch=4)
    >>> with device_batches(source, range(2), last=3) as steps:
    ...     [(batch.step, tuple(batch.tokens.shape)) for batch in steps]
    [(0, (2, 8)), (1, (2, 8)), (2, (2, 8))]
    """
    return DeviceBatches(source, rows, torch.device(device), range(first, last), depth)
