"""Imported by the server that ranks of this machine are forked from, and by nobody else.

Signals to the whole process group (a terminal's, a scheduler's, timeout's) must not end it: exit codes of ranks come through
it. A rank hears them again once `listen` was called.
"""

from __future__ import annotations

import signal

import meshwright.run.worker  # noqa: F401 - torch is imported once, for all ranks

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
for _number in _SIGNALS:
    signal.signal(_number, signal.SIG_IGN)


def listen() -> None:
    """Take signals as any new process does."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
