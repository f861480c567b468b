"""Marks: the state of a value at the last look, small enough to look again after every line, keeping nothing alive.

- list, dict, set or deque: the length and the identities of the first `LOOKED_AT` items
- tensor: memory, shape, type and version, which PyTorch counts up with every change in place
- NumPy array: memory, shape and a hash of its numbers
- anything else: its identity

Plain values need no mark: they are kept themselves.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from operator import is_
from typing import Any

from meshwright.watcher.values.describe import (
    ORDINARY,
    PLAIN,
    describe,
    first_bytes,
    first_of,
    is_array,
    is_tensor,
    layout_text,
    shorten,
    thing_text,
    undescribed,
    version,
)
from meshwright.watcher.values.unchanged import EMPTY, Inside, makers

LOOKED_AT = 64  # items of a container; a later change is seen only by the length
_KINDS = 1024  # maximum number of types remembered
_IN_ORDER = frozenset({dict, defaultdict, list})  # containers whose memory shows their contents
_EMPTY_TEXTS = {kind: describe(kind()) for kind in (dict, OrderedDict, list, set)}
HASHED = 4096  # bytes of an array; of a larger one only the first LOOKED_AT numbers are hashed
Count = tuple[int, int | None, bytes]  # of a tensor: version, address, and first bytes


class Mark:
    """Mark of an object whose contents are not examined."""

    __slots__ = ("text", "value_id")
    checker: Inside = None  # checks that the same object is unchanged, if it can change

    def __init__(self, value: Any) -> None:
        self.value_id, self.text = id(value), describe(value)

    def same(self, value: Any) -> bool:
        """Return True if the same object is unchanged."""
        return True

    def since(self, old: object, value: Any) -> str:
        """Describe the change, item by item where possible."""
        return self.text

    def again(self, value: Any) -> str:
        """Describe a change of the same object as `since` does, but without a new mark; "" if that is impossible."""
        return ""


class _Thing(Mark):
    """Mark of an object that is neither number nor text, tensor nor container."""

    __slots__ = ()

    def __init__(self, value: Any) -> None:
        self.value_id, self.text = id(value), thing_text(value)


class _Facts(Mark):
    """Mark of an object whose state is a few facts, which a function reads."""

    __slots__ = ("facts", "take")

    def __init__(self, value: Any, take: Callable[[Any], tuple[object, ...]]) -> None:
        super().__init__(value)
        self.take, self.facts = take, take(value)

    @property
    def checker(self) -> Inside:  # type: ignore[override]
        return self

    def same(self, value: Any) -> bool:
        return self.take(value) == self.facts


class _Tensor(Mark):
    """Mark of an ordinary tensor; its text is created on demand, which is rare."""

    __slots__ = ("_layout", "_version", "checker")
    checker: Any

    def __init__(self, value: Any) -> None:
        self.value_id, self._version, kind = id(value), version(value), type(value).__name__
        self._layout: tuple[Any, ...] | str
        try:
            shape = value.shape
            self._layout = kind, shape, value.dtype, value.device
        except Exception as error:
            shape, self._layout = None, undescribed(kind, error)
        self.checker = makers().known_tensor(self._version, shape, _memory(value), first_bytes(value))

    @property
    def text(self) -> str:  # type: ignore[override]
        layout = self._layout if isinstance(self._layout, str) else layout_text(*self._layout)
        return f"{layout} v{self._version}"

    def same(self, value: Any) -> bool:
        return bool(self.checker.same(value))

    def since(self, old: object, value: Any) -> str:
        same = isinstance(old, _Tensor) and old.value_id == self.value_id and old.text == self.text
        return f"{self.text}, other data" if same else self.text


def _memory(tensor: Any) -> int | None:
    """Return the address of a tensor's memory, or None if it has none."""
    try:
        return tensor.data_ptr() if type(tensor).__name__ in ORDINARY else None
    except Exception:  # sparse ones have none
        return None


def _of_tensor(value: Any) -> tuple[object, ...]:
    try:
        return version(value), value.shape
    except Exception:  # a parameter without a size
        return (version(value),)


def _of_array(value: Any) -> tuple[object, ...]:
    looked_at = value if value.nbytes <= HASHED else value.flat[:LOOKED_AT]
    return value.shape, value.dtype, value.ctypes.data, hash(looked_at.tobytes())


def _of_bytes(value: Any) -> tuple[object, ...]:
    return len(value), hash(bytes(value[:HASHED]))


