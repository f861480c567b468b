"""Which rank is this process? What its launcher says, else torch.distributed, else its number among processes."""

from __future__ import annotations

import os
import sys


def rank_of_process(*, surely: bool = False) -> int | None:
    """The rank, or None where torch.distributed may still say it; `surely` gives the best guess of now."""
    said = os.environ.get("RANK", "")
    if said.isdigit():
        return int(said)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    processes = sys.modules.get("multiprocessing.process")
    number = processes.current_process()._identity if processes is not None else ()
    if not number:
        return 0
    return int(number[-1]) - 1 if surely else None  # children count from 1
