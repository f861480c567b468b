"""Snapshot of the names of one object, call or module, with their values at the last look."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from meshwright.watcher.values.describe import PLAIN, describe
from meshwright.watcher.values.marks import mark_of
from meshwright.watcher.values.unchanged import Inside, makers

NOTHING = object()  # stands for the value of a new name
Holds = Callable[[str, object], bool]  # True if a name with this value is followed


class Change(msgspec.Struct, frozen=True, gc=False):
    """Change of a name. `old` is the value itself if it is plain, else a text of it; None for a new name."""

    event: str  # "set" or "del"
    name: str
    old: object
    old_text: str | None
    new: object
    new_text: str | None


class Snapshot:
    """Snapshot of names. After every line `known.same` is checked, and mostly true; else `look` finds changes."""

    __slots__ = ("_holds", "_names", "held", "known", "marks")

    def __init__(self, items: Mapping[str, object], holds: Holds | None) -> None:
        self._holds = holds  # None: all
        self.held: object = None  # an object to keep alive as long as this
        self.marks: dict[str, object] = {}  # a plain value, or a `Mark`
        pairs = [*items.items()]  # a copy: another thread may add to them
        self._know(pairs, [self._first(name, value) for name, value in pairs])

    def _first(self, name: str, value: object) -> Inside:
        if self._holds is not None and not self._holds(name, value):
            return None
        if type(value) in PLAIN:
            self.marks[name] = value
            return None
        mark = self.marks[name] = mark_of(value)
        checker: Inside = mark.checker
        return checker

    def _know(self, pairs: list[tuple[str, object]], checkers: list[Inside]) -> None:
        self._names = [name for name, _ in pairs]
        self.known = makers().known(self._names, [id(value) for _, value in pairs], checkers)

    def look(self, items: Mapping[str, object], found: list[Change]) -> None:
        """Append differences from the last look; changes in between are lost."""
        moved = self.known.moved(items)
        if moved is None:
            self._compare(items, found)
            return
        for place, name, value in moved:
            self.known.put(place, name, value, self._take(name, value, found))
            if place == len(self._names):
                self._names.append(name)

    def stored(self, names: tuple[str, ...], items: Mapping[str, object], found: list[Change]) -> None:
        """Append differences as `look` does, if no other names can have changed."""
        for name in names:
            value, old = items.get(name, NOTHING), self.marks.get(name, NOTHING)
            if type(value) not in PLAIN or type(old) not in PLAIN:
                self.look(items, found)
                return
            if old is not value:
                self.known.put(self._names.index(name), name, value, None)
                if type(old) is not type(value) or old != value:
                    self.marks[name] = value
                    found.append(Change("set", name, old, describe(old), value, describe(value)))

    def _compare(self, items: Mapping[str, object], found: list[Change]) -> None:
        """Compare after names were removed or inserted."""
        pairs, marks = [*items.items()], self.marks
        here, checkers = dict(pairs), list[Inside]()
        for name, value in pairs:
            old: Any = marks.get(name, NOTHING)
            known = _is_mark(old) and old.value_id == id(value) and old.same(value)
            checkers.append(old.checker if known else self._take(name, value, found))
        missing = [name for name in self._names if name in marks and name not in here]
        found += [gone(name, marks.pop(name)) for name in missing]
        self._know(pairs, checkers)

    def _take(self, name: str, value: object, found: list[Change]) -> Inside:
        """Remember a new value or a changed object and report it; return the checker of its contents."""
        old = self.marks.get(name, NOTHING)
        if type(value) in PLAIN and type(old) is type(value) and old == value:
            return None
        if self._holds is not None and not self._holds(name, value):
            return None
        mark, change = take(name, old, value)
        self.marks[name] = mark
        found.append(change)
        return mark.checker if _is_mark(mark) else None


def take(name: str, old: Any, value: object) -> tuple[Any, Change]:
    """Return what to remember of a value that replaces `old` or has changed inside, and the change to it."""
    new = old is NOTHING
    old_text = None if new else _text(old)
    old_value = old_text if _is_mark(old) else None if new else old
    if type(value) in PLAIN:
        return value, Change("set", name, old_value, old_text, value, describe(value))
    mark, text = old, ""
    if _is_mark(old) and old.value_id == id(value):
        text = old.again(value)
    if not text:
        mark = mark_of(value)
        text = mark.since(old, value)
    return mark, Change("set", name, old_value, old_text, value, text)


def gone(name: str, old: Any) -> Change:
    return Change("del", name, _text(old) if _is_mark(old) else old, _text(old), None, None)


def _is_mark(old: object) -> bool:
    return type(old) not in PLAIN and old is not NOTHING


def _text(old: Any) -> str:
    return str(old.text) if _is_mark(old) else describe(old)
