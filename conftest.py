"""What all tests share, those in docstrings of src/ too: CPU-seconds by room, and Ctrl-C."""

from __future__ import annotations

import signal

import pytest

pytest_plugins = ("tests.cpu_shares",)


def pytest_configure(config: pytest.Config) -> None:
    """Hear Ctrl-C, and let what tests start hear it: scripts start background jobs deaf to it, and children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
