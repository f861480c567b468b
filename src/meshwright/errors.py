"""Errors of this package, as one small tree.

    MeshwrightError
    ├── InputError          the user gave something wrong           exit code 2
    │   ├── UnknownName     a name that is not in a catalogue
    │   └── PlanError       a plan that breaks a named rule
    ├── DoesNotFit          the job cannot be done on this cluster  exit code 1
    ├── DiskFull            a file could not be written             exit code 1
    └── TrainingFailed      a run began and could not go on         exit code 1

Every error says what was asked, where (file and field), and what would be valid.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

# Exit codes of every verb, and of training under every launcher (docs/train.md has the table).
FINISHED, FAILED, BAD_INPUT = 0, 1, 2
STOPPED = 3  # a signal ended the run early, after a checkpoint: no controller may take it for success
BUG = 70  # a mistake of ours (EX_SOFTWARE of sysexits.h)


class MeshwrightError(Exception):
    """Base of every error that meshwright raises on purpose."""

    exit_code = BAD_INPUT

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors of ranks travel to the process that started them, with all that they carry."""
        return _copied, (type(self), self.args, self.__dict__)


def _copied(kind: type[MeshwrightError], arguments: tuple[Any, ...], facts: dict[str, Any]) -> MeshwrightError:
    found = kind.__new__(kind, *arguments)
    found.__dict__.update(facts)
    return found


class InputError(MeshwrightError):
    """Something the user wrote is wrong; nothing was changed.

    >>> print(InputError("expected an integer", file="plan.json", field="job.seq_len"))
    plan.json: job.seq_len: expected an integer
    """

    def __init__(
        self, problem: str, *, file: str = "", field: str = "", valid: str = "", line: int = 0, column: int = 0
    ) -> None:
        self.problem, self.file, self.field, self.valid = problem, file, field, valid
        self.line, self.column = line, column
        super().__init__(problem)

    def __str__(self) -> str:
        place = self.file + (f":{self.line}:{self.column}" if self.line else "")
        where = "".join(f"{part}: " for part in (place, self.field) if part)
        hint = f" (valid: {self.valid})" if self.valid else ""
        return f"{where}{self.problem}{hint}"

    def at(self, *, file: str = "", field: str = "") -> InputError:
        """The same error with its place filled in where it was still unknown."""
        self.file = self.file or file
        self.field = self.field or field
        return self

    def as_json(self) -> dict[str, object]:
        facts = {
            "error": self.problem,
            "file": self.file,
            "field": self.field,
            "line": self.line,
            "column": self.column,
            "valid": self.valid,
        }
        return {key: value for key, value in facts.items() if value or key == "error"}


class UnknownName(InputError):
    """A name that no catalogue holds; carries the closest ones that exist.

    >>> UnknownName("device", "h10", ["h100", "v100"]).closest
    ['h100']
    """

    def __init__(self, what: str, name: str, known: Iterable[str], *, see: str = "") -> None:
        self.closest = closest_names(name, known)
        guess = f"; did you mean {' or '.join(self.closest)}?" if self.closest else ""
        super().__init__(f"unknown {what} '{shorten(name)}'{guess}", valid=see)

    def as_json(self) -> dict[str, object]:
        return super().as_json() | {"closest": self.closest}


class PlanError(InputError):
    """A plan that breaks one of the rules of `meshwright.plans.rules`, by the rule's name."""

    def __init__(self, rule: str, problem: str, *, field: str = "", valid: str = "") -> None:
        self.rule = rule
        super().__init__(problem, field=field, valid=valid)

    def __str__(self) -> str:
        return f"{super().__str__()} [rule: {self.rule}]"

    def as_json(self) -> dict[str, object]:
        return super().as_json() | {"rule": self.rule}


class DoesNotFit(MeshwrightError):
    """The job cannot be done: says which memory is short and by how much."""

    exit_code = FAILED

    def __init__(self, problem: str, *, short_by_bytes: int) -> None:
        self.problem, self.short_by_bytes = problem, short_by_bytes
        super().__init__(problem)

    def as_json(self) -> dict[str, object]:
        return {"error": self.problem, "short_by_bytes": self.short_by_bytes}


class TrainingFailed(MeshwrightError):
    """A run that began and could not go on: a lost or stuck rank, memory, a full disk, a loss that diverges."""

    exit_code = FAILED


class DiskFull(MeshwrightError):
    """A file that has no room: nothing that the user wrote is wrong, and what was there before is kept.

    >>> print(DiskFull("cannot be written: No space left on device", file="plan.json"))
    plan.json: cannot be written: No space left on device
    """

    exit_code = FAILED

    def __init__(self, problem: str, *, file: str = "", field: str = "") -> None:
        self.problem, self.file, self.field = problem, file, field
        super().__init__(problem)

    def __str__(self) -> str:
        return "".join(f"{part}: " for part in (self.file, self.field) if part) + self.problem

    def as_json(self) -> dict[str, object]:
        facts = {"error": self.problem, "file": self.file, "field": self.field}
        return {key: value for key, value in facts.items() if value or key == "error"}


def plain(name: str) -> str:
    """Return a name as names are compared: in small letters, with punctuation only between two digits.

    >>> plain("Llama-3.1_8B"), plain("gpt3-1.3b"), plain("gpt3-13b")
    ('llama3.1-8b', 'gpt3-1.3b', 'gpt3-13b')
    >>> plain("GPT-2 XL") == plain("gpt2-xl")
    True
    """
    dashed = re.sub(r"[^a-z0-9.]+", "-", name.lower())
    return re.sub(r"(?<![0-9])[-.]|[-.](?![0-9])", "", dashed)


def shorten(text: str, limit: int = 80) -> str:
    """One printable line of user text, safe to repeat in a message."""
    line = "".join(c if c.isprintable() else "?" for c in text)
    return line if len(line) <= limit else line[: limit - 3] + "..."


def kind_of(value: object) -> str:
    """Return the kind of a JSON value, in JSON's words.

    >>> kind_of(None), kind_of([1])
    ('null', 'a list')
    """
    kinds = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
    }
    return kinds.get(type(value), f"a {type(value).__name__}")


def closest_names(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The catalogue names that look most like what was typed, best first."""
    by_plain: dict[str, str] = {}
    for candidate in known:
        by_plain.setdefault(plain(candidate), candidate)
    wanted = plain(name)[:60]
    found = difflib.get_close_matches(wanted, by_plain, n=limit, cutoff=0.6)
    if wanted:
        found += [k for k in by_plain if k.startswith(wanted) and k not in found]
    return [by_plain[key] for key in found[:limit]]
