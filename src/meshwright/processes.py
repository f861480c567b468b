"""Starting processes from somebody's script."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def script_left_alone() -> Iterator[None]:
    """Processes begun meanwhile do not run the user's script again, as multiprocessing would: they need nothing of it.

    >>> with script_left_alone():
    ...     hasattr(sys.modules["__main__"], "__file__")
    False
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
