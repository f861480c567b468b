"""The files of a checkpoint: each rank's part, its completeness, and the newest whole checkpoint.

`manifest.json` holds one part per rank: its files with size and checksum, counted as they were written. A checkpoint is
whole only if every rank's part of the same run is there, and every file is unchanged.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader

from meshwright.base.files import read_json, replace_texts
from meshwright.base.tables import Table, convert
from meshwright.errors import InputError, TrainingFailed
from meshwright.run.folder.checks import unwritable

FORMAT, VERSION = "meshwright-checkpoint", 2
MANIFEST, INDEX = "manifest.json", ".metadata"
_NAME = re.compile(r"step-(\d{8,})")
_BLOCK = 1 << 24  # bytes per read


class Written(Table, frozen=True):
    """Size and checksum of a file."""

    bytes: int
    crc32: int


class Part(Table, frozen=True):
    """The files that one rank wrote."""

    rank: int
    run: str
    files: dict[str, Written]


class Manifest(Table, frozen=True):
    """Manifest that makes a checkpoint whole."""

    run: str
    step: int
    parts: list[Part]
    facts: dict[str, Any]  # facts that training keeps beside its state
    ranks: int


@dataclass(frozen=True)
class Found:
    """A whole checkpoint."""

    path: Path
    step: int
    facts: dict[str, Any]


class Recorder(FileSystem):
    """PyTorch's file system with sizes and checksums of written files, and our messages for disk errors."""

    def __init__(self) -> None:
        self.files: dict[str, Written] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file for PyTorch."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        stream = None
        try:
            with Path(path).open("wb") as raw:
                stream = _Counted(raw)
                yield stream
            self.files[Path(path).name] = Written(bytes=stream.count, crc32=stream.crc)
        except Exception as error:
            # PyTorch's zip writer replaces the disk's error with one of its own.
            refused = stream.refused if stream and stream.refused else error
            if isinstance(refused, OSError):
                raise unwritable(path, refused) from None
            raise

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file together with its size and checksum."""
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class _Counted:
    """File that is written from its beginning to its end."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.count = self.crc = 0
        self.refused: OSError | None = None

    def write(self, data: Any) -> int:
        if self.refused:
            raise self.refused
        try:
            self._raw.write(data)
        except OSError as error:
            self.refused = error
            raise
        view = memoryview(data)
        self.count, self.crc = self.count + view.nbytes, zlib.crc32(view, self.crc)
        return view.nbytes

    def tell(self) -> int:
        return self.count

    def flush(self) -> None:
        try:
            self._raw.flush()
        except OSError as error:
            self.refused = error
            raise

    def fileno(self) -> int:
        return int(self._raw.fileno())

    def close(self) -> None:
        self._raw.close()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder once every rank has written to it, and make all files survive a power loss."""
    for part in manifest.parts:
        for name, written in part.files.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != written.bytes:
                problem = (
                    f"rank 0 does not see what rank {part.rank} wrote; all nodes must share the folder of --output"
                )
                raise TrainingFailed(f"{file}: {problem}")
    content = {"format": FORMAT, "version": VERSION, **msgspec.structs.asdict(manifest)}
    content["parts"] = msgspec.to_builtins(manifest.parts)
    content = json.loads(json.dumps(content))  # as it will be read, so that the checksum is the same
    try:
        replace_texts({folder / MANIFEST: json.dumps({**content, "crc32": _sum_of(content)}, indent=1) + "\n"})
        sync(folder)
    except OSError as error:
        raise unwritable(folder / MANIFEST, error) from None


def sync(folder: Path) -> None:
    """Make the names in a folder survive a power loss, where the file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def part_of(folder: Path, step: int, run: str) -> Path:
    """Return the path of a run's unfinished checkpoint; two runs never share one."""
    return folder / f"step-{step:08d}.{run}.part"


def put_in_place(part: Path, step: int) -> None:
    """Rename a whole checkpoint into place. An older one of the same step stays until then, and returns if interrupted."""
    target = part.parent / f"step-{step:08d}"
    before = part.parent / f"{target.name}.old"
    if target.exists():
        remove(before)
        target.rename(before)
    part.rename(target)
    sync(part.parent)
    remove(before)


