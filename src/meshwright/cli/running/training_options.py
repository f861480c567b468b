"""The options of a run, the same for `train` and for `launch`, made from the fields of `run.options.Training`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
from msgspec import NODEFAULT, Meta
from msgspec.structs import fields

from meshwright.base.tables import convert
from meshwright.cli.common import F
from meshwright.errors import InputError
from meshwright.run.options import Training


def training_options(verb: F) -> F:
    """Add the options of a run: length, data, learning rate, outputs."""
    for name, kind, meta, default in reversed([*_described()]):
        if not (meta.extra or {}).get("python_only"):
            verb = click.option(*_names(name, kind, meta, default), **_how(kind, meta, default))(verb)
    return verb


def run_of(options: dict[str, Any]) -> Training:
    """Return the run that the options describe; an error is reported at its option."""
    try:
        return convert(options, Training)
    except InputError as error:
        error.field = option_of(error.field)
        raise


def option_of(field: str) -> str:
    """Return the name that a field has on the command line.

    >>> option_of("evaluate_every"), option_of("init_from")
    ('--eval-every', '--init-from')
    """
    extra = next((meta.extra or {} for name, _, meta, _ in _described() if name == field), {})
    return str(extra.get("option", f"--{field.replace('_', '-')}"))


def table() -> str:
    """Return the options as a table of the documentation."""
    lines = ["| option | Python | default | meaning |", "| --- | --- | --- | --- |"]
    for name, kind, meta, default in _described():
        option = "" if (meta.extra or {}).get("python_only") else f"`{option_of(name)}`"
        text = str(meta.description) + (f" One of {', '.join(get_args(kind))}." if get_origin(kind) is Literal else "")
        shown = "required" if default is NODEFAULT else "" if default == "" else f"`{default}`"
        lines.append(f"| {option} | `{name}` | {shown} | {text} |")
    return "\n".join(lines) + "\n"


def _described() -> Iterator[tuple[str, Any, Meta, Any]]:
    """Yield name, type, description and default of every field."""
    hints = get_type_hints(Training, include_extras=True)
    for field in fields(Training):
        kind, meta = get_args(hints[field.name])
        yield field.name, kind, meta, field.default


def _names(name: str, kind: Any, meta: Meta, default: Any) -> list[str]:
    option = option_of(name)
    if kind is bool and default:
        option = f"{option}/--no-{option.removeprefix('--')}"
    short = (meta.extra or {}).get("short")
    return [option, *([short] if short else []), name]


def _how(kind: Any, meta: Meta, default: Any) -> dict[str, Any]:
    """Return what click is told of an option."""
    shown = (
        f" (default {default if isinstance(default, str) else format(default, 'g')})."
        if _worth_saying(kind, default)
        else "."
    )
    told: dict[str, Any] = {"help": str(meta.description)[:-1] + shown}
    if meta.extra and "metavar" in meta.extra:
        told["metavar"] = meta.extra["metavar"]
    if default is NODEFAULT:
        told["required"] = True
    else:
        told["default"] = default
    if kind is bool:
        return told if default else told | {"is_flag": True}
    if get_origin(kind) is Literal:
        return told | {"type": click.Choice(get_args(kind))}
    if kind is int:
        least, most = (None if limit is None else int(limit) for limit in (meta.ge, meta.le))
        return told | {"type": click.IntRange(least, most)}
    if kind is float:
        return told | {"type": click.FloatRange(meta.ge if meta.gt is None else meta.gt, min_open=meta.gt is not None)}
    return told


def _worth_saying(kind: Any, default: Any) -> bool:
    """Return True for a default that is neither nothing nor a switch."""
    return default is not NODEFAULT and kind is not bool and default not in ("", 0)
