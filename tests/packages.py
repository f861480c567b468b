"""Packages that some tests need and not every machine has: absent ones are a reason to skip, broken ones are not."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def installed(name: str) -> bool:
    """Whether a package is there; nothing of it is run."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # what it is a part of is not there either
        return False


def folder(name: str) -> Path:
    """Where an installed package lies."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])
