"""Memory of a process that trains on processors: kept once it was had.

glibc hands large blocks back to the system when they are freed, and gets fresh pages for the next: every tensor of a step
then costs page faults, several times what is done with it. A process that trains takes the same memory again anyway.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_ALWAYS = 2**31 - 1


def keep_freed_memory() -> None:
    """Let malloc keep what is freed, however large it is; nothing where the C library is another one."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP, 2**30)
        mallopt(_TRIM, _ALWAYS)
