"""One process of a run, as an actor of Ray. Of this room, only this file leads to torch, and only on Ray's workers."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.run.launch import Work


class Rank:
    """Trains in the main thread of its process, where signals are heard; the other methods have a thread of their own."""

    def address(self) -> tuple[str, int]:
        """Where the others find this process, at a port that is free."""
        import ray

        with socket.socket() as opened:
            opened.bind(("", 0))
            return ray.util.get_node_ip_address(), int(opened.getsockname()[1])

    def train(self, work: Work, place: dict[str, str], events: Any) -> dict[str, Any] | None:
        """Until the end; what went wrong, if anything did. `place` is the environment that torchrun would give."""
        from meshwright.run.worker import attempt

        os.environ.update(place)
        return attempt(work, int(place["LOCAL_RANK"]), int(place["LOCAL_WORLD_SIZE"]), events.put)

    def stop(self) -> None:
        """End after a whole step, with a checkpoint."""
        os.kill(os.getpid(), signal.SIGTERM)
