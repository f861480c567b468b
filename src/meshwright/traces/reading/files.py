"""Read the text of a trace file: plain, gzip or zstd, recognised by the first bytes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from meshwright.errors import InputError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
SLICE = 16 << 10  # compressed bytes per read: traces compress 12 to 30 times
# Bytes of text per decompression step: so much is lost before the damage in a gzip file. From 128 KB on, the system
# would hand out each buffer anew, page by page, which takes as long as the decompression.
PIECE = 96 << 10


class TextFile:
    """Text of a file, read in pieces.

    `broken` says what ended it early, or is "".
    """

    def __init__(self, path: Path) -> None:
        self.broken = ""
        self.path = path
        try:
            with path.open("rb") as file:
                first = file.read(4)
            self._new = _unpacker(first)
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", file=str(path)) from error
        except InputError as error:
            raise error.at(file=str(path)) from None
        self._magic = GZIP if first.startswith(GZIP) else ZSTD
        self._unpack = self._new() if self._new else None
        self._packed = b""  # read, not yet decompressed
        self._made = memoryview(b"")  # decompressed, not yet taken

    def __enter__(self) -> TextFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def readinto(self, room: memoryview) -> int:
        """Fill `room` with the next text; return the number of bytes, 0 at the end."""
        try:
            if self._new is None:
                return self._file.readinto(room) or 0
            while not self._made:
                if not self._unpacked(min(len(room), PIECE)):
                    return 0
        except OSError as error:
            self.broken = f"reading failed: {error.strerror}"
            return 0
        taken = min(len(room), len(self._made))
        room[:taken] = self._made[:taken]
        self._made = self._made[taken:]
        return taken

    def _unpacked(self, most: int) -> bool:
        """Decompress what was read, or read on, for one step; return False at the end."""
        if self._unpack is None or self.broken:
            return False
        if self._unpack.eof and not self._next_member():
            return False
        if not self._packed:
            self._packed = self._file.read(SLICE)
        at_end = not self._packed  # then the decompressor may still hold text
        try:
            if self._magic == GZIP:
                made = self._unpack.decompress(self._packed, most)
                self._packed = self._unpack.unconsumed_tail
            else:
                made = self._unpack.decompress(self._packed)
                self._packed = b""
        except Exception as error:  # zlib, isal and zstandard each have their own error, without a common base
            self.broken = f"the packed file is damaged: {error}"
            return False
        if at_end and not made and not self._unpack.eof:
            self.broken = "the packed file is cut off"
            return False
        self._made = memoryview(made)
        return True

    def _next_member(self) -> bool:
        """Start the next of several concatenated members; return False if the rest is padding."""
        assert self._unpack is not None
        assert self._new is not None
        rest = self._unpack.unused_data or self._packed
        while len(rest) < len(self._magic) and (read := self._file.read(SLICE)):
            rest += read
        if not rest.startswith(self._magic):
            self._unpack = None
            return False
        self._packed, self._unpack = rest, self._new()
        return True


def _unpacker(first: bytes) -> Callable[[], Any] | None:
    """Return the constructor of decompressors for a file that begins so; None for plain text."""
    if first.startswith(GZIP):
        with suppress(ImportError):
            from isal import isal_zlib

            return lambda: isal_zlib.decompressobj(wbits=31)
        return lambda: zlib.decompressobj(wbits=31)
    if first.startswith(ZSTD):
        try:
            import zstandard
        except ImportError as error:
            raise InputError("is packed with zstd", valid="pip install 'meshwright[traces]'") from error
        return lambda: zstandard.ZstdDecompressor().decompressobj()
    return None
