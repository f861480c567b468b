"""What a name held when last looked at, small enough to look again after every line, and holding nothing alive.

Plain values (numbers, texts, None) are kept as they are. Of a list, tuple, dict, set or deque the length and the
identities of its first `LOOKED_AT` items are kept; of a tensor its shape, type, device and version, which PyTorch counts
up with every change in place; of anything else its identity.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from operator import itemgetter
from typing import Any

import msgspec

LOOKED_AT = 64  # items of a container; a change further back is seen only by its length
_LONGEST = 96  # characters of a value in an event
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(...)})
_NOTHING = object()


class Change(msgspec.Struct, frozen=True, gc=False):
    """`old` is the value itself where it is plain, else a text of what it was; None of a name that is new."""

    event: str  # "set" or "del"
    name: str
    old: object
    old_text: str | None
    new: object
    new_text: str | None


class Mark:
    """Of something that can change and stay the same object."""

    __slots__ = ("counts", "ids", "is_dict", "keys", "length", "simple", "tensors", "text", "value_id", "versions")

    def __init__(self, value: Any) -> None:
        self.value_id, self.text = id(value), describe(value)
        self.keys: list[object] = list(islice(value, LOOKED_AT)) if isinstance(value, dict) else []
        self.length, self.ids, self.versions = _facts(value, versions=True)
        if all(one is None for one in self.versions):
            self.versions = ()
        self.is_dict, whole = isinstance(value, dict), is_tensor(value)
        self.tensors = [] if whole else [i for i, one in enumerate(self.versions) if one is not None]
        self.counts = [self.versions[i] for i in self.tensors]
        self.simple = not self.versions and not isinstance(value, bytearray)  # a container without tensors

    def same(self, value: Any) -> bool:
        if self.simple:  # the usual case, and most often empty: objects of torch hold a dozen such
            if len(value) != self.length:
                return False
            if not self.length:
                return True
            ids = [*map(id, islice(value.values() if self.is_dict else value, LOOKED_AT))]
            if self.is_dict:
                ids += map(id, islice(value, LOOKED_AT))
            return ids == self.ids
        if self.tensors and len(value) == self.length:  # the same items: ask only those that count their changes
            items = list(islice(value.values() if self.is_dict else value, LOOKED_AT))
            if [*map(id, items)] == self.ids[: len(items)]:
                return [version(items[i], sure=True) for i in self.tensors] == self.counts
        length, ids, versions = _facts(value, versions=bool(self.versions))
        return length == self.length and ids == self.ids and versions == self.versions

    def moved(self, value: Any) -> str:
        """What is different, item by item, where that can be said."""
        if self.value_id != id(value) or not isinstance(value, list | dict | deque):
            return describe(value)
        new = Mark(value)
        labels = new.keys if isinstance(value, dict) else list(range(len(new.ids)))
        items = list(islice(value.values() if isinstance(value, dict) else value, LOOKED_AT))
        before: dict[Any, object] = (
            dict(zip(self.keys, self._both(), strict=False)) if self.keys else dict(enumerate(self._both()))
        )
        said = [
            f"[{describe(label)}] = {describe(item)}"
            for label, item, now in zip(labels, items, new._both(), strict=False)
            if before.get(label) != now
        ]
        gone = [f"no [{describe(key)}]" for key in self.keys if key not in value]
        return _short(", ".join((describe(value, brief=True), *said[:4], *gone[:4])))

    def _both(self) -> list[tuple[int, object]]:
        versions = self.versions or (None,) * len(self.ids)
        return list(zip(self.ids, versions, strict=False))


def _facts(value: Any, *, versions: bool) -> tuple[int, list[int], tuple[object, ...]]:
    kind = type(value)
    if is_tensor(value):
        return 0, [value.data_ptr() if _has_memory(value) else 0], (version(value), value.shape, value.dtype)
    if issubclass(kind, bytearray):
        return len(value), [hash(bytes(value[:LOOKED_AT]))], ()
    items = list(islice(value.values() if issubclass(kind, dict) else value, LOOKED_AT))
    ids = [*map(id, items)]
    if issubclass(kind, dict):
        ids += map(id, islice(value, LOOKED_AT))
    return len(value), ids, tuple(version(item) for item in items) if versions else ()


def deep(value: object) -> bool:
    """Whether it can change while it stays the same object, in a way that we can see."""
    return isinstance(value, list | dict | set | deque | bytearray) or is_tensor(value)


def is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # a value is a tensor only where somebody else has imported torch
    kind = getattr(torch, "Tensor", None)
    return kind is not None and isinstance(value, kind)


def version(value: object, *, sure: bool = False) -> object:
    if not (sure or is_tensor(value)):
        return None
    try:
        return value._version  # type: ignore[attr-defined]
    except RuntimeError:  # inference tensors do not count
        return -1


def _has_memory(value: Any) -> bool:
    return type(value).__name__ in ("Tensor", "Parameter") and value.layout is sys.modules["torch"].strided


class Snapshot:
    """The names of one object, module or call, and what they held."""

    __slots__ = ("_deep", "_full", "_ids", "_lengths", "_marks", "_names", "_pick")

    def __init__(self, items: Mapping[str, object]) -> None:
        self._marks: dict[str, object] = {}
        self._ids: list[int] = []
        self._names: list[str] = []
        self._deep: dict[str, Mark] = {}
        self._full: list[str] = []  # of `_deep`, those that a length does not settle
        self._pick: Callable[[list[object]], tuple[object, ...]] | None = None  # the containers without tensors
        self._lengths: list[int] = []
        self.changes(items)

    def changes(self, items: Mapping[str, object]) -> list[Change]:
        """What is different from the last time; nothing in between is remembered."""
        values, names, marks = [*items.values()], [*items], self._marks
        ids = [*map(id, values)]
        if names == self._names and ids == self._ids and not self._moved(values, items):
            return []  # the usual case
        if names == self._names:
            maybe = [] if ids == self._ids else [n for n, a, b in zip(names, ids, self._ids, strict=True) if a != b]
            maybe += [name for name, mark in self._deep.items() if name not in maybe and not mark.same(items[name])]
        else:
            maybe = names
        found = [self._set(name, items[name]) for name in maybe if not self._same(name, items[name])]
        if names != self._names:
            for name in [name for name in marks if name not in items]:
                old = marks.pop(name)
                self._deep.pop(name, None)
                found.append(Change("del", name, _value(old), _text(old), None, None))
        self._ids, self._names = ids, names
        simple = [i for i, name in enumerate(names) if name in self._deep and self._deep[name].simple]
        self._pick = itemgetter(*simple, simple[0]) if simple else None  # twice the first: always a tuple
        self._lengths = [*map(len, self._pick(values))] if self._pick else []
        self._full = [name for name, mark in self._deep.items() if not mark.simple or mark.length]
        return found

    def _moved(self, values: list[object], items: Mapping[str, object]) -> bool:
        """Whether something changed that is the same object as before."""
        if self._pick is not None and [*map(len, self._pick(values))] != self._lengths:  # type: ignore[arg-type]
            return True
        return any(not self._deep[name].same(items[name]) for name in self._full)

    def _same(self, name: str, value: object) -> bool:
        old = self._marks.get(name, _NOTHING)
        if type(value) in PLAIN:
            return old is value or (type(old) is type(value) and old == value)
        return isinstance(old, Mark) and old.value_id == id(value) and (name not in self._deep or old.same(value))

    def _set(self, name: str, value: object) -> Change:
        old = self._marks.get(name, _NOTHING)
        self._deep.pop(name, None)
        new_text = old.moved(value) if isinstance(old, Mark) and name in self._marks else describe(value)
        if type(value) in PLAIN:
            self._marks[name] = value
        elif deep(value):
            self._marks[name] = self._deep[name] = Mark(value)
        else:
            self._marks[name] = _Identity(value)
        return Change("set", name, _value(old), None if old is _NOTHING else _text(old), value, new_text)


class _Identity(Mark):
    """Of an object that we do not look into."""

    __slots__ = ()

    def __init__(self, value: object) -> None:
        self.value_id, self.text = id(value), describe(value)

    def moved(self, value: object) -> str:
        return describe(value)


def _value(mark: object) -> object:
    return None if mark is _NOTHING else mark.text if isinstance(mark, Mark) else mark


def _text(mark: object) -> str:
    return mark.text if isinstance(mark, Mark) else describe(mark)


def describe(value: Any, *, brief: bool = False) -> str:
    """A value in a few words that are the same in every process: no addresses.

    >>> describe([1, 2]), describe({"a": 1}, brief=True), describe(object())
    ('[1, 2]', 'dict of 1', '<object>')
    """
    kind = type(value)
    if kind in PLAIN:
        return _short(repr(value[:_LONGEST] if kind in (str, bytes) else value))
    if is_tensor(value):
        return tensor_text(value)
    if kind in (list, tuple, dict, set, frozenset, deque):
        items = list(islice(value, 9))
        few = len(items) < 9 and all(type(one) in PLAIN for one in items)
        if few and not brief and kind is dict:
            few = all(type(one) in PLAIN for one in value.values())
        return _short(repr(value)) if few and not brief else f"{kind.__name__} of {len(value)}"
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return f"ndarray{list(value.shape)} {value.dtype}"
    return f"<{getattr(value, '__qualname__', kind.__name__) if callable(value) else kind.__name__}>"


def tensor_text(value: Any) -> str:
    placed = getattr(value, "placements", None)
    where = f" {', '.join(map(str, placed))}" if placed is not None else ""
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{type(value).__name__}{list(value.shape)} {dtype} {value.device}{where} v{version(value)}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
