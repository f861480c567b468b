"""Checkpoints: written in the background, whole or not at all, read under any plan.

A checkpoint is a folder `step-00000010` that PyTorch's distributed checkpoint writes, with a `manifest.json` that names
every file with its size and checksum. It is written as `step-00000010.part` and renamed when everything is in it, so that
a folder with that name is complete; one that is damaged later is found by its checksums, and the one before is used.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from meshwright.errors import InputError
from meshwright.files import read_json, write_text
from meshwright.run.checkpoint_state import Loader, Pieces, Saver, state_of, states_of
from meshwright.run.optimizers.choose import restore
from meshwright.run.parallel import Parallel
from meshwright.run.unsaid import restore_unsaid, unsaid_in, unsaid_of, was_left_out

FORMAT, VERSION = "meshwright-checkpoint", 1
_NAME = re.compile(r"step-(\d{8,})")
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Found:
    """A complete checkpoint."""

    path: Path
    step: int
    facts: dict[str, Any]  # what the training wrote beside its state


class Checkpoints:
    """The checkpoints of one run; every process of the run has one and calls the same methods."""

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep
        together = dist.is_initialized() and dist.get_world_size() > 1
        # A group of its own: the background thread speaks while training does.
        self._group = dist.new_group(backend="gloo") if together else None
        self._rank = dist.get_rank() if together else 0
        self._writing: threading.Thread | None = None
        self._failed: list[BaseException] = []

    def save(self, step: int, part: Parallel, optimizer: Any, facts: dict[str, Any]) -> None:
        """Copy the state and go on; it is written in the background."""
        self.wait()
        every = state_of(part, states_of(part, optimizer), once=True) | unsaid_of(part)
        state = {name: pieces.copied() for name, pieces in every.items()}
        self._writing = threading.Thread(target=self._write, args=(step, state, facts), name="checkpoint")
        self._writing.start()

    def wait(self) -> None:
        """Until everything is written; raises what went wrong."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failed:
            raise self._failed.pop()

    def load(self, found: Found, part: Parallel, optimizer: Any) -> bool:
        """Fill weights and optimizer states, whatever plan wrote them.

        False if what compressed gradients had not said yet is left out, because another plan wrote it.
        """
        states = states_of(part, optimizer)
        state = state_of(part, states, once=False)
        reader = FileSystemReader(found.path)
        saved = reader.read_metadata().state_dict_metadata
        _compare(state, saved, found.path)
        unsaid = unsaid_in(part, {name: one.size for name, one in saved.items()})
        with _alone():
            dcp.load(
                state | unsaid, storage_reader=reader, planner=Loader(), process_group=self._group,
                no_dist=not self._group,
            )  # fmt: skip
        restore_unsaid(part, unsaid)
        updates = int(found.facts.get("updates", found.step))  # fewer than steps where some were left out
        for weight, kept in states.values():
            restore(optimizer, weight, kept, updates)
        for group in optimizer.param_groups:
            group["step"] = updates
        return not was_left_out(part, saved)

    def _write(self, step: int, state: dict[str, Pieces], facts: dict[str, Any]) -> None:
        try:
            part = self.folder / f"step-{step:08d}.part"
            if self._rank == 0:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
            self._together()
            writer = FileSystemWriter(part, single_file_per_rank=True, sync_files=True, thread_count=1)
            with _alone():
                dcp.save(
                    state, storage_writer=writer, planner=Saver(), process_group=self._group, no_dist=not self._group
                )
            mine = sorted(part.glob(f"__{self._rank}_*.distcp"))
            sums = {file.name: _facts_of(file) for file in mine}
            every: list[dict[str, Any]] = [sums]
            if self._group:
                every = [{} for _ in range(dist.get_world_size())]
                dist.all_gather_object(every, sums, group=self._group)
            if self._rank == 0:
                files = {name: fact for some in every for name, fact in some.items()}
                files[".metadata"] = _facts_of(part / ".metadata")
                self._finish(part, {"step": step, "files": files, "facts": facts})
        except BaseException as error:
            self._failed.append(error)

    def _finish(self, part: Path, facts: dict[str, Any]) -> None:
        write_text(part / _MANIFEST, json.dumps({"format": FORMAT, "version": VERSION, **facts}, indent=1) + "\n")
        target = part.with_suffix("")
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
        # Newer ones are there only if they are damaged: the run went on from one before.
        older = [path for path in _names(self.folder) if path.name < target.name]
        for old in older[self.keep - 1 :]:
            shutil.rmtree(old, ignore_errors=True)

    def _together(self) -> None:
        if self._group:
            dist.barrier(group=self._group)


@contextmanager
def _alone() -> Iterator[None]:
    """PyTorch warns that one process saves for itself, which is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _compare(state: dict[str, Pieces], saved: Any, path: Path) -> None:
    """Whether a checkpoint holds what a model and an optimizer need."""
    for name, pieces in state.items():
        if name not in saved:
            raise InputError(f"has no {name}", file=str(path), field="--resume", valid="the run's model and optimizer")
        if tuple(saved[name].size) != pieces.shape:
            problem = f"{name} is {list(saved[name].size)}, the model's is {list(pieces.shape)}"
            raise InputError(problem, file=str(path), field="--resume", valid="the run's model")


def latest(folder: str | Path) -> tuple[Found | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with newer ones."""
    problems: list[str] = []
    for path in _names(Path(folder)):
        problem = damage(path)
        if not problem:
            manifest = read_json(str(path / _MANIFEST))
            return Found(path, int(manifest["step"]), manifest["facts"]), problems
        problems.append(f"{path.name}: {problem}")
    return None, problems


def damage(path: Path) -> str:
    """What is wrong with a checkpoint; nothing if it is whole."""
    try:
        manifest = read_json(str(path / _MANIFEST))
    except InputError as error:
        return error.problem
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return f"{_MANIFEST} is not a checkpoint's"
    if manifest.get("version") != VERSION:
        return f"is of version {manifest.get('version')}, this program reads {VERSION}"
    for name, facts in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != facts["bytes"]:
            return f"{name} has {file.stat().st_size} bytes of {facts['bytes']}"
        if _facts_of(file) != facts:
            return f"{name} is not what was written"
    return ""


def _names(folder: Path) -> list[Path]:
    """Complete checkpoints, the newest first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _facts_of(file: Path) -> dict[str, int]:
    """Size and checksum."""
    total = 0
    with file.open("rb") as opened:
        while block := opened.read(1 << 24):
            total = zlib.crc32(block, total)
    return {"bytes": file.stat().st_size, "crc32": total}
