"""Tokenise one piece of a source in a worker process. A bad line is reported by file and number, or counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.base.files import parse_json
from meshwright.errors import InputError, kind_of
from meshwright.run.data.sources import Piece, parquet_file
from meshwright.run.data.tokenizer import Tokenizer

_MARK = b"\xef\xbb\xbf"  # a byte-order mark is no error
_ROWS = 1024  # Parquet rows in memory at a time


@dataclass(frozen=True)
class Tokens:
    """Tokens of one piece. A text file is one document over several pieces, which then have no ends of their own."""

    tokens: NDArray[np.uint32]
    ends: NDArray[np.int64]  # ends of documents, counted from the piece's first token
    empty: int
    skipped: int


@dataclass(frozen=True)
class Parser:
    """Options of reading pieces."""

    tokenizer: Tokenizer
    field: str
    skip_bad: bool

    def __call__(self, piece: Piece) -> Tokens:
        texts: list[str] = []
        skipped = 0
        for place, text in _texts(piece, self.field):
            if isinstance(text, str):
                texts.append(text)
            elif self.skip_bad:
                skipped += 1
            else:
                raise _error(piece, place, text)
        if piece.kind == ".txt":
            (found,) = self.tokenizer.encode(["".join(texts)])
            return Tokens(found, np.zeros(0, np.int64), 0, skipped)
        return self._documents(texts, skipped)

    def _documents(self, texts: list[str], skipped: int) -> Tokens:
        every = [one for one in self.tokenizer.encode(texts) if len(one)]
        end = np.array([self.tokenizer.end_of_document], np.uint32)
        joined = np.concatenate([part for one in every for part in (one, end)]) if every else end[:0]
        ends = np.cumsum([len(one) + 1 for one in every], dtype=np.int64)
        return Tokens(joined, ends, len(texts) - len(every), skipped)


@dataclass(frozen=True)
class _Bad:
    problem: str
    field: str = ""
    column: int = 1


def _texts(piece: Piece, field: str) -> Iterator[tuple[int, str | _Bad]]:
    """Yield (position, text or error) for every document or line of a piece."""
    if piece.kind == ".parquet":
        yield from _rows(piece, field)
        return
    decoder: msgspec.json.Decoder[object] = msgspec.json.Decoder()
    for place, line in _lines(piece):
        if piece.kind == ".txt":
            yield place, _decoded(line)
        elif not line.isspace():
            yield place, _document(line, field, decoder)


def _lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of all lines that begin in the piece.

    A line may be longer than many pieces: only the piece in which it begins reads it to its end.
    """
    with open(piece.file, "rb") as file:
        place = piece.start
        if place:  # the line in which the previous piece ends is not ours
            file.seek(place - 1)
            rest = file.readline(piece.stop - place)
            if not rest.endswith(b"\n"):
                return
            place += len(rest) - 1
        while place < piece.stop and (line := file.readline()):
            yield place, line.removeprefix(_MARK) if not place else line
            place += len(line)


def _decoded(line: bytes) -> str | _Bad:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        return _Bad(f"is not UTF-8 text (byte 0x{line[error.start]:02x})", column=error.start + 1)


def _document(line: bytes, field: str, decoder: msgspec.json.Decoder[object]) -> str | _Bad:
    try:
        table = decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _malformed(line)
    if not isinstance(table, dict):
        return _Bad(f"expected an object, got {kind_of(table)}")
    text = table.get(field)
    if isinstance(text, str):
        return text
    names = ", ".join(list(table)[:8])
    problem = (
        f"expected a string, got {kind_of(text)}" if field in table else f"is missing; the line has {names or 'none'}"
    )
    return _Bad(problem, field)


def _malformed(line: bytes) -> _Bad:
    """Return the error in a line, in the words used for all JSON. The line is parsed again, because bad lines are few."""
    text = _decoded(line)
    if isinstance(text, _Bad):
        return text
    try:
        parse_json(text)
    except InputError as error:
        return _Bad(error.problem, column=error.column or 1)
    return _Bad("malformed JSON")


def _rows(piece: Piece, field: str) -> Iterator[tuple[int, str | _Bad]]:
    with parquet_file(piece.file) as opened:
        place = 0
        for batch in opened.iter_batches(batch_size=_ROWS, row_groups=[piece.start], columns=[field]):
            for value in batch.column(0):
                yield (
                    place,
                    _decoded(value.as_buffer().to_pybytes())
                    if value.is_valid
                    else _Bad("expected a string, got null", field),
                )
                place += 1


def _error(piece: Piece, place: int, bad: _Bad) -> InputError:
    """Return the error of a bad line with its number; earlier lines are counted only now."""
    skip = "a line without mistakes, or meshwright prepare --skip-bad"
    if piece.kind == ".parquet":
        with parquet_file(piece.file) as opened:
            row = place + sum(opened.metadata.row_group(group).num_rows for group in range(piece.start))
        return InputError(bad.problem, file=piece.file, field=f"{bad.field} row {row}".strip(), valid=skip)
    line, left = 1, place
    with open(piece.file, "rb") as file:
        while left and (block := file.read(min(left, 2**20))):
            line, left = line + block.count(b"\n"), left - len(block)
    return InputError(bad.problem, file=piece.file, field=bad.field, line=line, column=bad.column, valid=skip)
