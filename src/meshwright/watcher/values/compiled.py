"""The C code of the watch, built on first use with the headers of this Python."""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Callable
from functools import cache
from typing import Any

from meshwright.base.native import BuildError, packaged
from meshwright.watcher.values.describe import layout_text


@cache
def compiled() -> tuple[Callable[..., Any], ...] | None:
    """Return the `Makers` of unchanged.py; None if the C is missing, or Python threads run in parallel."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    try:
        library = packaged("meshwright.watcher.values._hooks")
    except BuildError:
        return None
    functions = ctypes.PyDLL(library._name).functions
    functions.argtypes, functions.restype = [ctypes.py_object], ctypes.py_object
    found: tuple[Callable[..., Any], ...] = functions(layout_text)
    return found
