"""Convert tables that users write (JSON, TOML) to typed structs, with errors that name the field and what is valid."""

from __future__ import annotations

import re
import types
import typing
from typing import Any, TypeVar

import msgspec

from meshwright.errors import InputError, closest_names, shorten

T = TypeVar("T")


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of everything a user may write: immutable, compared by value, unknown fields refused."""


def convert(table: object, kind: type[T], *, file: str = "", prefix: str = "") -> T:
    """Check `table` against `kind` and build it, or raise an `InputError` at the offending field.

    >>> class Point(Table):
    ...     x: int
    >>> convert({"x": "one"}, Point, file="point.json")
    Traceback (most recent call last):
    meshwright.errors.InputError: point.json: x: expected an integer, got a string
    """
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind, file, prefix) from None
    except UnicodeEncodeError:
        raise InputError("a string holds half of a surrogate pair", file=file, field=prefix) from None


def _explain(message: str, kind: Any, file: str, prefix: str) -> InputError:
    match = re.fullmatch(r"(?P<problem>.*?)(?: - at `(?P<path>.*)`)?", message, re.S)
    assert match is not None
    problem, path = match["problem"], (match["path"] or "$")[1:].lstrip(".")
    place = _type_at(kind, path)
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem, re.S):
        names = [f.encode_name for f in msgspec.structs.fields(place)] if _is_table(place) else []
        near = closest_names(unknown[1], names, limit=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return _at(f"unknown field '{shorten(unknown[1])}'{hint}", file, prefix, path, ", ".join(names))
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return _at("is required", file, prefix, f"{path}.{missing[1]}".lstrip("."), "")
    if problem.startswith("Invalid enum value"):
        given = problem.removeprefix("Invalid enum value ")
        options = [str(option) for option in _options(place)]
        near = closest_names(given, options, limit=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return _at(f"{shorten(given)} is not one of its values{hint}", file, prefix, path, ", ".join(options))
    return _at(_plain_english(problem), file, prefix, path, "")


def _at(problem: str, file: str, prefix: str, path: str, valid: str) -> InputError:
    field = ".".join(part for part in (prefix, path) if part)
    return InputError(problem, file=file, field=field, valid=valid)


_WORDS = {
    "`int`": "an integer",
    "`float`": "a number",
    "`str`": "a string",
    "`bool`": "true or false",
    "`object`": "an object",
    "`array`": "a list",
    "`null`": "null",
}


def _plain_english(problem: str) -> str:
    def spell(match: re.Match[str]) -> str:
        return " or ".join(_WORDS.get(f"`{word}`", word) for word in match[1].split(" | "))

    problem = re.sub(r"`(\w+(?: \| \w+)*)`", spell, problem)
    return problem[:1].lower() + problem[1:]


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _unwrap(kind: Any) -> list[Any]:
    """Return the members of a union or annotation, without None."""
    if typing.get_origin(kind) is typing.Annotated:
        return _unwrap(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [m for arg in typing.get_args(kind) for m in _unwrap(arg) if arg is not type(None)]
    return [kind]


def _type_at(kind: Any, path: str) -> Any:
    """Return the declared type at a path such as `stages[0].spans[...].tp`."""
    for step in re.findall(r"[^.\[\]]+|\[[^\]]*\]", path):
        following = None
        for member in _unwrap(kind):
            if step.startswith("[") and typing.get_args(member):
                following = typing.get_args(member)[-1 if typing.get_origin(member) is dict else 0]
            elif _is_table(member):
                hints = typing.get_type_hints(member, include_extras=True)
                following = hints.get(step, following)
        if following is None:
            return None
        kind = following
    members = [m for m in _unwrap(kind) if _is_table(m)]
    return members[0] if members else kind


def _options(kind: Any) -> list[Any]:
    return [option for m in _unwrap(kind) if typing.get_origin(m) is typing.Literal for option in typing.get_args(m)]
