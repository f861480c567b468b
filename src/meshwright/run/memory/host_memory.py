"""Memory of a process that trains on the CPU: freed memory is kept for reuse.

glibc returns large blocks to the system when they are freed, and gets fresh pages for the next. Every tensor of a step
then costs page faults, which take several times longer than the computation on it. Training takes the same memory again
anyway.
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
_LARGE = 2**26  # bytes; larger blocks get pages of their own: in a heap they would fragment it to twice its size
_EVERY = 0.005  # seconds between two samples: each takes microseconds, and PyTorch computes meanwhile


def keep_freed_memory() -> None:
    """Let malloc keep freed memory of any size; do nothing with a C library other than glibc."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP, _LARGE)
        mallopt(_TRIM, _ALWAYS)
        mallopt(_ARENAS, 1)  # the forward pass can then reuse what the backward pass's thread frees


class Peaks:
    """Peak memory of a run so far: of the whole process, and of its tensors alone.

    On CUDA devices both come from the allocator: reserved memory, and memory of tensors. On CPUs the system reports the
    process. Tensors are what malloc has handed out since this object was created: weights, gradients, states,
    activations, temporaries and batches. A thread samples that during the run. A peak shorter than a sample may be
    missed in one step, and is met in another.

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
        """Return bytes by their names in events; without those of tensors if malloc reports none."""
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
    """Return the peak resident bytes of this process; getrusage would include those of its parent."""
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
    """Return glibc's function, or None in a C library without it."""
    found = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform.startswith("linux") else None
    if found is not None:
        found.restype = _Mallinfo
    return found


_MALLINFO = _mallinfo()


def malloc_bytes() -> int:
    """Return the bytes that malloc has handed out in this process, or 0 if the C library does not report them."""
    if _MALLINFO is None:
        return 0
    info = _MALLINFO()
    return int(info.uordblks + info.hblkhd)
