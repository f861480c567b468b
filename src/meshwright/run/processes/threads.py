"""CPU threads of a process: the same number when it is measured and when it trains."""

from __future__ import annotations

import os

import torch


def share_cores(ranks: int) -> int:
    """Give this process its share of the cores that the ranks of its node have, and return its number of threads.

    OMP_NUM_THREADS goes first: PyTorch has read it, and the user who set it knows which programs share the machine.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // ranks))
    return int(torch.get_num_threads())
