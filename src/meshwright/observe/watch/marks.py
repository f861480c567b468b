"""What a value was when last looked at, small enough to look again after every line, and holding nothing alive.

Of a list, dict, set or deque the length and the identities of its first `LOOKED_AT` items are kept; of a tensor its memory,
shape, type and version, which PyTorch counts up with every change in place; of a NumPy array its memory, shape and its
numbers' hash; of anything else its identity. Plain values need no mark: they are kept themselves.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from meshwright.observe.watch.describe import describe, is_array, is_tensor, shorten, version

LOOKED_AT = 64  # items of a container; a change further back is seen only by its length
_SHORT = 8  # keys of a dict that are all looked at
HASHED = 4096  # bytes of an array; of a larger one the first LOOKED_AT numbers are looked at


class Mark:
    """Of an object that is not looked into."""

    __slots__ = ("text", "value_id")
    deep = False  # whether it can change and stay the same object, in a way that we see
    length = -1  # of a container without tensors: where it is 0, nothing else has to be asked

    def __init__(self, value: Any) -> None:
        self.value_id, self.text = id(value), describe(value)

    def same(self, value: Any) -> bool:
        """Whether the same object is as it was."""
        return True

    def since(self, old: object, value: Any) -> str:
        """What it has become, item by item where that can be said."""
        return self.text


class _Facts(Mark):
    """Of something whose state is a few facts, which a function takes from it."""

    __slots__ = ("facts", "take")
    deep = True

    def __init__(self, value: Any, take: Callable[[Any], tuple[object, ...]]) -> None:
        super().__init__(value)
        self.take, self.facts = take, take(value)

    def same(self, value: Any) -> bool:
        return self.take(value) == self.facts


def _of_tensor(value: Any) -> tuple[object, ...]:
    return version(value), value.shape, value.data_ptr() if _has_memory(value) else 0


def _has_memory(value: Any) -> bool:
    return type(value).__name__ in ("Tensor", "Parameter") and value.layout is sys.modules["torch"].strided


def _of_array(value: Any) -> tuple[object, ...]:
    looked_at = value if value.nbytes <= HASHED else value.flat[:LOOKED_AT]
    return value.shape, value.dtype, value.ctypes.data, hash(looked_at.tobytes())


def _of_bytes(value: Any) -> tuple[object, ...]:
    return len(value), hash(bytes(value[:HASHED]))


class _Items(Mark):
    """Of a list, dict, set or deque; of tensors in it also their versions."""

    __slots__ = ("counts", "ids", "is_dict", "key_ids", "keys", "length", "tensors")
    deep = True

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.is_dict = isinstance(value, dict)
        self.keys = list(islice(value, LOOKED_AT)) if self.is_dict else []
        items = self._items(value)
        self.ids, self.key_ids = [*map(id, items)], [*map(id, self.keys)]
        self.tensors = [i for i, one in enumerate(items) if is_tensor(one)]
        self.counts = [version(items[i]) for i in self.tensors]
        self.length = len(value)
        if self.length > LOOKED_AT:
            self.text = shorten(self.text) + f" (the first {LOOKED_AT} compared)"

    def _items(self, value: Any) -> list[Any]:
        return list(islice(value.values() if self.is_dict else value, LOOKED_AT))

    def same(self, value: Any) -> bool:
        if len(value) != self.length:
            return False
        if not self.length:
            return True
        items = [*islice(value.values() if self.is_dict else value, LOOKED_AT)]
        if [*map(id, items)] != self.ids or (self.is_dict and not self._same_keys(value)):
            return False
        if not self.tensors:
            return True
        try:
            return [items[i]._version for i in self.tensors] == self.counts
        except RuntimeError:  # inference tensors do not count
            return [version(items[i]) for i in self.tensors] == self.counts

    def _same_keys(self, value: Any) -> bool:
        """A key that came is the last: with the same number of items and the same values that tells of a long dict."""
        if len(self.key_ids) > _SHORT and self.length <= LOOKED_AT:
            return id(next(reversed(value))) == self.key_ids[-1]
        return [*map(id, islice(value, LOOKED_AT))] == self.key_ids

    def since(self, old: object, value: Any) -> str:
        if not isinstance(old, _Items) or old.value_id != self.value_id or not isinstance(value, list | dict | deque):
            return self.text
        before, after = old._by_label(), self._by_label()
        items = dict(zip(after, self._items(value), strict=False))
        said = [f"[{describe(key)}] = {describe(items[key])}" for key, one in after.items() if before.get(key) != one]
        gone = [f"no [{describe(key)}]" for key in old.keys if key not in value]
        end = f" (the first {LOOKED_AT} compared)" if self.length > LOOKED_AT else ""
        return shorten(", ".join((describe(value, brief=True), *said[:4], *gone[:4]))) + end

    def _by_label(self) -> dict[Any, tuple[int, int | None]]:
        counts = dict(zip(self.tensors, self.counts, strict=True))
        return {
            label: (self.ids[i], counts.get(i))
            for i, label in enumerate(self.keys or range(min(self.length, LOOKED_AT)))
        }


def mark_of(value: object) -> Mark:
    if isinstance(value, list | dict | set | deque):
        return _Items(value)
    if is_tensor(value):
        return _Facts(value, _of_tensor)
    if is_array(value):
        return _Facts(value, _of_array)
    return _Facts(value, _of_bytes) if isinstance(value, bytearray) else Mark(value)
