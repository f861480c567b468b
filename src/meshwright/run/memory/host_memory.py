"""Memory of a process that trains on processors: kept once it was had.

glibc hands large blocks back to the system when they are freed, and gets fresh pages for the next: every tensor of a step
then costs page faults, several times what is done with it. A process that trains takes the same memory again anyway.
"""

from __future__ import annotations

import ctypes
import re
import resource
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

_TRIM, _MMAP, _ARENAS = -1, -3, -8  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX of malloc.h
_ALWAYS = 2**31 - 1
_LARGE = 2**26  # bytes; larger blocks are pages of their own: a heap would break up under them, and be twice as large
_EVERY = 0.005  # seconds between two samples: each takes microseconds, and PyTorch computes meanwhile


def keep_freed_memory() -> None:
    """Let malloc keep what is freed, however large it is; nothing where the C library is another one."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP, _LARGE)
        mallopt(_TRIM, _ALWAYS)
        mallopt(_ARENAS, 1)  # what the backward pass's thread frees, the forward pass's can have


class Peaks:
    """The most memory that a run has taken so far: by the whole process, and by its tensors alone.

    On CUDA devices both are the allocator's: what it has reserved, and what tensors had of it. On processors the process
    is what the system says of it. Tensors are what malloc has handed out since this was made, in the largest of samples
    that a thread takes while the run goes on: weights, gradients, states, activations and temporaries, and batches.
    A peak that lasts less than a sample may be missed in one step, and is met in another.

    >>> with Peaks("cpu") as peaks:
    ...     held = torch.zeros(2**22)
    >>> peaks.facts()["peak_tensor_bytes"] > held.nbytes / 2 if malloc_bytes() else True  # others may free some meanwhile
    True
    """

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        self._before = malloc_bytes()
        self._most = self._before
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="meshwright-memory", daemon=True)

    def __enter__(self) -> Peaks:
        if self._before and not self._cuda:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._look()
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def facts(self) -> dict[str, int]:
        """Return bytes by the names that events have for them; without those of tensors where malloc counts none."""
        if self._cuda:
            reserved, tensors = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
            return {"peak_memory_bytes": int(reserved), "peak_tensor_bytes": int(tensors)}
        self._look()
        process = {"peak_memory_bytes": _most_resident()}
        return process | ({"peak_tensor_bytes": self._most - self._before} if self._before else {})

    def _sample(self) -> None:
        while not self._ended.wait(_EVERY):
            self._look()

    def _look(self) -> None:
        self._most = max(self._most, malloc_bytes())


def _most_resident() -> int:
    """Return the most bytes of this process that lay in memory; getrusage would count those of who started it."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return 1024 * (int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h, glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def _mallinfo() -> Any:
    """Return glibc's function; None where the C library has no such one."""
    found = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform.startswith("linux") else None
    if found is not None:
        found.restype = _Mallinfo
    return found


_MALLINFO = _mallinfo()


def malloc_bytes() -> int:
    """Return the bytes that malloc has handed out in this process; 0 where the C library does not tell."""
    if _MALLINFO is None:
        return 0
    info = _MALLINFO()
    return int(info.uordblks + info.hblkhd)
