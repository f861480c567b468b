"""Input files, and the pieces they are read in: small, in order, each readable without the others."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError

KINDS = (".txt", ".jsonl", ".parquet")
PIECE = 2**20  # bytes of text that are tokenised at a time
_VALID = f"{', '.join(KINDS)} files, folders of them, or patterns such as 'corpus/*.jsonl'"


@dataclass(frozen=True)
class Piece:
    """Lines of a text file that begin in [start, stop), or a row group [start] of a Parquet file."""

    file: str
    start: int
    stop: int
    weight: int  # bytes of the file that the piece stands for
    last: bool  # last piece of its file

    @property
    def kind(self) -> str:
        return Path(self.file).suffix.lower()


def find_files(inputs: Sequence[str | Path]) -> list[str]:
    """Return the files of all inputs in the given order, those of a folder or pattern by name; each once."""
    found: dict[str, None] = {}
    for text in map(str, inputs):
        path = Path(text)
        if path.is_dir():
            files = [str(p) for p in sorted(path.rglob("*")) if p.suffix.lower() in KINDS and p.is_file()]
            problem = "is a folder that holds no text"
        elif path.exists() or not glob.has_magic(text):
            files, problem = [text], ""
        else:
            files = sorted(name for name in glob.glob(text, recursive=True) if os.path.isfile(name))
            problem = "matches no file"
        if not files:
            raise InputError(problem, file=text, valid=_VALID)
        found |= dict.fromkeys(files)
    if not found:
        raise InputError("is needed", field="INPUT", valid=_VALID)
    for name in found:
        _check(Path(name))
    return list(found)


def _check(path: Path) -> None:
    if not path.exists():
        raise InputError("no such file", file=str(path))
    if path.suffix.lower() not in KINDS:
        raise InputError(
            f"ends in '{path.suffix}', which is none of the kinds that are read", file=str(path), valid=_VALID
        )
    if not os.access(path, os.R_OK):
        raise InputError("cannot be read: permission denied", file=str(path))


def pieces(files: Sequence[str], field: str) -> Iterator[Piece]:
    """Yield every piece of every file, in order."""
    for file in files:
        size = os.path.getsize(file)
        if file.lower().endswith(".parquet"):
            groups = _row_groups(file, field)
            for group in range(groups):
                yield Piece(file, group, group + 1, size // groups, last=group + 1 == groups)
        else:
            for start in range(0, max(size, 1), PIECE):
                stop = min(start + PIECE, size)
                yield Piece(file, start, stop, stop - start, last=stop == size)


def parquet_file(file: str) -> Any:
    """Open a Parquet file; pyarrow is only imported here."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise InputError("needs pyarrow to be read", file=file, valid="pip install 'meshwright[data]'") from None
    try:
        return pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"is not a Parquet file: {str(error).splitlines()[0]}", file=file) from None


def _row_groups(file: str, field: str) -> int:
    with parquet_file(file) as opened:
        columns = {column.name: str(column.type) for column in opened.schema_arrow}
        if columns.get(field) not in {"string", "large_string"}:
            problem = f"is {columns[field]}, expected text" if field in columns else "there is no such column"
            texts = [name for name, kind in columns.items() if kind in {"string", "large_string"}]
            raise InputError(problem, file=file, field=field, valid=", ".join(texts) or "a file with a column of text")
        return int(opened.num_row_groups)
