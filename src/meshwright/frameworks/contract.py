"""Contract of every format: exported files, the parts they cannot express, and the way back to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.clusters import Cluster
from meshwright.errors import MeshwrightError
from meshwright.models import Model
from meshwright.plans import Job, Plan


class Inexpressible(MeshwrightError):
    """Error of a plan whose shape a framework cannot express, not even approximately."""

    exit_code = 1


@dataclass(frozen=True)
class Exported:
    """A plan in the format of another framework."""

    files: Mapping[str, str]  # name -> text; the first is the one to start
    command: str  # command that starts it
    plan: Plan  # meaning of the files: the given plan, or the nearest possible one
    missing: tuple[str, ...] = ()  # what the files cannot express, and its replacement; a line each
    to_fill: tuple[str, ...] = ()  # what the user must still fill in, such as the data; a line each


@dataclass(frozen=True)
class Beside:
    """User's input that a configuration does not hold."""

    cluster: Cluster
    model: Model | None = None
    batch: int | None = None
    seq: int | None = None


@dataclass(frozen=True)
class Imported:
    """A configuration of another framework as a plan."""

    job: Job
    plan: Plan
    unknown: tuple[str, ...] = ()  # arguments that the framework does not list, as written
    unused: tuple[str, ...] = ()  # known arguments without effect on a plan
    assumed: tuple[str, ...] = ()  # missing values, and what is assumed instead; a line each


Writer = Callable[[Job, Plan], Exported]
Reader = Callable[[str, str, Beside], Imported]  # text, the file's name for messages, further input


@dataclass(frozen=True)
class Format:
    """Format of one framework for plans."""

    name: str
    title: str
    target: str  # limits of the search under which an export is exact (`plan --for`); empty: none are listed
    write: Writer
    read: Reader | None = None
    words: frozenset[str] = frozenset()  # names that are read, for hints on misspelt ones
