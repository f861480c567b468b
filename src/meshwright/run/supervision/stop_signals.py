"""Signals that ask a run to stop: noticed while PyTorch waits, acted on after the step.

Python runs a signal handler in the main thread, between two bytecodes: never while that thread waits inside PyTorch for
another rank. The C handler writes to the wakeup descriptor at once, and another thread reads it.
"""

from __future__ import annotations

import select
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME = 0.5  # seconds within which a second signal counts as the first: a terminal and a launcher both forward it


def stopping(number: int) -> str:
    """Return the message for people after a run was asked to stop.

    >>> stopping(15)
    'SIGTERM: stopping after this step; again: at once'
    """
    return f"{signal.Signals(number).name}: stopping after this step; again: at once"


AT_ONCE = "stopped at once; the last whole checkpoint is kept"


class StopSignals:
    """Collector of TERM, INT and USR1 while it is entered; outside a program's main thread it collects none.

    With `interrupts`, a second signal raises KeyboardInterrupt in the main thread: for a run inside a user's program.
    """

    def __init__(self, *, interrupts: bool = False) -> None:
        self._interrupts, self._first = interrupts, float("inf")
        self._read, self._write = socket.socketpair()
        for end in (self._read, self._write):
            end.setblocking(False)
        self._descriptor: int | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._descriptor = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
            # A process that ignores a signal from its start, like a shell's background jobs, keeps ignoring it.
            wanted = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._handlers = {number: signal.signal(number, self._handle) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._descriptor is not None:
            signal.set_wakeup_fd(self._descriptor)
        self._read.close()
        self._write.close()

    def heard(self, seconds: float) -> list[int]:
        """Wait at most `seconds`; return the signals that arrived."""
        try:
            ready, _, _ = select.select([self._read], [], [], seconds)
            found = self._read.recv(4096) if ready else b""
        except (OSError, ValueError):  # closed meanwhile
            return []
        return [number for number in found if number in SIGNALS]

    def ignore(self) -> None:
        """Ignore signals from now on: all has been saved, and launchers end the remaining ranks."""
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Do nothing; the reading thread acts. Without a Python handler the signal would end the process."""
        now = time.monotonic()
        if self._interrupts and now > self._first + SAME:
            raise KeyboardInterrupt
        self._first = min(self._first, now)


class Asked:
    """Signals so far: the first asks to stop, a later Ctrl-C to end at once."""

    def __init__(self) -> None:
        self.number, self.at_once = 0, False
        self._since = float("inf")

    def add(self, number: int, *, again: bool) -> bool:
        """Add one signal; return True for the first. `again`: a repeated one ends the run at once."""
        if not self.number:
            self.number, self._since = number, time.monotonic()
            return True
        self.at_once = self.at_once or (again and time.monotonic() > self._since + SAME)
        return False

    def withdraw(self) -> None:
        """Forget the signal: it was not a request to stop."""
        self.number, self._since = 0, float("inf")
