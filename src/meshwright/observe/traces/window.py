"""The piece of a text that is at hand: what was not yet used moves to the front, more comes behind it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

CHUNK = 2 << 20  # bytes: memory for text is bounded by this, save for a single event that is larger
PADDING = 64  # zero bytes behind the text: scanners look at 16 bytes at once and stop at a zero


class Source(Protocol):
    def readinto(self, room: memoryview, /) -> int:
        """Fill `room` with the next text; how many bytes came, 0 at the end."""
        ...


class Window:
    """`data[start:end]` is at hand; `offset` is the place of `data[0]` in the text.

    >>> import io
    >>> window = Window(io.BytesIO(b"abcdef"), chunk=4)
    >>> window.more(), bytes(window.text())
    (True, b'abcd')
    >>> window.start += 3
    >>> window.more(), bytes(window.text()), window.offset
    (True, b'def', 3)
    """

    def __init__(self, source: Source, chunk: int = CHUNK) -> None:
        self._source, self._chunk = source, chunk
        self.data: NDArray[np.uint8] = np.zeros(chunk + PADDING, np.uint8)
        self.start = self.end = self.offset = 0

    def text(self) -> memoryview:
        return self.data.data[self.start : self.end]

    def more(self) -> bool:
        """Bring further text; False at the end."""
        left = self.end - self.start
        if 2 * left > len(self.data) - PADDING:  # one value that fills the window: a larger one
            data = np.zeros(2 * len(self.data), np.uint8)
            data[:left] = self.data[self.start : self.end]
            self.data = data
        else:
            self.data[:left] = self.data[self.start : self.end].copy()
        self.offset += self.start
        self.start, self.end = 0, left
        last = len(self.data) - PADDING
        while self.end < last and (came := self._source.readinto(self.data.data[self.end : last])):
            self.end += came
        self.data[self.end : self.end + PADDING] = 0
        return self.end > left
