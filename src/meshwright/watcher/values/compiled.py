"""The C code of the watch, built on first use with the headers of this Python."""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from meshwright.base.native import BuildError, compiler, loaded
from meshwright.watcher.values.describe import layout_text

_FILES = (
    "tensor.c",
    "same.c",
    "call.c",
    "object.c",
    "locals.c",
    "words.c",
    "hook.c",
    "steps.c",
)  # one text: each file uses those before it


@cache
def compiled() -> tuple[Callable[..., Any], ...] | None:
    """Return the `Makers` of unchanged.py, or None if C cannot be built or Python threads run in parallel."""
    include = sysconfig.get_path("include")
    if (
        not compiler()
        or not os.path.exists(os.path.join(include, "Python.h"))
        or sysconfig.get_config_var("Py_GIL_DISABLED")
    ):
        return None
    folder = files("meshwright.watcher.values")
    text = "".join(folder.joinpath(name).read_text() for name in _FILES)
    try:
        # the version comes first: the build holds for this Python alone
        library = loaded(f"// {sys.version!r}\n{text}", include)
    except BuildError:
        return None
    functions = ctypes.PyDLL(library._name).functions
    functions.argtypes, functions.restype = [ctypes.py_object], ctypes.py_object
    found: tuple[Callable[..., Any], ...] = functions(layout_text)
    return found
