"""Processes that stay alive between tests, one group of them per world size.

They are forked from a server that has imported torch and done nothing with it: autograd's threads do not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_SECONDS = 60.0  # that a piece of work may take


class Pool:
    """A world of gloo processes with one thread each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["meshwright.run.parallel.apply", "tests.run.parity", "tests.run.pool"])
        store = Path(self._folder.name) / "store"
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, str(store), there), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def close(self) -> None:
        """End its processes."""
        for end, process in zip(self._ends, self._processes, strict=True):
            end.close()
            process.terminate()
            process.join()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a function of a module returns in every process, by rank; a failure names the rank."""
        for end in self._ends:
            end.send((function, arguments))
        found = []
        for rank, end in enumerate(self._ends):
            if not end.poll(_SECONDS):
                raise TimeoutError(f"rank {rank} of {self.size} did not answer in {_SECONDS} s")
            try:
                ok, value = end.recv()
            except EOFError:
                ok, value = False, "its process has died"
            if not ok:
                _POOLS.pop(self.size).close()  # the others may wait for it for ever
                raise AssertionError(f"rank {rank} of {self.size}:\n{value}")
            found.append(value)
        return found


_POOLS: dict[int, Pool] = {}


def pool(size: int) -> Pool:
    """The pool of a world size."""
    if size not in _POOLS:
        _POOLS[size] = Pool(size)
    return _POOLS[size]


def close_all() -> None:
    """End all pools; the next test makes new ones."""
    while _POOLS:
        _POOLS.popitem()[1].close()


def _work(rank: int, size: int, store: str, end: Connection) -> None:
    torch.set_num_threads(1)
    # PyTorch keeps the last 2,000 collectives for its flight recorder: until then memory grows, which is no leak.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=_SECONDS)
    )
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            return
        try:
            end.send((True, function(*arguments)))
        except BaseException:
            end.send((False, traceback.format_exc()))
