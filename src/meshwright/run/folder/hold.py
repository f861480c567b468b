"""The folder of a run: one run holds it at a time, and writes nothing before it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshwright.base.files import replace_texts
from meshwright.plans import Plan
from meshwright.run.folder.checks import refuse_used, writable
from meshwright.run.folder.lock import NAME, FolderLock, take
from meshwright.run.options import Training

T = TypeVar("T")


@dataclass(frozen=True)
class Hold:
    """A run's hold on its folder, as one of its ranks has it: rank 0 has the lock."""

    run: str
    lock: FolderLock | None = None

    def check(self) -> None:
        """Raise if another run holds the folder now; called right before anything is committed."""
        if self.lock:
            self.lock.check()

    def lost(self) -> bool:
        """Return True once another run is known to hold the folder."""
        return self.lock is not None and self.lock.lost()


@contextmanager
def hold_folder(run: Training, plan: Plan, clean: Callable[[Path], None]) -> Iterator[Hold]:
    """Hold the run's folder: rank 0 takes the lock, and every rank gets the run's id or the refusal.

    `clean` removes the remains of dead runs from the checkpoints.
    """
    if not run.output:
        yield Hold("")
        return
    locks: list[FolderLock] = []
    try:
        name = on_first_rank(lambda: _enter(run, plan, clean, locks))
        yield Hold(name, *locks)
    finally:
        for lock in locks:
            lock.release()


def _enter(run: Training, plan: Plan, clean: Callable[[Path], None], locks: list[FolderLock]) -> str:
    folder = Path(run.output)
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with writable(folder / NAME):
        locks.append(take(folder))
    with writable(folder / "checkpoints"):
        clean(folder / "checkpoints")
    refuse_used(run)  # checked before, but another run may have ended here since
    with writable(folder / "plan.json"):
        replace_texts({folder / "plan.json": plan.to_json()})
    return locks[0].owner.run


def on_first_rank(do: Callable[[], T], group: Any = None) -> T:
    """Call a function on rank 0; every rank returns its result, or raises its error."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return do()
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = do()
        except Exception as error:
            found[1] = error
    dist.broadcast_object_list(found, src=0, group=group, device=torch.device("cpu"))
    if found[1] is not None:
        raise found[1]
    value: T = found[0]
    return value
