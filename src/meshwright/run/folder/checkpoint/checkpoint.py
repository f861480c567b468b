"""Checkpoints: written in the background, whole or not at all, read under any plan.

A checkpoint is a folder `step-00000010` that PyTorch's distributed checkpoint writes, with a `manifest.json` of each
rank's files. It is written as `step-00000010.RUN.part` and renamed once complete, so a folder with the final name is
whole. Later damage is found by checksums, and the previous checkpoint is used.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from meshwright.errors import InputError, MeshwrightError, TrainingFailed
from meshwright.run.folder.checkpoint.files import (
    Found,
    Manifest,
    Part,
    Recorder,
    damage,
    latest,
    names,
    part_of,
    put_in_place,
    remove,
    write_manifest,
)
from meshwright.run.folder.checkpoint.residuals import residuals_in, residuals_of, restore_residuals, was_left_out
from meshwright.run.folder.checkpoint.state import Loader, Pieces, Saver, state_of, states_of
from meshwright.run.folder.checks import unwritable
from meshwright.run.folder.hold import Hold, on_first_rank
from meshwright.run.optimizers.choose import restore
from meshwright.run.parallel.parallel_model import Parallel
from meshwright.run.supervision.watchdog import SAVING

__all__ = ["Checkpoints", "Found", "damage", "latest"]

_LAST = 10.0  # seconds that a checkpoint gets to be completed after its run has failed


class Checkpoints:
    """Checkpoints of one run; every rank has one and calls the same methods."""

    def __init__(self, folder: str | Path, keep: int = 2, hold: Hold | None = None) -> None:
        self.folder, self.keep, self._hold = Path(folder), keep, hold or Hold("unlocked")
        together = dist.is_initialized() and dist.get_world_size() > 1
        # A process group of its own: the background thread communicates while training does.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=SAVING)) if together else None
        self._rank: int = dist.get_rank() if together else 0
        self._ranks: int = dist.get_world_size() if together else 1
        self._writing: threading.Thread | None = None
        self._failed: list[BaseException] = []

    def save(self, step: int, part: Parallel, optimizer: Any, facts: dict[str, Any]) -> None:
        """Copy the state and return; it is written in the background."""
        self.wait()
        every = state_of(part, states_of(part, optimizer), once=True) | residuals_of(part)
        state = {name: pieces.copied() for name, pieces in every.items()}
        self._writing = threading.Thread(target=self._write, args=(step, state, facts), name="checkpoint")
        self._writing.start()

    def wait(self) -> None:
        """Wait until everything is written; raise the error if writing failed."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failed:
            raise self._failed.pop()

    def close(self) -> None:
        """Give an unfinished checkpoint a last chance after the run has failed."""
        if self._writing is not None:
            self._writing.join(_LAST)

    def newest(self) -> tuple[Found | None, list[str]]:
        """Return the newest whole checkpoint, the same on every rank, with the damage of newer ones."""
        found, problems = latest(self.folder)
        steps: list[Any] = [found and found.step] * self._ranks
        if self._group:
            dist.all_gather_object(steps, found and found.step, group=self._group)
        if len(set(steps)) > 1:
            seen = ", ".join(f"rank {rank}: step {step}" for rank, step in enumerate(steps))
            raise TrainingFailed(f"{self.folder}: the newest whole checkpoint is not the same everywhere: {seen}")
        return found, problems

    def load(self, found: Found, part: Parallel, optimizer: Any) -> bool:
        """Load weights and optimizer states, whatever plan wrote them.

        Return False if residuals of compressed gradients are left out, because another plan wrote them.
        """
        states = states_of(part, optimizer)
        state = state_of(part, states, once=False)
        reader = FileSystemReader(found.path)
        saved = reader.read_metadata().state_dict_metadata
        _compare(state, saved, found.path)
        unsaid = residuals_in(part, {name: one.size for name, one in saved.items()})
        try:
            with _alone():
                dcp.load(
                    state | unsaid, storage_reader=reader, planner=Loader(), process_group=self._group,
                    no_dist=not self._group,
                )  # fmt: skip
        except dcp.CheckpointException as error:
            raise _unreadable(_first_of(error), found.path) from None
        restore_residuals(part, unsaid)
        updates = int(found.facts.get("updates", found.step))  # fewer than steps if updates were skipped
        for weight, kept in states.values():
            restore(optimizer, weight, kept, updates)
        for group in optimizer.param_groups:
            group["step"] = updates
        return not was_left_out(part, saved)

    def _write(self, step: int, state: dict[str, Pieces], facts: dict[str, Any]) -> None:
        part = part_of(self.folder, step, self._hold.run)
        try:
            on_first_rank(lambda: _empty(part), self._group)
            recorder = Recorder()
            writer = FileSystemWriter(part, single_file_per_rank=True, sync_files=True, thread_count=1)
            writer.fs = recorder
            with _alone():
                dcp.save(
                    state, storage_writer=writer, planner=Saver(), process_group=self._group, no_dist=not self._group
                )
            mine = Part(rank=self._rank, run=self._hold.run, files=recorder.files)
            parts = [mine] * self._ranks
            if self._group:
                dist.all_gather_object(parts, mine, group=self._group)
            manifest = Manifest(run=self._hold.run, step=step, ranks=self._ranks, parts=parts, facts=facts)
            on_first_rank(lambda: self._commit(part, manifest), self._group)
        except BaseException as error:
            self._failed.append(self._reason(error, part))

    def _commit(self, part: Path, manifest: Manifest) -> None:
        try:
            write_manifest(part, manifest)
            self._hold.check()
            put_in_place(part, manifest.step)
        except OSError as error:
            raise unwritable(error.filename or part, error) from None
        # Newer checkpoints exist only if they are damaged: the run resumed from an earlier one.
        older = [path for path in names(self.folder) if int(path.name.removeprefix("step-")) < manifest.step]
        for old in older[self.keep - 1 :]:
            remove(old)

    def _reason(self, error: BaseException, part: Path) -> BaseException:
        """Return why a checkpoint was not written, and remove its unfinished files."""
        reason = _first_of(error)
        if self._rank == 0:
            remove(part)
            try:
                self._hold.check()  # another run removes unfinished checkpoints, which looks like a broken disk
            except TrainingFailed as lost:
                return lost
        return unwritable(reason.filename or part, reason) if isinstance(reason, OSError) else reason


