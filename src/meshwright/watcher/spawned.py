"""Watch processes that multiprocessing starts anew ('spawn', 'forkserver') like their parent.

Such a child first reads data that its parent prepared for it. While a watch is on, these data carry the watch along.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from multiprocessing import spawn
from typing import Any

_original = spawn.get_preparation_data
_carried: dict[int, Callable[[], dict[str, Any]]] = {}  # options of every active watch


def carry(key: int, options: Callable[[], dict[str, Any]]) -> None:
    _carried[key] = options
    spawn.get_preparation_data = _prepared


def drop(key: int) -> None:
    _carried.pop(key, None)
    if not _carried:
        spawn.get_preparation_data = _original


class _Prepared(dict[str, Any]):
    """Prepared data that, read by the child, become the plain dict again and start the child's watches."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (dict(self), [_picklable(options()) for options in _carried.values()])


def _prepared(name: str) -> dict[str, Any]:
    return _Prepared(_original(name))


def _picklable(options: dict[str, Any]) -> dict[str, Any]:
    try:
        pickle.dumps(options["wrapper"])
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # a class that pickle cannot import
        warnings.warn(f"processes that are spawned are watched without the wrapper: {error}", stacklevel=2)
        return options | {"wrapper": None}
    return options


def _unpack(found: dict[str, Any], watches: list[dict[str, Any]]) -> dict[str, Any]:
    prepare = spawn.prepare

    def prepare_and_watch(data: Mapping[str, Any]) -> None:
        spawn.prepare = prepare
        prepare(data)  # imports the parent's main module, whose targets exist from now on
        from meshwright.watcher.session import Watch

        for options in watches:
            Watch(**options).start()

    spawn.prepare = prepare_and_watch
    return found
