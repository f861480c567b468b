"""What a command and all its descendants take: CPU seconds, and the most memory they hold together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: descendants whose parent ended become our children, so that none is missed
EVERY = 0.05  # seconds between two looks at memory


@dataclass(frozen=True)
class Taken:
    """Of a whole tree of processes."""

    wall: float  # s
    cpu: float  # s, user and system
    peak: float  # MiB; what processes share counts once
    output: str


def taken(command: list[str], env: dict[str, str] | None = None) -> Taken:
    """Run a command to its end."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    held = [0.0]
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(held, over))
    watcher.start()
    assert process.stdout is not None
    output = process.stdout.read()
    cpu, failed = 0.0, False
    while True:  # until no descendant is left; each brings the time of those that it waited for
        try:
            pid, status, used = os.wait4(-1, 0)
        except ChildProcessError:
            break
        cpu += used.ru_utime + used.ru_stime
        failed |= pid == process.pid and status != 0
    wall = time.perf_counter() - start
    over.set()
    watcher.join()
    if failed:
        raise SystemExit(f"failed: {' '.join(command)}")
    return Taken(wall, cpu, max(held), output)


def _watch(held: list[float], over: threading.Event) -> None:
    while not over.wait(EVERY):
        held.append(sum(map(_mib, _descendants(os.getpid()))))


def _descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, left = [], [ancestor]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def _mib(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0
