"""How many threads a process computes with on processors: the same when it is measured and when it trains."""

from __future__ import annotations

import os

import torch


def share_cores(ranks: int) -> int:
    """Give this process its part of the cores that the ranks of its node share, and return its number of threads.

    OMP_NUM_THREADS goes before: PyTorch has read it, and whoever set it knows who else computes here.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // ranks))
    return int(torch.get_num_threads())