def sweep(folder: Path) -> None:
    """Remove the remains of dead runs from a checkpoint folder that this run holds."""
    for path in folder.glob("step-*.part"):
        remove(path)
    for path in folder.glob("step-*.old"):
        target = path.with_suffix("")
        if target.exists():
            remove(path)
        else:
            path.rename(target)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it can be."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def names(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder that have a whole one's name, newest first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def latest(folder: str | Path) -> tuple[Found | None, list[str]]:
    """Return the newest whole checkpoint, with the damage of newer ones."""
    problems: list[str] = []
    for path in names(Path(folder)):
        try:
            manifest = _whole(path)
        except InputError as error:
            problems.append(f"{path.name}: {_words(error)}")
        else:
            return Found(path, manifest.step, manifest.facts), problems
    return None, problems


def damage(path: Path) -> str:
    """Return what is wrong with a checkpoint, or an empty string if it is whole."""
    try:
        _whole(path)
    except InputError as error:
        return _words(error)
    return ""


def _words(error: InputError) -> str:
    return f"{MANIFEST}: {error.field}: {error.problem}" if error.field else error.problem


def _whole(path: Path) -> Manifest:
    """Return the manifest of a whole checkpoint, or raise what is wrong."""
    manifest = _manifest(path)
    match = _NAME.fullmatch(path.name)
    if not match or int(match[1]) != manifest.step:
        raise InputError(f"is of step {manifest.step}")
    if sorted(part.rank for part in manifest.parts) != list(range(manifest.ranks)):
        have = ", ".join(str(part.rank) for part in manifest.parts) or "none"
        raise InputError(f"is of {manifest.ranks} ranks, but has the parts of {have}")
    written: dict[str, Written] = {}
    for part in manifest.parts:
        if part.run != manifest.run:
            raise InputError(f"the part of rank {part.rank} is of run {part.run}, not {manifest.run}")
        if not part.files:
            raise InputError(f"the part of rank {part.rank} is empty")
        written |= part.files
    for name, facts in written.items():
        _same(path, name, facts)
    for name in sorted(_needed(path)):
        if name not in written:
            raise InputError(f"{name} is needed, but is in no part of {MANIFEST}")
    return manifest


def _manifest(path: Path) -> Manifest:
    table = read_json(path / MANIFEST)
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise InputError(f"{MANIFEST} is not a checkpoint's")
    if table.get("version") != VERSION:
        raise InputError(f"is of version {table.get('version')}, this program reads {VERSION}")
    expected = table.pop("crc32", None)
    if _sum_of(table) != expected:
        raise InputError(f"{MANIFEST} is not what was written")
    return convert({key: table[key] for key in table if key not in ("format", "version")}, Manifest)


def _same(path: Path, name: str, written: Written) -> None:
    """Raise unless a file of a checkpoint is as it was written."""
    file = path / name
    if Path(name).name != name:
        raise InputError(f"{MANIFEST} names {name!r}, which is no file of this folder")
    try:
        if not file.is_file():
            raise InputError(f"{name} is {'no file' if file.exists() else 'missing'}")
        if file.stat().st_size != written.bytes:
            raise InputError(f"{name} has {file.stat().st_size} bytes of {written.bytes}")
        total = 0
        with file.open("rb") as opened:
            while block := opened.read(_BLOCK):
                total = zlib.crc32(block, total)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise InputError(f"{name!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if total != written.crc32:
        raise InputError(f"{name} is not what was written")


def _needed(path: Path) -> set[str]:
    """Return the files that PyTorch's index of a checkpoint lists, and the index itself."""
    try:
        index = FileSystemReader(path).read_metadata()
        return {INDEX, *(place.relative_path for place in index.storage_data.values())}
    except Exception as error:  # the index is a pickle: another file may fail with any exception
        raise InputError(f"{INDEX} cannot be read: {type(error).__name__}: {str(error)[:200]}") from None


def _sum_of(table: dict[str, Any]) -> int:
    """Return the checksum of a manifest's content, whatever its layout."""
    return zlib.crc32(json.dumps(table, sort_keys=True).encode())