class _Items(Mark):
    """Mark of a list, dict, set or deque; also of versions and memory of tensors in it."""

    __slots__ = ("_known", "counts", "ids", "is_dict", "keys", "length", "tensors")
    _known: Any  # of C or of unchanged.py; None if it cannot be compared

    def __init__(self, value: Any) -> None:
        self.value_id, self.length, self.is_dict = id(value), len(value), issubclass(type(value), dict)
        self.text = (None if self.length else _EMPTY_TEXTS.get(type(value))) or describe(value)
        self.keys: list[Any] = []
        self.ids: list[int] = []
        self.tensors: list[int] = []
        self.counts: list[Count] = []
        self._known = None
        if self.length:  # most of a module's dicts are empty
            self._look_inside(value)

    def _look_inside(self, value: Any) -> None:
        self.keys, items = self._copied(value)
        self.length = max(len(value), LOOKED_AT) if len(items) == LOOKED_AT else len(items)  # at this moment
        self.ids = [*map(id, items)]
        self.tensors = [i for i, one in enumerate(items) if is_tensor(one)]
        if self.length > LOOKED_AT:
            self.text = shorten(self.text) + f" (the first {LOOKED_AT} compared)"
        self._count(items, type(value) in _IN_ORDER and self.length <= LOOKED_AT)

    def _count(self, items: list[Any], short: bool) -> None:
        self.counts = self._counted(items)
        make, of_tensor = makers()[:2]
        checkers: list[Inside] = [None] * len(items)
        for i, (count, memory, begin) in zip(self.tensors, self.counts, strict=True):
            checkers[i] = of_tensor(count, None, memory, begin)
        self._known = make(self.keys if self.is_dict else None, self.ids, checkers) if short else None

    def _counted(self, items: list[Any]) -> list[Count]:
        return [(version(items[i]), _memory(items[i]), first_bytes(items[i])) for i in self.tensors]

    def _copied(self, value: Any) -> tuple[list[Any], list[Any]]:
        """Return the first keys of a dict, and the items, at one moment."""
        items = first_of(value.items() if self.is_dict else value, LOOKED_AT)
        return ([key for key, _ in items], [one for _, one in items]) if self.is_dict else ([], items)

    @property
    def checker(self) -> Inside:  # type: ignore[override]
        return (self._known or self) if self.length else EMPTY

    def same(self, value: Any) -> bool:
        if self._known is not None:
            return bool(self._known.same(value))
        if len(value) != self.length or not self.length:
            return len(value) == self.length
        keys, items = self._copied(value)
        if [*map(id, items)] != self.ids or not all(map(is_, keys, self.keys)):
            return False
        return self._counted(items) == self.counts

    def since(self, old: object, value: Any) -> str:
        if not isinstance(old, _Items) or old.value_id != self.value_id or not isinstance(value, list | dict | deque):
            return self.text
        before, after = old._by_label(), self._by_label()
        items = dict(zip(after, self._copied(value)[1], strict=False))
        changed = [(key, items[key]) for key, one in after.items() if key in items and before.get(key) != one]
        return self._told(value, changed, [f"no [{describe(key)}]" for key in old.keys if key not in value])

    def again(self, value: Any) -> str:
        """Describe a change in which only tensors in it were changed in place."""
        if not self.tensors or isinstance(value, set) or len(value) != self.length:
            return ""
        (keys, items), before = self._copied(value), self.counts
        if [*map(id, items)] != self.ids or not all(map(is_, keys, self.keys)):
            return ""
        self._count(items, self._known is not None)
        both = zip(self.tensors, before, self.counts, strict=True)
        labels = self.keys or range(self.length)
        return self._told(value, [(labels[i], items[i]) for i, old, new in both if old != new], [])

    def _told(self, value: Any, changed: list[tuple[Any, Any]], gone: list[str]) -> str:
        said = [f"[{describe(label)}] = {describe(one)}" for label, one in changed[:4]]
        end = f" (the first {LOOKED_AT} compared)" if self.length > LOOKED_AT else ""
        return shorten(", ".join((describe(value, brief=True), *said, *gone[:4]))) + end

    def _by_label(self) -> dict[Any, tuple[int, Count | None]]:
        counts = dict(zip(self.tensors, self.counts, strict=True))
        return {
            label: (self.ids[i], counts.get(i))
            for i, label in enumerate(self.keys or range(min(self.length, LOOKED_AT)))
        }


def mark_of(value: object) -> Any:
    """Return a `Mark`, or its counterpart in C."""
    kind = type(value)
    return (_MAKERS.get(kind) or _maker(kind, value))(value)


def kind_of(value: object) -> int:
    """Return what is remembered of values of this type.

    - 0: the values themselves; they are plain
    - 1: their mark, which holds as long as they live
    - 2: the mark of an ordinary tensor
    - 3: their mark
    """
    kind = type(value)
    if kind not in KINDS:
        if len(KINDS) > _KINDS:
            KINDS.clear()
        make = _MAKERS.get(kind) or _maker(kind, value)
        KINDS[kind] = 0 if kind in PLAIN else 1 if make in (Mark, _Thing) else 2 if make is _tensor_maker() else 3
    return KINDS[kind]


_MAKERS: dict[type, Callable[[Any], Any]] = {}  # by the types of values seen so far
KINDS: dict[type, int] = {}  # results of `kind_of`, likewise


def _tensor_maker() -> Callable[[Any], Any]:
    return makers().tensor_mark or _Tensor


def _maker(kind: type, value: object) -> Callable[[Any], Any]:
    make: Callable[[Any], Any] = Mark
    if issubclass(kind, list | dict | set | deque):
        make = _Items
    elif is_tensor(value):
        make = _tensor_maker() if kind.__name__ in ORDINARY else partial(_Facts, take=_of_tensor)
    elif is_array(value):
        make = partial(_Facts, take=_of_array)
    elif issubclass(kind, bytearray):
        make = partial(_Facts, take=_of_bytes)
    elif kind not in (tuple, frozenset):
        make = _Thing
    if len(_MAKERS) > _KINDS:
        _MAKERS.clear()
    _MAKERS[kind] = make
    return make
