"""Check that a dict, list or tensor has not changed; it runs after every line, in C if that can be built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import is_, itemgetter
from typing import Any, NamedTuple, Protocol

from meshwright.watcher.values.compiled import compiled
from meshwright.watcher.values.describe import first_bytes, version
from meshwright.watcher.values.thread import Thread


class Checker(Protocol):
    def same(self, value: Any, /) -> bool: ...


Inside = Checker | tuple[()] | None  # checks that a value is unchanged inside; None: it cannot change
EMPTY = ()  # instead of a checker, for a container that was empty


class Known:
    """Known state of a dict or list: identities of its keys and values, and checkers of some of those.

    >>> held = {"a": 1, "b": []}
    >>> known = Known([*held], [*map(id, held.values())], [None, EMPTY])
    >>> known.moved(held), held["b"].append(2), known.moved(held)
    ((), None, [(1, 'b', [2])])
    """

    __slots__ = ("_checkers", "_empty", "_ids", "_keys", "_rest")

    def __init__(self, keys: list[Any] | None, ids: list[int], checkers: list[Inside]) -> None:
        self._keys, self._ids, self._checkers = keys and [*keys], ids, checkers  # no keys: a list
        self._arrange()

    def _arrange(self) -> None:
        empty = [place for place, one in enumerate(self._checkers) if isinstance(one, tuple)]
        self._empty = itemgetter(*empty, empty[0]) if empty else None  # the first index twice: always a tuple
        self._rest = [(i, one) for i, one in enumerate(self._checkers) if not isinstance(one, tuple | None)]

    def same(self, value: Any) -> bool:
        values = [*value] if self._keys is None else [*value.values()]
        if [*map(id, values)] != self._ids or not (self._keys is None or all(map(is_, [*value], self._keys))):
            return False
        if self._empty is not None and any(map(len, self._empty(values))):
            return False
        return all(one.same(values[place]) for place, one in self._rest)

    def moved(self, items: dict[Any, Any]) -> Sequence[tuple[int, Any, Any]] | None:
        """Return (place, key, value) of a dict's items that are replaced, changed inside, or new at the end.

        Return None if keys were removed or inserted.
        """
        if self.same(items):
            return ()
        pairs, keys = [*items.items()], self._keys or []
        if len(pairs) < len(keys) or not all(is_(key, pair[0]) for key, pair in zip(keys, pairs, strict=False)):
            return None
        return [(place, *pair) for place, pair in enumerate(pairs) if self._differs(place, pair[1])]

    def _differs(self, place: int, value: Any) -> bool:
        if place >= len(self._ids) or self._ids[place] != id(value):
            return True
        checker = self._checkers[place]
        if isinstance(checker, tuple):
            return bool(len(value))
        return checker is not None and not checker.same(value)

    def put(self, place: int, key: Any, value: object, checker: Inside) -> None:
        """Store what is at this place now, which may be one after the last."""
        if self._keys is not None and place <= len(self._keys):
            self._keys[place : place + 1], self._ids[place : place + 1] = [key], [id(value)]
            self._checkers[place : place + 1] = [checker]
            self._arrange()


class KnownTensor:
    """Known state of a tensor: version, first bytes, and where needed shape and memory."""

    __slots__ = ("_memory", "_sample", "_shape", "_version")

    def __init__(self, version: int, shape: tuple[int, ...] | None, memory: int | None, sample: bytes) -> None:
        self._version, self._shape, self._memory, self._sample = version, shape, memory, sample

    def same(self, value: Any) -> bool:
        if version(value) != self._version or (self._shape is not None and value.shape != self._shape):
            return False
        if self._memory is None:
            return True
        return bool(value.data_ptr() == self._memory) and (not self._sample or first_bytes(value) == self._sample)


class Makers(NamedTuple):
    """Constructors of C's types, or of those above."""

    known: Callable[[list[Any] | None, list[int], list[Inside]], Any] = Known
    known_tensor: Callable[[int, tuple[int, ...] | None, int | None, bytes], Any] = KnownTensor
    thread: Callable[[str], Thread] = Thread
    tensor_mark: Callable[[Any], Any] | None = None  # None: use marks.py
    steps: Callable[[Any], Any] | None = None  # None: use steps.py
    hook: Callable[[Any, Any], Any] = lambda function, nothing: function  # its caller, pickled as nothing


@cache
def makers() -> Makers:
    return Makers(*(compiled() or ()))
