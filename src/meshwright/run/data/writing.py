"""Write the token files of a prepared folder in one pass."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshwright.run.data.manifest import DOCUMENTS, FORMAT, VERSION, WIDTHS, Manifest, Shard, Source, dtype_for
from meshwright.run.data.parsing import Tokens
from meshwright.run.data.tokenizer import Tokenizer

SHARD = 2**30  # bytes of a full shard


class Writer:
    """Writer that cuts one stream of tokens into shards of equal length, so that a position determines its shard."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, shard_bytes: int = SHARD) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._dtype = dtype_for(tokenizer.vocabulary)
        self._capacity = max(1, shard_bytes // WIDTHS[self._dtype])
        self._documents_in_shard: dict[int, int] = {}
        self._tokens = self._last_end = self._documents = self._empty = self._skipped = 0
        self._file: BinaryIO | None = None
        self._ends: BinaryIO = open(folder / DOCUMENTS, "wb")  # noqa: SIM115 - closed with the writer

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _close(self._ends)
        _close(self._file)

    def add(self, found: Tokens) -> None:
        """Append a piece."""
        self._write_ends(found.ends + self._tokens)
        self._write(found.tokens.astype(f"<u{WIDTHS[self._dtype]}"))
        self._empty += found.empty
        self._skipped += found.skipped

    def end_document(self) -> None:
        """End a document that continued over pieces; one without tokens is left out."""
        if self._tokens == self._last_end:
            self._empty += 1
            return
        end = np.array([self._tokenizer.end_of_document], np.uint32)
        self.add(Tokens(end, np.ones(1, np.int64), 0, 0))

    def manifest(self, tokenizer: str, sources: tuple[Source, ...]) -> Manifest:
        """Return the manifest of what has been written."""
        width, counts = WIDTHS[self._dtype], self._documents_in_shard
        sizes = [min(self._capacity, self._tokens - at) for at in range(0, self._tokens, self._capacity)]
        shards = tuple(
            Shard(file=_name(i), tokens=tokens, documents=counts.get(i, 0), bytes=tokens * width)
            for i, tokens in enumerate(sizes)
        )
        return Manifest(
            format=FORMAT, version=VERSION, tokenizer=tokenizer, vocabulary=self._tokenizer.vocabulary,
            end_of_document=self._tokenizer.end_of_document, dtype=self._dtype, tokens=self._tokens,
            documents=self._documents, empty=self._empty, skipped=self._skipped, shards=shards, sources=sources,
        )  # fmt: skip

    def _write_ends(self, ends: NDArray[np.int64]) -> None:
        if not len(ends):
            return
        self._ends.write(ends.astype("<i8").tobytes())
        self._documents += len(ends)
        self._last_end = int(ends[-1])
        for shard, count in zip(*np.unique((ends - 1) // self._capacity, return_counts=True), strict=True):
            self._documents_in_shard[int(shard)] = self._documents_in_shard.get(int(shard), 0) + int(count)

    def _write(self, tokens: NDArray[np.unsignedinteger]) -> None:
        while len(tokens):
            inside = self._tokens % self._capacity
            if not inside:
                _close(self._file)
                self._file = open(self._folder / _name(self._tokens // self._capacity), "wb")  # noqa: SIM115
            now, tokens = np.split(tokens, [self._capacity - inside])
            assert self._file is not None
            self._file.write(now.tobytes())
            self._tokens += len(now)


def _close(file: BinaryIO | None) -> None:
    """Flush the file to the disk, before a manifest lists it."""
    if file and not file.closed:
        file.flush()
        os.fsync(file.fileno())
        file.close()


def _name(shard: int) -> str:
    return f"tokens-{shard:05d}.bin"
