"""From text to kernels: functions that Triton compiles when they are first launched."""

from __future__ import annotations

import linecache
from itertools import count
from typing import Any

_NAMES = count()


def functions(text: str) -> dict[str, Any]:
    """What the text defines, by name; it may use what `triton_parts` and `triton_waiting` have."""
    from meshwright.compression.backends.triton import parts, waiting

    name = f"<kernels {next(_NAMES)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # where Triton looks for the text
    names: dict[str, Any] = {**vars(parts), **vars(waiting), "__name__": "meshwright.compression.generated"}
    exec(compile(text, name, "exec"), names)
    return names