def _empty(part: Path) -> None:
    """Create the empty folder of a new checkpoint."""
    try:
        remove(part)
        part.mkdir(parents=True)
    except OSError as error:
        raise unwritable(part, error) from None


def _first_of(error: BaseException) -> BaseException:
    """Return the error of the first rank that PyTorch's checkpoint names, preferably one of our own types."""
    if not isinstance(error, dcp.CheckpointException):
        return error
    failures = [failure for failure, _ in error.failures.values()]
    return next((failure for failure in failures if isinstance(failure, MeshwrightError)), failures[0])


def _unreadable(error: BaseException, path: Path) -> BaseException:
    """Return why a checkpoint was not read: its files do not match their names and checksums."""
    if isinstance(error, MeshwrightError | MemoryError | torch.OutOfMemoryError):
        return error
    problem = f"cannot be read: {type(error).__name__}: {str(error).strip()[:200]}"
    return InputError(problem, file=str(path), field="--resume", valid="the one before, once this one is moved away")


@contextmanager
def _alone() -> Iterator[None]:
    """Silence PyTorch's warning that one process saves for itself, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _compare(state: dict[str, Pieces], saved: Any, path: Path) -> None:
    """Raise unless a checkpoint holds what a model and an optimizer need."""
    for name, pieces in state.items():
        if name not in saved:
            raise InputError(f"has no {name}", file=str(path), field="--resume", valid="the run's model and optimizer")
        if tuple(saved[name].size) != pieces.shape:
            problem = f"{name} is {list(saved[name].size)}, the model's is {list(pieces.shape)}"
            raise InputError(problem, file=str(path), field="--resume", valid="the run's model")
