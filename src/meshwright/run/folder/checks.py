"""One message for each way in which a run's folder or a disk is refused; nothing here needs torch."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import InputError, TrainingFailed
from meshwright.run.options import Training

_FULL = (errno.ENOSPC, errno.EDQUOT)


def refuse_used(run: Training) -> None:
    """Refuse to start in a folder that holds checkpoints of another run."""
    if run.output and not run.resume and not run.auto_resume and has_checkpoints(run):
        valid = "--resume, or another folder"
        raise InputError("holds the checkpoints of a run", file=run.output, field="--output", valid=valid)


def has_checkpoints(run: Training) -> bool:
    """Return True if a checkpoint has a whole one's name."""
    return any("." not in path.name for path in (Path(run.output) / "checkpoints").glob("step-*"))


@contextmanager
def writable(file: str | Path, option: str = "--output") -> Iterator[None]:
    """Turn disk errors into one message: a full disk ends the run, others are input errors."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise unwritable(file, error) from None
        raise InputError(f"cannot be written: {error.strerror or error}", file=str(file), field=option) from None


def unwritable(file: str | os.PathLike[str], error: OSError) -> TrainingFailed:
    """Return the error of a run that cannot write a file."""
    reason = "the disk is full" if error.errno in _FULL else f"cannot be written: {error.strerror or error}"
    return TrainingFailed(f"{os.fspath(file)}: {reason}; the last whole checkpoint is kept")
