"""Read files with precise errors and write them without ever leaving half a file."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from meshwright.errors import DiskFull, InputError

_DEEPEST = 64  # levels of nesting; far beyond any document of ours
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room: on the disk, in a quota, under a limit of the process


def read_text(path: str | Path) -> str:
    """Return the whole file as UTF-8 text; any failure is an `InputError`."""
    name = str(path)
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError("no such file", file=name) from None
    except IsADirectoryError:
        raise InputError("is a folder, expected a file", file=name) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot be read: {reason}", file=name) from None
    return decode_text(raw, name)


def decode_text(raw: bytes, name: str) -> str:
    """Return bytes from a file or a pipe as text. A byte-order mark is accepted, an empty text is refused."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text (byte {error.start} is 0x{raw[error.start]:02x})", file=name) from None
    if not text.strip():
        raise InputError("is empty", file=name)
    return text


def parse_json(text: str, name: str = "") -> Any:
    """Parse JSON and report the line and column of a mistake. Duplicate keys, NaN and Infinity are mistakes."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise _at(text, json.dumps(key), f"the key '{key}' appears twice in one object", name, last=True)
            seen[key] = value
        return seen

    def no_constant(constant: str) -> NoReturn:
        raise _at(text, constant, f"{constant} is not a JSON number", name)

    def finite(digits: str) -> float:
        if math.isinf(value := float(digits)):
            raise InputError(f"{digits[:20]} is too large for a number", file=name)
        return value

    try:
        value = json.loads(text, object_pairs_hook=no_duplicates, parse_constant=no_constant, parse_float=finite)
        _check_depth(value)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        problem = f"malformed JSON: {error.msg.removesuffix(' starting at')}"
        raise InputError(problem, file=name, line=error.lineno, column=error.colno) from None
    except RecursionError:
        raise InputError(f"malformed JSON: nested deeper than {_DEEPEST} levels", file=name) from None
    except UnicodeEncodeError:
        raise InputError("malformed JSON: a string holds half of a surrogate pair", file=name) from None
    except ValueError as error:  # an integer with more digits than Python converts
        raise InputError(f"malformed JSON: {error}", file=name) from None
    return value


def _at(text: str, what: str, problem: str, name: str, *, last: bool = False) -> InputError:
    """Return an error with the line and column of `what`, at its first or last occurrence."""
    position = text.rfind(what) if last else text.find(what)
    if position < 0:
        return InputError(problem, file=name)
    line = text.count("\n", 0, position) + 1
    return InputError(problem, file=name, line=line, column=position - text.rfind("\n", 0, position))


def _check_depth(value: Any, depth: int = 0) -> None:
    if depth > _DEEPEST:
        raise RecursionError
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(item, depth + 1)


def parse_toml(text: str, name: str = "") -> dict[str, Any]:
    """Parse TOML and report the line and column of a mistake."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line, column = (int(place[1]), int(place[2])) if place else (text.count("\n") + 1, 1)
        problem = re.sub(r" \(at .*\)$", "", str(error))
        raise InputError(f"malformed TOML: {problem}", file=name, line=line, column=column) from None
    except RecursionError:
        raise InputError("malformed TOML: nested too deeply", file=name) from None
    except ValueError as error:
        raise InputError(f"malformed TOML: {error}", file=name) from None


def read_json(path: str | Path) -> Any:
    return parse_json(read_text(path), str(path))


def read_toml(path: str | Path) -> dict[str, Any]:
    return parse_toml(read_text(path), str(path))


def writable(option: str, path: str) -> None:
    """Refuse a path that cannot be written, before long work whose result goes there."""
    folder = os.path.dirname(path) or "."
    if not path or os.path.isdir(path):
        raise InputError("is a folder" if path else "names no file", field=option, valid="the path of a file")
    if not os.path.isdir(folder):
        raise InputError(f"there is no folder '{folder}'", field=option)
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise InputError(f"'{path}' cannot be written", field=option)


def write_text(path: str | Path, text: str) -> None:
    """Write beside the target, then rename: readers see the old file or the new one, never half.

    Links are followed. A pipe or a device is written to, not replaced.
    """
    write_texts({path: text})


def write_texts(texts: Mapping[str | Path, str]) -> None:
    """Write several files; none appears before all of them are on the disk."""
    try:
        replace_texts(texts)
    except OSError as error:
        raise write_error(error, file=str(error.filename)) from None


def replace_texts(texts: Mapping[str | Path, str]) -> None:
    """Write as `write_texts` does, but raise an `OSError` that names the file when the disk refuses."""
    staged: list[tuple[str | Path, Path, str]] = []
    path: str | Path = ""
    try:
        for path, text in texts.items():
            target = Path(os.path.realpath(path))
            if target.exists() and not target.is_file() and not target.is_dir():
                target.write_bytes(text.encode())
                continue
            handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            staged.append((path, target, temporary))
            with os.fdopen(handle, "wb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, target.stat().st_mode if target.exists() else 0o666 & ~_umask())
        for path, target, temporary in staged:  # noqa: B007 - an error names the path
            os.replace(temporary, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    finally:
        for _, _, temporary in staged:
            with suppress(FileNotFoundError):  # it was renamed
                os.unlink(temporary)


def write_error(error: OSError, *, file: str, field: str = "") -> InputError | DiskFull:
    """Return the error to raise where the system refuses to write; a full disk is not the user's mistake.

    >>> write_error(OSError(errno.ENOSPC, "No space left on device"), file="a.json").exit_code
    1
    """
    kind = DiskFull if error.errno in _FULL else InputError
    return kind(f"cannot be written: {error.strerror or error}", file=file, field=field)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def pretty_json(value: Any, width: int = 100, one_line: Callable[[Any], bool] = lambda value: False) -> str:
    """Return JSON for people: on one line whatever fits there or `one_line` picks.

    >>> print(pretty_json({"a": [1, 2], "b": {"c": None}}, width=20), end="")
    {
      "a": [1, 2],
      "b": {"c": null}
    }
    """
    return _layout(value, 0, width, one_line) + "\n"


def _layout(value: Any, indent: int, width: int, one_line: Callable[[Any], bool], lead: int = 0) -> str:
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, dict | list | tuple) or not value:
        return flat
    if one_line(value) or (indent and indent + lead + len(flat) < width):
        return flat
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        rows = []
        for key, item in value.items():
            label = json.dumps(key, ensure_ascii=False) + ": "
            rows.append(pad + label + _layout(item, indent + 2, width, one_line, len(label)))
        return "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}"
    rows = [pad + _layout(item, indent + 2, width, one_line) for item in value]
    return "[\n" + ",\n".join(rows) + "\n" + " " * indent + "]"


def line_of(facts: dict[str, Any]) -> str:
    """Return facts as one line of JSON; a number that is not finite becomes null.

    >>> line_of({"loss": float("inf")})
    '{"loss": null}'
    """
    known = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in facts.items()}
    return json.dumps(known, allow_nan=False)
