"""A folder that appears whole or not at all.

Everything is written to `NAME.part`, which is renamed once it is done. One process at a time writes there. It holds a
lock on a file inside, which the system releases however the process ends. The next writer removes what a killed one
left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.base.files import write_error
from meshwright.errors import InputError
from meshwright.run.data.manifest import DOCUMENTS, MANIFEST, is_prepared

_LOCK = "lock"
_OURS = re.compile(rf"\.?{MANIFEST}(\..*)?|{DOCUMENTS}|{_LOCK}|tokens-\d+\.bin")


@dataclass(frozen=True)
class Unfinished:
    """Unfinished folder, and the descriptor that holds its lock.

    A forked process inherits the descriptor, and with it the lock: it must close it.
    """

    path: Path
    lock: int


@contextlib.contextmanager
def whole_folder(target: Path, *, overwrite: bool, wait: bool) -> Iterator[Unfinished | None]:
    """Yield the folder to write to. It becomes `target` at the end of the block, and is removed if the block fails.

    Yield None if another process has finished the same folder while this one waited for it.
    """
    part = target.with_name(f"{target.name}.part")
    _check_part(part)
    lock = _locked(part, wait=wait)
    try:
        if wait and is_prepared(target) and not overwrite:
            shutil.rmtree(part, ignore_errors=True)  # the next waiting process may just have come here
            yield None
            return
        check_target(target, overwrite=overwrite)  # under the lock: another may have finished just before
        _clear(part)
        yield Unfinished(part, lock)
        _replace(part, target)
        (target / _LOCK).unlink()  # not before: without it another process would take the folder for an abandoned one
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        kind = type(write_error(error, file=""))
        raise kind(error.strerror or str(error), file=str(error.filename or target)) from None
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that would be destroyed: a finished folder without `overwrite`, and any folder that is not ours."""
    if not target.name:
        raise InputError("names no folder", field="-o", valid="the path of a new folder")
    if not target.parent.is_dir():
        raise InputError(f"there is no folder '{target.parent}'", file=str(target), field="-o")
    if not target.exists():
        return
    if not target.is_dir():
        raise InputError("is a file", file=str(target), field="-o", valid="the path of a new folder")
    inside = {path.name for path in target.iterdir()}
    if foreign := _foreign(inside) or (set() if is_prepared(target) else inside):
        raise _not_ours(target, min(foreign))
    if inside and not overwrite:
        raise InputError("is already prepared", file=str(target), valid="another folder, or --overwrite")


def _check_part(part: Path) -> None:
    """Refuse a user's folder that has the name of an unfinished one: it would be cleared."""
    if part.exists() and not part.is_dir():
        raise InputError("is a file, where the unfinished folder is written", file=str(part), valid="another -o")
    with contextlib.suppress(FileNotFoundError):  # renamed just now, by its owner
        if foreign := _foreign({path.name for path in part.iterdir()}):
            raise _not_ours(part, min(foreign))


def _foreign(names: set[str]) -> set[str]:
    """Return names that prepare does not write. An unfinished manifest is hidden beside its final name."""
    return {name for name in names if not _OURS.fullmatch(name)}


def _not_ours(folder: Path, name: str) -> InputError:
    return InputError(
        f"holds '{name}', which prepare did not write", file=str(folder), valid="the path of a new folder"
    )


def _locked(part: Path, *, wait: bool) -> int:
    """Lock the unfinished folder, which is created if missing, and return the lock's descriptor."""
    while True:
        handle = _created(part)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            with contextlib.suppress(FileNotFoundError):
                if os.path.sameopenfile(handle, (again := os.open(part / _LOCK, os.O_RDWR))):
                    os.close(again)
                    return handle
                os.close(again)
            os.close(handle)  # its owner finished and renamed the folder: this lock guards nothing
        except BlockingIOError:
            os.close(handle)
            raise InputError("another process is preparing it now", file=str(part)) from None


def _created(part: Path) -> int:
    while True:
        try:
            part.mkdir(exist_ok=True)
            return os.open(part / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except (FileExistsError, FileNotFoundError):  # its owner finished just now
            if not part.parent.is_dir():
                raise InputError(f"there is no folder '{part.parent}'", file=str(part)) from None
        except OSError as error:
            raise write_error(error, file=str(part)) from None


def _clear(part: Path) -> None:
    """Remove the files of a killed process."""
    for path in part.iterdir():
        if path.name != _LOCK:
            path.unlink()


def _replace(part: Path, target: Path) -> None:
    """Rename. An existing folder is moved away first, because a folder with files cannot be replaced."""
    if not (target.exists() and any(target.iterdir())):
        part.rename(target)
        return
    away = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    target.rename(away)  # an empty folder is replaced
    part.rename(target)
    shutil.rmtree(away, ignore_errors=True)
