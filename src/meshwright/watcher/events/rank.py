"""Find the rank of this process: its launcher's number, else torch.distributed's, else its number among processes."""

from __future__ import annotations

import os
import sys
from typing import Any


def rank_of_process(*, surely: bool = False) -> int | None:
    """Return the rank, or None if torch.distributed may still set it; `surely` returns the best guess of now."""
    said = rank_said()
    if said is not None:
        return said
    processes = sys.modules.get("multiprocessing.process")
    here = processes.current_process() if processes is not None else None
    beginning = getattr(here, "_inheriting", False)  # a child that does not know its number yet
    if here is None or not (here._identity or beginning):
        return 0
    if is_loader(here):
        return int(here._identity[-2]) - 1 if len(here._identity) > 1 else 0  # the parent's number
    if not surely and (beginning or "torch.distributed" in sys.modules):
        return None
    return int(here._identity[-1]) - 1 if here._identity else 0  # children count from 1


def rank_said() -> int | None:
    """Return the rank that a launcher or torch.distributed has given this process."""
    said = os.environ.get("RANK", "")
    if said.isdecimal():
        return int(said)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return None


def is_loader(process: Any = None) -> bool:
    """Return True if a process, this one or another of multiprocessing, loads data for the rank that started it.

    torch's DataLoader starts such processes; they have numbers like ranks, but are none.
    """
    processes = sys.modules.get("multiprocessing.process")
    if process is None and processes is not None:
        process = processes.current_process()
    target = getattr(process, "_target", None)
    place = (getattr(target, "__module__", None), getattr(target, "__name__", None))
    return place == ("torch.utils.data._utils.worker", "_worker_loop")


def starts_loader() -> bool:
    """Return True if the running code starts such a process: a fork does not tell its purpose."""
    processes = sys.modules.get("multiprocessing.process")
    frame = sys._getframe(1) if processes is not None else None
    while frame is not None and processes is not None:
        if frame.f_code is processes.BaseProcess.start.__code__:
            return is_loader(frame.f_locals.get("self"))
        frame = frame.f_back
    return False
