"""From text to kernels: functions that Triton compiles when they are first launched."""

from __future__ import annotations

import linecache
from itertools import count
from typing import Any

_NAMES = count()


def functions(text: str) -> dict[str, Any]:
    """What the text defines, by name; it may use what `triton_parts` and `triton_waiting` have."""
    from meshwright.compress import triton_parts, triton_waiting

    name = f"<kernels {next(_NAMES)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # where Triton looks for the text
    names: dict[str, Any] = {**vars(triton_parts), **vars(triton_waiting), "__name__": "meshwright.compress.generated"}
    exec(compile(text, name, "exec"), names)
    return names
