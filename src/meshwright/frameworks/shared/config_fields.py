"""Read a user's configuration field by field: wrong types are refused by name, and unread fields reported."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import InputError, kind_of, shorten
from meshwright.frameworks.contract import Beside
from meshwright.models import Model
from meshwright.plans import Job

_DEEPEST = 64  # levels of nesting; no configuration has a tenth of them


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as dotted names; an empty table stays as it is.

    >>> flat({"bf16": {"enabled": True}, "steps": 3})
    {'bf16.enabled': True, 'steps': 3}
    """
    if prefix.count(".") > _DEEPEST:
        raise InputError(f"nested deeper than {_DEEPEST} levels", field=shorten(prefix, 40))
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


@dataclass
class Fields:
    """Dotted names and their values, with a record of those that were read.

    >>> fields = Fields({"bf16.enabled": True, "colour": "red"}, "ds.json")
    >>> fields.flag("bf16.enabled"), fields.left()
    (True, ('colour',))
    """

    values: dict[str, Any]
    file: str
    _read: set[str] = field(default_factory=set)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def raw(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return self.values.get(name, default)

    def whole(self, name: str, default: int, least: int = 1) -> int:
        """Return a whole number."""
        value = self.raw(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            given = value if isinstance(value, int | float) else kind_of(value)
            raise self.wrong(name, f"is {given}", f"a whole number from {least} on")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean; some frameworks write 0 and 1."""
        value = self.raw(name, default)
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        raise self.wrong(name, f"is {shorten(str(value), 40)}", "true or false")

    def word(self, name: str, default: str, known: Collection[str]) -> str:
        """Return one of a framework's known words."""
        value = self.raw(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(name, f"is {shorten(str(value), 40)}", ", ".join(known))
        return value

    def wrong(self, name: str, problem: str, valid: str = "") -> InputError:
        return InputError(problem, file=self.file, field=name, valid=valid)

    def agree(self, name: str, value: int, other: str, computed: int) -> None:
        """Check that two fields with one meaning agree."""
        if value != computed:
            raise self.wrong(name, f"is {value}, but {other} is {computed}", str(computed))

    def rest(self, known: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return unread names: unlisted by the framework, and listed (`section.` lists all below)."""
        sections = tuple(name for name in known if name.endswith("."))
        unused = tuple(name for name in self.left() if name in known or name.startswith(sections))
        return tuple(name for name in self.left() if name not in unused), unused

    def left(self) -> tuple[str, ...]:
        """Return unread names, in the user's order."""
        return tuple(name for name in self.values if name not in self._read)


def job_of(
    fields: Fields, beside: Beside, *, batch: int | None, seq: int | None = None, precision: str = "bf16",
    optimizer: str = "adamw", model: Model | None = None,
) -> Job:  # fmt: skip
    """Return the job of a configuration; its values and the user's must agree."""
    found = model or beside.model
    if found is None:
        raise InputError("the configuration does not hold the model", file=fields.file, field="--model")
    if model and beside.model and model != beside.model:
        raise InputError(f"is {beside.model.name}, the configuration has {model.name}", field="--model")
    for name, said, given in (("--batch", batch, beside.batch), ("--seq", seq, beside.seq)):
        if said and given and said != given:
            raise InputError(f"is {given}, the configuration has {said}", field=name, valid=str(said))
    samples = batch or beside.batch
    if samples is None:
        raise InputError("the configuration does not hold the global batch", file=fields.file, field="--batch")
    return Job(found, beside.cluster, samples, seq or beside.seq or 0, precision, optimizer)
