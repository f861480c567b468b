"""One message for each thing that a run's folder or a disk refuses; nothing here needs torch."""

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
    """Refuse to begin in a folder that holds checkpoints of another run."""
    if run.output and not run.resume and not run.auto_resume and has_checkpoints(run):
        valid = "--resume, or another folder"
        raise InputError("holds the checkpoints of a run", file=run.output, field="--output", valid=valid)


def has_checkpoints(run: Training) -> bool:
    """Return true if there is a checkpoint that bears a whole one's name."""
    return any("." not in path.name for path in (Path(run.output) / "checkpoints").glob("step-*"))


@contextmanager
def writable(file: str | Path, option: str = "--output") -> Iterator[None]:
    """Say in one message what a disk refuses: a full one ends the run, any other is the user's mistake."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise unwritable(file, error) from None
        raise InputError(f"cannot be written: {error.strerror or error}", file=str(file), field=option) from None


def unwritable(file: str | os.PathLike[str], error: OSError) -> TrainingFailed:
    """Return what ends a run that cannot write a file."""
    reason = "the disk is full" if error.errno in _FULL else f"cannot be written: {error.strerror or error}"
    return TrainingFailed(f"{os.fspath(file)}: {reason}; the last whole checkpoint is kept")
