"""Targets in modules that the program has not imported yet: watched as soon as it does, without importing them here.

This includes modules imported again with `importlib.reload`, whose functions are new ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Awaited(MetaPathFinder):
    """Import hook that calls `then` with each of the modules whenever it has been executed."""

    def __init__(self, names: set[str], then: Callable[[ModuleType], None]) -> None:
        self._names, self._then = frozenset(names), then
        self.missing = {name for name in names if name not in sys.modules}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._names:
            return None
        spec = self._found_by_others(name, path, target)
        if spec is not None and spec.loader is not None:
            self.missing.discard(name)
            spec.loader = _Then(spec.loader, self._then)
        return spec

    def _found_by_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None and (spec := find(name, path, target)) is not None:
                return spec  # type: ignore[no-any-return]
        return None

    def __enter__(self) -> Awaited:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        if self in sys.meta_path:  # else the program has removed it
            sys.meta_path.remove(self)


class _Then(Loader):
    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
