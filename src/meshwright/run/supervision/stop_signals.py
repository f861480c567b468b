"""Signals that ask a run to stop: noticed while PyTorch waits, acted on after the step.

Python runs a signal's handler in the main thread, between two bytecodes: never while that thread waits inside PyTorch for
a peer. The wakeup descriptor is written by the C handler at once, and another thread reads it.
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
SAME = 0.5  # seconds within which a second signal counts as the first: a terminal and a launcher both pass it on


def stopping(number: int) -> str:
    """Return what a person reads once a run was asked to stop.

    >>> stopping(15)
    'SIGTERM: stopping after this step; again: at once'
    """
    return f"{signal.Signals(number).name}: stopping after this step; again: at once"


AT_ONCE = "stopped at once; the last whole checkpoint is kept"


class StopSignals:
    """Collects TERM, INT and USR1 while it is entered; outside a program's main thread it hears none.

    With `interrupts` a second signal raises KeyboardInterrupt in the main thread: for a run inside somebody's program.
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
            # A process that was told to ignore one, as shells do for jobs in the background, goes on ignoring it.
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
        """Wait at most so long; return the signals that came."""
        try:
            ready, _, _ = select.select([self._read], [], [], seconds)
            found = self._read.recv(4096) if ready else b""
        except (OSError, ValueError):  # closed meanwhile
            return []
        return [number for number in found if number in SIGNALS]

    def ignore(self) -> None:
        """Ignore what comes from now on: all has been saved, and launchers end the ranks that are left."""
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Leave it to the thread that reads. Python needs a handler, or the signal would end the process."""
        now = time.monotonic()
        if self._interrupts and now > self._first + SAME:
            raise KeyboardInterrupt
        self._first = min(self._first, now)


class Asked:
    """Reads the signals together: the first asks to stop, a later Ctrl-C to end at once."""

    def __init__(self) -> None:
        self.number, self.at_once = 0, False
        self._since = float("inf")

    def add(self, number: int, *, again: bool) -> bool:
        """Take one signal; return True for the first. `again`: a repeated one ends the run at once."""
        if not self.number:
            self.number, self._since = number, time.monotonic()
            return True
        self.at_once = self.at_once or (again and time.monotonic() > self._since + SAME)
        return False

    def withdraw(self) -> None:
        """Forget the signal: it was not meant as a request."""
        self.number, self._since = 0, float("inf")
