"""Memory that this process has allocated and not freed, as glibc counts it: tensors of any owner, in Python or in C++."""

from __future__ import annotations

import ctypes

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def heap_bytes() -> int:
    """Return the bytes in use of all arenas, and of blocks that were mapped on their own (mallinfo(3))."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Mallinfo2
    found = ask()
    return int(found.uordblks + found.hblkhd)
