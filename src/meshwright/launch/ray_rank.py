"""One process of a run, as an actor of Ray. Of this room, only this file leads to torch, and only on Ray's workers."""

from __future__ import annotations

import os
import signal
import socket
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

    def train(self, work: Work, place: dict[str, str], events: Any) -> dict[str, Any] | None:
        """Until the end; what went wrong, if anything did. `place` is the environment that torchrun would give."""
        from meshwright.run.worker import attempt

        os.environ.update(place)
        return attempt(work, int(place["LOCAL_RANK"]), int(place["LOCAL_WORLD_SIZE"]), events.put)


def ask_to_end(process: int) -> None:
    """A process of this node, after a whole step and with a checkpoint."""
    os.kill(process, signal.SIGTERM)
