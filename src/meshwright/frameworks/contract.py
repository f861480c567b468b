"""What every format gives: files that a user runs unchanged, what they cannot say, and the way back to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.clusters import Cluster
from meshwright.errors import MeshwrightError
from meshwright.models import Model
from meshwright.plans import Job, Plan


class Inexpressible(MeshwrightError):
    """A plan whose shape a framework has no words for; nothing near it can be said either."""

    exit_code = 1


@dataclass(frozen=True)
class Exported:
    """A plan in the words of another framework."""

    files: Mapping[str, str]  # name -> text; the first is the one to start
    command: str  # how a user starts it
    plan: Plan  # what the files mean: the given plan, or the nearest that can be said
    missing: tuple[str, ...] = ()  # what could not be said, and what the files say instead; a line each
    to_fill: tuple[str, ...] = ()  # what a user still has to name, such as the data; a line each


@dataclass(frozen=True)
class Beside:
    """What a user says beside a configuration that does not hold it."""

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
    unused: tuple[str, ...] = ()  # arguments that are known and say nothing about a plan
    assumed: tuple[str, ...] = ()  # what was not said, and what is taken instead; a line each


Writer = Callable[[Job, Plan], Exported]
Reader = Callable[[str, str, Beside], Imported]  # text, the file's name for messages, what else is known


@dataclass(frozen=True)
class Format:
    """One framework's way to say a plan."""

    name: str
    title: str
    target: str  # limits of the search under which an export is exact (`plan --for`); empty: none are written down
    write: Writer
    read: Reader | None = None
    words: frozenset[str] = frozenset()  # names that are read, to tell what a misspelt one may have meant
