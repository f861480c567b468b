"""Run independent searches on all cores: what-if changes, runners-up, the points of a sweep.

A single search takes about a second on one core; a command asks for many. Workers are forked, so they start in
milliseconds and share what is imported. Where forking is impossible (other threads run, or the system has no fork), the
work is done one by one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_MOST = 16  # workers


def workers(count: int) -> int:
    """Return the number of processes for `count` items: at most the cores of this process, 1 without fork."""
    if count < 2 or threading.active_count() > 1 or "fork" not in multiprocessing.get_all_start_methods():
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, count, _MOST))


def in_parallel(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[int, Result]]:
    """Yield (position, result) of every item, in the order in which they are done.

    >>> sorted(in_parallel(abs, [-3, 2]))
    [(0, 3), (1, 2)]
    """
    count = workers(len(items))
    if count == 1:
        yield from ((i, work(item)) for i, item in enumerate(items))
        return
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), initializer=_quiet)
    waiting = {pool.submit(work, item): i for i, item in enumerate(items)}
    try:
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            yield from ((waiting.pop(future), future.result()) for future in sorted(done, key=waiting.__getitem__))
    finally:
        if waiting:  # interrupted, or one of them failed
            _stop(pool)
        else:
            pool.shutdown()


def _quiet() -> None:
    """Ignore Ctrl-C in a worker; the parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _stop(pool: ProcessPoolExecutor) -> None:
    processes = list((getattr(pool, "_processes", None) or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
