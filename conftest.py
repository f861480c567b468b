"""What all tests share, those in docstrings of src/ too: CPU-seconds by room, and Ctrl-C."""

from __future__ import annotations

import re
import signal
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest_plugins = ("tests.cpu_shares",)


def pytest_configure(config: pytest.Config) -> None:
    """Hear Ctrl-C, and let what tests start hear it: scripts start background jobs deaf to it, and children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out tests that need PyTorch, themselves or by a helper, where it is missing (tests/other_pythons.sh)."""
    if collection_path.suffix != ".py" or find_spec("torch"):
        return None
    return True if _needs_torch(collection_path) else None


@cache
def _needs_torch(path: Path) -> bool:
    text = path.read_text("utf-8")
    if re.search(r"^(import|from) (torch|transformers|safetensors|highspy|ray)\b", text, re.M):
        return True
    helpers = [
        Path(*name.split(".")).with_suffix(".py") for name in re.findall(r"^from (tests[\w.]*) import", text, re.M)
    ]
    helpers += [
        Path(*package.split("."), f"{name.strip()}.py")
        for package, names in re.findall(r"^from (tests[\w.]*) import ([\w, ]+)", text, re.M)
        for name in names.split(",")
    ]
    root = Path(__file__).parent
    return any(_needs_torch(root / each) for each in helpers if (root / each).exists() and root / each != path)
