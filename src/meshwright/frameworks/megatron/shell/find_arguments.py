"""Find the arguments in a file: a shell script, a plain list, or a table in YAML or JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.base.files import parse_json
from meshwright.errors import InputError, shorten
from meshwright.frameworks.megatron.shell.run import Script, read_script

_ROW = re.compile(r"(\s*)(?:- +)?[\"']?([^\s\"':#][^\"':]*)[\"']?\s*:(?:\s+(.*?))?\s*$")
_SWITCHES = {"--standalone", "--no-python", "--no_python", "--run-path", "--run_path"}  # of torchrun
_LAUNCHERS = ("torchrun", "python", "deepspeed", "srun", "mpirun", "msrun", "ray")


@dataclass(frozen=True)
class Found:
    """Words after the training script, words before it, and unknown parts."""

    words: list[str]
    launcher: list[str]
    notes: tuple[str, ...] = ()


def find_words(text: str, file: str) -> Found:
    """Find the words by the type of the file's name, else of its first line."""
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    if text.lstrip().startswith("{"):
        return Found(list(_of_table(parse_json(text, file), file)), [])
    if file.endswith((".yaml", ".yml")) or re.match(r"\s*(- +--|[\w-]+:(\s|$)|---$)", first):
        return Found(list(_of_yaml(text, file)), [])
    return _of_script(read_script(text), file)


def _of_script(script: Script, file: str) -> Found:
    """Return the command with most arguments; else, if nothing is started, all lists that hold some."""
    command = max(script.commands, key=lambda words: sum(w.startswith("--") for w in words), default=[])
    split = _end_of_launcher(command)
    words, launcher = command[split:], command[:split]
    if not any(word.startswith("--") for word in words):
        lists = [items for items in script.variables.values() if any(item.lstrip().startswith("--") for item in items)]
        words, launcher = [word for items in lists for item in items for word in item.split()], []
    if not words:
        raise InputError(
            "holds no arguments such as --num-layers 32", file=file, valid="a script, a list or a table of them"
        )
    notes = [
        f"{name}: the script does not set it; what it would add is left out" for name in dict.fromkeys(script.left_out)
    ]
    for name, value in script.conditional.items():
        if value and set(value.split()) <= set(words):
            notes.append(f"{name}: set under a condition that cannot be told here; taken as {shorten(value, 40)}")
    return Found(words, launcher, tuple(notes))


def _end_of_launcher(command: list[str]) -> int:
    """Return the position after the training program.

    That is the first word that names a Python file or a module. If a variable holds it, the first that is no option of
    torchrun.
    """
    if not command or not any(name in command[0] or name in command for name in _LAUNCHERS):
        return 0
    for i, word in enumerate(command):
        if word.endswith(".py"):
            return i + 1
        if word == "-m" and "torch.distributed" not in " ".join(command[i + 1 : i + 2]):
            return i + 2
    at = command.index("torchrun") + 1 if "torchrun" in command else len(command)
    while at < len(command) and command[at].startswith("-"):
        at += 1 if "=" in command[at] or command[at] in _SWITCHES else 2
    return at + 1 if at < len(command) else 0


def _of_table(table: Any, file: str) -> Iterator[str]:
    """Yield the words of `{"num-layers": 32, "bf16": true}`, in sections or not; a list of words as it is."""
    if isinstance(table, list):
        yield from map(str, table)
        return
    if not isinstance(table, dict):
        raise InputError("is no table of arguments", file=file, valid="name: value, a line each")
    for name, value in table.items():
        if isinstance(value, dict):
            yield from () if name in {"ENV_VARS", "env"} else _of_table(value, file)
        else:
            yield from _said(str(name), value if isinstance(value, list) else [value])


def _said(name: str, values: Iterable[Any]) -> Iterator[str]:
    """Yield the words of one argument: a switch if true or absent, nothing if null or false."""
    words = list(values)
    if words in ([None], [False], ["false"], ["no"], ["null"], ["~"]):
        return
    yield f"--{name.removeprefix('--').replace('_', '-')}"
    if words not in ([True], ["true"], ["yes"], [""]):
        yield from (str(word) for word in words)


def _of_yaml(text: str, file: str) -> Iterator[str]:
    """Yield the words of YAML with sections of `name: value` and lists below a name, nothing else.

    If some names have dashes, only those are arguments (Megatron-LM's own test cases).
    """
    name, values, inside = "", list[str](), ""
    dashed = re.search(r"(?m)^\s*[\"']?--[\w-]+[\"']?\s*:", text) is not None
    for number, line in enumerate(text.splitlines(), 1):
        bare = re.sub(r"(^|\s)#.*$", "", line).rstrip()
        if not bare.strip() or bare.strip() == "---":
            continue
        if item := re.match(r"\s*- +(.*)$", bare):
            values.append(_scalar(item[1]))
            continue
        row = _ROW.match(bare)
        if row is None:
            raise InputError(f"is not 'name: value': {shorten(bare.strip(), 40)}", file=file, line=number, column=1)
        yield from _row(name, values, inside) if not dashed or name.startswith("--") else ()
        inside = inside if row[1] else ("" if row[3] else row[2])
        name, values = row[2], [_scalar(part) for part in _parts(row[3] or "")]
    yield from _row(name, values, inside) if not dashed or name.startswith("--") else ()


def _row(name: str, values: list[str], section: str) -> Iterator[str]:
    if section in {"ENV_VARS", "env"}:
        return
    if values and all(value.startswith("--") for value in values):
        yield from (word for value in values for word in value.split())
    elif name and values:
        yield from _said(name, values)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text[1:-1].split(",")] if text[:1] == "[" else [text] if text else []


def _scalar(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
