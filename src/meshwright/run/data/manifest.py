"""The manifest of a prepared folder. It describes the files, so that damage is noticed before training."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from meshwright.base.files import pretty_json, read_json, write_text
from meshwright.base.tables import Table, convert
from meshwright.errors import InputError, kind_of

MANIFEST = "manifest.json"
DOCUMENTS = "documents.bin"  # where each document ends in the stream of all tokens: little-endian int64
END_BYTES = 8
FORMAT, VERSION = "meshwright tokens", 1
WIDTHS = {"uint16": 2, "uint32": 4}  # bytes of a token, little-endian


class Shard(Table, frozen=True):
    """One file of tokens; every shard but the last is equally long."""

    file: str
    tokens: int
    documents: int  # documents that end in the shard
    bytes: int  # expected size of the file


class Source(Table, frozen=True):
    """Input file, and its size when it was read."""

    file: str
    bytes: int


class Manifest(Table, frozen=True):
    """Contents of a prepared folder. The manifest is written last: a folder without one is unfinished."""

    format: str
    version: int
    tokenizer: str  # `bytes`, or the path of the tokenizer
    vocabulary: int  # every token is smaller
    end_of_document: int  # the token that ends every document
    dtype: Literal["uint16", "uint32"]
    tokens: int
    documents: int
    empty: int  # documents without a token, left out
    skipped: int  # bad lines, left out
    shards: tuple[Shard, ...]
    sources: tuple[Source, ...]

    @property
    def width(self) -> int:
        """Bytes of a token."""
        return WIDTHS[self.dtype]

    def write(self, folder: Path) -> None:
        """Write the manifest into the folder that it describes."""
        import msgspec

        write_text(folder / MANIFEST, pretty_json(msgspec.to_builtins(self)))


def dtype_for(vocabulary: int) -> Literal["uint16", "uint32"]:
    """Return the narrower type that holds every token.

    >>> dtype_for(65536), dtype_for(65537)
    ('uint16', 'uint32')
    """
    return "uint16" if vocabulary <= 2**16 else "uint32"


def is_prepared(folder: Path) -> bool:
    """Return True if a folder has a manifest of ours; the folder may still be damaged."""
    try:
        table = read_json(folder / MANIFEST)
    except InputError:
        return False
    return isinstance(table, dict) and table.get("format") == FORMAT


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's manifest; check its format, its version and the sizes of the files it lists."""
    if not folder.is_dir():
        problem = "is a file, expected a folder" if folder.exists() else "no such folder"
        raise InputError(problem, file=str(folder), valid="a folder that `meshwright prepare` wrote")
    path = folder / MANIFEST
    if not path.exists():
        raise InputError(f"is not prepared: it holds no {MANIFEST}", file=str(folder), valid="meshwright prepare")
    table = read_json(path)
    if not isinstance(table, dict):
        raise InputError(f"expected an object, got {kind_of(table)}", file=str(path))
    if table.get("format") != FORMAT:
        raise InputError(f"is {table.get('format')!r}", file=str(path), field="format", valid=FORMAT)
    if table.get("version") != VERSION:
        problem = f"is {table.get('version')!r}, which this version of meshwright does not read"
        raise InputError(problem, file=str(path), field="version", valid=str(VERSION))
    found = convert(table, Manifest, file=str(path))
    _check_sums(found, path)
    _check_sizes(found, folder)
    return found


def _check_sums(found: Manifest, path: Path) -> None:
    """Raise if the numbers of a manifest disagree: an edited one must not send reads out of bounds."""
    problems = {
        "shards": not found.shards or any(s.tokens < 1 or s.bytes != s.tokens * found.width for s in found.shards),
        "tokens": found.tokens != sum(shard.tokens for shard in found.shards),
        "documents": not 0 < found.documents == sum(shard.documents for shard in found.shards),
        "dtype": found.dtype != dtype_for(found.vocabulary),
        "end_of_document": not 0 <= found.end_of_document < found.vocabulary,
    }
    uneven = len({shard.tokens for shard in found.shards[:-1]}) > 1
    for field, wrong in (problems | {"shards": problems["shards"] or uneven}).items():
        if wrong:
            raise InputError("does not agree with the rest of the manifest", file=str(path), field=field)


def _check_sizes(found: Manifest, folder: Path) -> None:
    sizes = {shard.file: shard.bytes for shard in found.shards} | {DOCUMENTS: found.documents * END_BYTES}
    for name, needed in sizes.items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"is missing; {MANIFEST} says it has {needed:,} bytes", file=str(path))
        if (there := path.stat().st_size) != needed:
            what = "truncated" if there < needed else "damaged"
            raise InputError(f"is {what}: it has {there:,} bytes, {MANIFEST} says {needed:,}", file=str(path))
