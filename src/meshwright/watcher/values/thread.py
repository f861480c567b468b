"""What is kept of one thread of the program."""

from __future__ import annotations

from typing import Any


class Thread:
    """The watched calls that it is in; `busy` while our own code runs what might be watched."""

    __slots__ = ("busy", "calls", "name")

    def __init__(self, name: str) -> None:
        self.name, self.busy = name, False
        self.calls: list[Any] = []  # (key, start) in the short form, `Call` in the full one
