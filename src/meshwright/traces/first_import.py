"""Settings that a library reads from the environment when it is loaded, and never again."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_import(module: str, variable: str, value: str) -> Iterator[bool]:
    """What is imported inside finds the variable; yields whether it was set for it.

    It is not where the module is loaded already, or the variable is the user's own. The environment is as before afterwards.

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
