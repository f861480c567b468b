"""One rank of a run, as a Ray actor. Only this file of the room imports torch, and only on Ray's workers."""

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


_LOOK = 2.0  # seconds between two looks at whether the driver still reads


class Rank:
    """Actor that trains in the main thread of its process, which receives signals; no other thread could be called."""

    def met(self) -> tuple[str, int, int]:
        """Return the host, a free port, and this process's number on its node."""
        import ray

        with socket.socket() as opened:
            opened.bind(("", 0))
            return ray.util.get_node_ip_address(), int(opened.getsockname()[1]), os.getpid()

    def train(self, work: Work, place: dict[str, str], driver: tuple[str, int], messages: Messages) -> int:
        """Train until the end and return the exit code. An error that ended the run early is among the messages.

        `place` is the environment that torchrun would set; `driver` is the machine and process number of the driver.
        """
        from meshwright.base.processes import this_machine
        from meshwright.run.processes.launch import quiet_exit
        from meshwright.run.processes.worker import Sender, work_for

        os.environ.update(place)
        machine, process = driver
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # Ray starts its workers without it
        near = process if machine == this_machine() else 0

        def finish(code: int) -> None:
            """End this process if its main thread waits for others, else end the call: Ray reports lost workers."""
            if threading.current_thread() is not threading.main_thread():
                quiet_exit(code)
            raise _Left(code)

        try:
            return work_for(work, Sender(int(place["RANK"]), messages.put, finish, near, messages.read), ours=False)
        except _Left as left:
            return left.code


class _Left(Exception):
    """Signal that training ended early with an exit code; its error has been sent."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Messages:
    """Ray queue for the ranks: the driver only needs the events of the first rank."""

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
        """Return True while the driver reads messages, as far as the sending rank can see; looks rarely."""
        if self._events and time.monotonic() > self._looked + _LOOK:
            self._looked = time.monotonic()
            with suppress(Exception):  # a queue that is gone belongs to a driver that is gone
                left = int(self._queue.qsize())
                self._reads = left == 0 or self._put - left > self._taken
                self._taken = self._put - left
        return self._reads


def ask_to_end(process: int) -> None:
    """Ask a process of this node to end after a whole step, with a checkpoint."""
    os.kill(process, signal.SIGTERM)
