"""One process of a run, as an actor of Ray. Of this room, only this file leads to torch, and only on Ray's workers."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.run.processes.launch import Work


_LOOK = 2.0  # seconds between two looks at what the driver has taken


class Rank:
    """Trains in the main thread of its process, where signals are heard: it has no other thread that could be called."""

    def met(self) -> tuple[str, int, int]:
        """Where the others find this process, at a port that is free; and its number on its node."""
        import ray

        with socket.socket() as opened:
            opened.bind(("", 0))
            return ray.util.get_node_ip_address(), int(opened.getsockname()[1]), os.getpid()

    def train(self, work: Work, place: dict[str, str], driver: tuple[str, int], messages: Messages) -> int:
        """Train until the end; return the exit code. What ended the run too early is among the messages.

        `place` is the environment that torchrun would give; `driver` the machine and number of the driver's process.
        """
        from meshwright.base.processes import this_machine
        from meshwright.run.processes.launch import quiet_exit
        from meshwright.run.processes.worker import Sender, work_for

        os.environ.update(place)
        machine, process = driver
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # Ray starts its workers without it
        near = process if machine == this_machine() else 0

        def finish(code: int) -> None:
            """End this process where its main thread waits for others, and else the call: Ray reports lost workers."""
            if threading.current_thread() is not threading.main_thread():
                quiet_exit(code)
            raise _Left(code)

        try:
            return work_for(work, Sender(int(place["RANK"]), messages.put, finish, near, messages.read), ours=False)
        except _Left as left:
            return left.code


class _Left(Exception):
    """Training has ended too early, with an exit code; what ended it was sent."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Messages:
    """A queue of Ray's, as ranks use it: only the first one's events matter to the driver."""

    def __init__(self, queue: Any, *, events: bool) -> None:
        self._queue, self._events = queue, events
        self._put = self._taken = 0
        self._looked, self._reads = time.monotonic(), True

    def put(self, message: Any) -> None:
        """Send one message, and wait until it has arrived: this process may end next."""
        if self._events or message[0] != "event":
            self._queue.put(message, timeout=10)
            self._put += 1

    def read(self) -> bool:
        """Return True while the driver takes messages, as far as the rank that sends events can see; looks rarely."""
        if self._events and time.monotonic() > self._looked + _LOOK:
            self._looked = time.monotonic()
            with suppress(Exception):  # a queue that is gone belongs to a driver that is gone
                left = int(self._queue.qsize())
                self._reads = left == 0 or self._put - left > self._taken
                self._taken = self._put - left
        return self._reads


def ask_to_end(process: int) -> None:
    """A process of this node, after a whole step and with a checkpoint."""
    os.kill(process, signal.SIGTERM)
