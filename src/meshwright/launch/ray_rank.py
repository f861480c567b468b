"""One process of a run, as an actor of Ray. Of this room, only this file leads to torch, and only on Ray's workers."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.run.launch import Work


class Rank:
    """Trains in the main thread of its process, where signals are heard: it has no other thread that could be called."""

    def met(self) -> tuple[str, int, int]:
        """Where the others find this process, at a port that is free; and its number on its node."""
        import ray

        with socket.socket() as opened:
            opened.bind(("", 0))
            return ray.util.get_node_ip_address(), int(opened.getsockname()[1]), os.getpid()

    def train(self, work: Work, place: dict[str, str], driver: tuple[str, int], messages: Any) -> int:
        """Train until the end; return the exit code. What ended the run too early is among the messages.

        `place` is the environment that torchrun would give; `driver` the machine and number of the driver's process.
        """
        from meshwright.processes import this_machine
        from meshwright.run.launch import quiet_exit
        from meshwright.run.worker import Sender, work_for

        os.environ.update(place)
        machine, process = driver
        sender = Sender(
            int(place["RANK"]), messages.put, quiet_exit, process if machine == this_machine() else 0, Reads(messages)
        )
        return work_for(work, sender, ours=False)


class Reads:
    """Returns True while the driver takes messages from the queue; asks now and then."""

    EVERY = 5.0  # seconds

    def __init__(self, messages: Any) -> None:
        self._messages, self._asked, self._found = messages, time.monotonic(), True

    def __call__(self) -> bool:
        if time.monotonic() > self._asked + self.EVERY:
            self._asked = time.monotonic()
            with suppress(Exception):  # a queue that is gone belongs to a driver that is gone
                self._found = self._messages.waiting() == 0
        return self._found


class Messages:
    """A queue of Ray's, as ranks use it: only the first one's events matter to the driver."""

    def __init__(self, queue: Any, *, events: bool) -> None:
        self._queue, self._events = queue, events

    def put(self, message: Any) -> None:
        """Send one message, and wait until it has arrived: this process may end next."""
        if self._events or message[0] != "event":
            self._queue.put(message, timeout=10)

    def waiting(self) -> int:
        """Return how many messages the driver has not taken yet."""
        return int(self._queue.qsize())


def ask_to_end(process: int) -> None:
    """A process of this node, after a whole step and with a checkpoint."""
    os.kill(process, signal.SIGTERM)
