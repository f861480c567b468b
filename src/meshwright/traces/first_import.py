"""Set environment variables that a library reads only when it is first imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_import(module: str, variable: str, value: str) -> Iterator[bool]:
    """Set a variable while a module is imported in the block; yield True if it was set.

    It is not set if the module is already imported, or if the user has set the variable. The environment is restored
    afterwards.

    >>> with first_import("some_module", "SOME_VARIABLE", "1") as is_set:
    ...     is_set, os.environ["SOME_VARIABLE"]
    (True, '1')
    >>> "SOME_VARIABLE" in os.environ
    False
    """
    if module in sys.modules or variable in os.environ:
        yield False
        return
    os.environ[variable] = value
    try:
        yield True
    finally:
        os.environ.pop(variable, None)
