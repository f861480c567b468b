"""Processes that multiprocessing starts anew ('spawn', 'forkserver') are watched as their parent is.

Such a child first reads what its parent prepared for it. While a watch is on, that carries the watch along.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from multiprocessing import spawn
from typing import Any

_original = spawn.get_preparation_data
_carried: dict[int, Callable[[], dict[str, Any]]] = {}  # options of every watch that is on


def carry(key: int, options: Callable[[], dict[str, Any]]) -> None:
    _carried[key] = options
    spawn.get_preparation_data = _prepared


def drop(key: int) -> None:
    _carried.pop(key, None)
    if not _carried:
        spawn.get_preparation_data = _original


class _Prepared(dict[str, Any]):
    """Read by the child, it becomes the plain dict again, and the child's watches begin."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (dict(self), [_picklable(options()) for options in _carried.values()])


def _prepared(name: str) -> dict[str, Any]:
    return _Prepared(_original(name))


def _picklable(options: dict[str, Any]) -> dict[str, Any]:
    try:
        pickle.dumps(options["wrapper"])
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # a class of the moment, as pickle says it
        warnings.warn(f"processes that are spawned are watched without the wrapper: {error}", stacklevel=2)
        return options | {"wrapper": None}
    return options


def _unpack(found: dict[str, Any], watches: list[dict[str, Any]]) -> dict[str, Any]:
    prepare = spawn.prepare

    def prepare_and_watch(data: Mapping[str, Any]) -> None:
        spawn.prepare = prepare
        prepare(data)  # imports the parent's main module; targets in it are there now
        from meshwright.watcher.session import Watch

        for options in watches:
            Watch(**options).start()

    spawn.prepare = prepare_and_watch
    return found
