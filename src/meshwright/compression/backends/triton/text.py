"""Compile text to kernels: functions that Triton compiles at their first launch."""

from __future__ import annotations

import linecache
from itertools import count
from typing import Any

_NAMES = count()


def functions(text: str) -> dict[str, Any]:
    """Return the functions that a text defines; it may use those of `triton_parts` and `triton_waiting`."""
    from meshwright.compression.backends.triton import parts, waiting

    name = f"<kernels {next(_NAMES)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # Triton looks for the text here
    names: dict[str, Any] = {**vars(parts), **vars(waiting), "__name__": "meshwright.compression.generated"}
    exec(compile(text, name, "exec"), names)
    return names
