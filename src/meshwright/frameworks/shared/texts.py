"""Write small texts for several formats: YAML of tables and plain values, and a command over several lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def yaml(table: Mapping[str, Any], indent: str = "") -> str:
    """Return YAML of nested tables and plain values, as much as these formats need.

    >>> print(yaml({"actor": {"backend": "fsdp:d8", "offload": False}}), end="")
    actor:
      backend: "fsdp:d8"
      offload: false
    """
    text = ""
    for name, value in table.items():
        if isinstance(value, Mapping):
            text += f"{indent}{name}:\n" + yaml(value, indent + "  ")
        else:
            text += f"{indent}{name}: {_scalar(value)}\n"
    return text


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    # Words with another meaning in YAML are quoted.
    return (
        f'"{value}"'
        if isinstance(value, str) and (value == "no" or not value.replace("_", "").isalnum())
        else str(value)
    )


def script(command: str, words: Sequence[str]) -> str:
    """Return a shell script of one command, an argument per line; the user's own arguments follow.

    >>> print(script("deepspeed train.py", ["--steps 3"]), end="")
    #!/bin/sh
    exec deepspeed train.py \\
      --steps 3 \\
      "$@"
    """
    return f"#!/bin/sh\nexec {command} \\\n" + "".join(f"  {word} \\\n" for word in words) + '  "$@"\n'
