"""Which rank is this process? What its launcher says, else torch.distributed, else its number among processes."""

from __future__ import annotations

import os
import sys


def rank_of_process(*, surely: bool = False) -> int | None:
    """The rank, or None where torch.distributed may still say it; `surely` gives the best guess of now."""
    said = rank_said()
    if said is not None:
        return said
    processes = sys.modules.get("multiprocessing.process")
    here = processes.current_process() if processes is not None else None
    beginning = getattr(here, "_inheriting", False)  # a child that does not know its number yet
    if here is None or not (here._identity or beginning):
        return 0
    if not surely and (beginning or "torch.distributed" in sys.modules):
        return None
    return int(here._identity[-1]) - 1 if here._identity else 0  # children count from 1


def rank_said() -> int | None:
    """The rank that a launcher or torch.distributed has given this process."""
    said = os.environ.get("RANK", "")
    if said.isdecimal():
        return int(said)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return None
