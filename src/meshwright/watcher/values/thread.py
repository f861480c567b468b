"""State of one thread of the program."""

from __future__ import annotations

from typing import Any


class Thread:
    """Watched calls that a thread is in; `busy` while our own code runs something that might be watched."""

    __slots__ = ("busy", "calls", "name")

    def __init__(self, name: str) -> None:
        self.name, self.busy = name, False
        self.calls: list[Any] = []  # (key, start) in the short form, `Call` in the full one
