"""A prepared folder, memory-mapped: one stream of tokens, and the end of each document in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError
from meshwright.run.data.manifest import DOCUMENTS, Manifest, read_manifest


class Dataset:
    """Tokens read from where they are stored; opening takes as long for a megabyte as for a terabyte.

    >>> from meshwright.run.data import prepare
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.jsonl").write_text('{"text": "hi"}\\n{"text": "you"}\\n')
    >>> made = prepare([folder / "a.jsonl"], folder / "tokens")
    >>> data = Dataset(folder / "tokens")
    >>> data.tokens(0, 7).tolist(), data.documents(0, 7).tolist()
    ([104, 105, 256, 121, 111, 117, 256], [0, 0, 0, 1, 1, 1, 1])
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = read_manifest(self.folder)
        kind = np.dtype(f"<u{self.manifest.width}")
        self._shards = [np.memmap(self.folder / shard.file, kind, "r") for shard in self.manifest.shards]
        self._capacity = len(self._shards[0])
        self._ends = np.memmap(self.folder / DOCUMENTS, "<i8", "r")
        if self._ends[-1] != self.manifest.tokens:
            raise self._damaged(DOCUMENTS, f"its last document ends at {self._ends[-1]}, not {self.manifest.tokens}")

    def tokens(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return a range of the stream."""
        parts = []
        for shard in range(start // self._capacity, (stop - 1) // self._capacity + 1):
            at = shard * self._capacity
            parts.append(self._shards[shard][max(start - at, 0) : stop - at])
        found = np.concatenate(parts).astype(np.int64)
        if found.max(initial=0) >= self.manifest.vocabulary:  # would be an illegal read on the device
            problem = f"token {found.max()} in a vocabulary of {self.manifest.vocabulary}"
            raise self._damaged(self.manifest.shards[start // self._capacity].file, problem)
        return found

    def documents(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the document of every token in a range, numbered from 0."""
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right")
        ends = np.minimum(self._ends[first : last + 1], stop)
        lengths = np.diff(ends, prepend=start)
        if len(ends) != last - first + 1 or (lengths < 1).any():
            raise self._damaged(DOCUMENTS, "its ends do not rise")
        return np.repeat(np.arange(len(ends)), lengths)

    def bounds(self, document: int) -> tuple[int, int]:
        """Return the bounds of a document in the stream."""
        start = int(self._ends[document - 1]) if document else 0
        stop = int(self._ends[document])
        if not 0 <= start < stop <= self.manifest.tokens:
            raise self._damaged(DOCUMENTS, "its ends do not rise")
        return start, stop

    def _damaged(self, name: str, problem: str) -> InputError:
        return InputError(f"is damaged: {problem}", file=str(self.folder / name), valid="prepare it again")
