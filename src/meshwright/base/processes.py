"""Start processes from a user's script, and inspect the processes of this machine."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h


@contextmanager
def script_left_alone() -> Iterator[None]:
    """Start processes meanwhile without running the user's script again, as multiprocessing would.

    >>> with script_left_alone():
    ...     hasattr(sys.modules["__main__"], "__file__")
    False
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def end_with_parent(parent: int) -> None:
    """Let Linux kill this process as soon as its parent is gone, even inside a long call of C.

    If the parent is already gone before the request, nobody would send the signal.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def this_machine() -> str:
    """Return a name that is equal for processes that can see each other; empty if it is unknown."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return ""


def started_at(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if unknown.

    Process numbers are reused: number and start together identify one process.
    """
    return (_stat(pid) + [""] * 20)[19]


def state_of(pid: int, started: str = "") -> str:
    """Return the state as ps prints it (R, S, D, T, Z); empty if the process is gone or its number was reused.

    >>> state_of(os.getpid(), started_at(os.getpid())) in "RSD"
    True
    """
    found = _stat(pid)
    return found[0] if found and (not started or found[19] == started) else ""


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process name, which may hold spaces and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()
