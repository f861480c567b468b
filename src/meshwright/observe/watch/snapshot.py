"""The names of one object, call or module, and what they held when last looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import msgspec

from meshwright.observe.watch.describe import PLAIN, describe
from meshwright.observe.watch.marks import Mark, mark_of

_NOTHING = object()
Holds = Callable[[str, object], bool]  # whether a name with this value is followed


class Change(msgspec.Struct, frozen=True, gc=False):
    """`old` is the value itself where it is plain, else a text of what it was; None of a name that is new."""

    event: str  # "set" or "del"
    name: str
    old: object
    old_text: str | None
    new: object
    new_text: str | None


class Snapshot:
    """`same` is asked after every line and is almost always true: a pass over identities and lengths settles it."""

    __slots__ = ("_deep", "_full", "_holds", "_ids", "_lengths", "_marks", "_names", "_pick", "_place", "_stale")

    def __init__(self, items: Mapping[str, object], holds: Holds) -> None:
        self._holds = holds
        self._marks: dict[str, object] = {}  # a plain value, or a `Mark`
        self._ids: list[int] = []
        self._names: list[str] = []
        self._place: dict[str, int] = {}
        self._deep: dict[str, Mark] = {}
        self._pick: Callable[[list[object]], tuple[Any, ...]] | None = None  # the containers
        self._lengths: list[int] = []
        self._full: list[tuple[int, Mark]] = []  # places of what a length does not settle
        self._stale = True
        self.changes(items)

    def same(self, items: Mapping[str, object]) -> bool:
        values = [*items.values()]
        if [*map(id, values)] != self._ids or [*items] != self._names:
            return False
        if self._pick is not None and [*map(len, self._pick(values))] != self._lengths:
            return False
        return not self._full or all(mark.same(values[place]) for place, mark in self._full)

    def stored(self, name: str, items: Mapping[str, object]) -> list[Change]:
        """As `changes`, where no other name can be different."""
        place, value = self._place.get(name, -1), items.get(name, _NOTHING)
        if place >= 0 and type(value) in PLAIN:
            old = self._marks.get(name, _NOTHING)
            if old is value:
                return []
            if type(old) in PLAIN:
                self._ids[place] = id(value)
                if type(old) is type(value) and old == value:
                    return []
                self._marks[name] = value
                return [Change("set", name, old, describe(old), value, describe(value))]
        return self.changes(items)

    def changes(self, items: Mapping[str, object]) -> list[Change]:
        """What is different from the last time; nothing in between is remembered."""
        names, values = [*items], [*items.values()]
        ids = [*map(id, values)]
        if names == self._names:
            moved = {self._place[name] for name, mark in self._deep.items() if not mark.same(items[name])}
            maybe = moved.union(i for i, (new, old) in enumerate(zip(ids, self._ids, strict=True)) if new != old)
        else:
            moved, maybe, self._stale = set(), set(range(len(names))), True
        found = [
            self._set(names[i], values[i])
            for i in sorted(maybe)
            if self._holds(names[i], values[i]) and (i in moved or not self._unchanged(names[i], values[i]))
        ]
        self._ids = ids
        if self._stale:
            found += self._arrange(names, values)
        return found

    def _arrange(self, names: list[str], values: list[object]) -> list[Change]:
        """Names came or went, or another kind of value: where to find what. Says which names are gone."""
        self._names, self._place = names, {name: i for i, name in enumerate(names)}
        gone = [name for name in self._marks if name not in self._place]
        found = []
        for name in gone:
            old = self._marks.pop(name)
            self._deep.pop(name, None)
            found.append(Change("del", name, _value(old), _text(old), None, None))
        deep = [(self._place[name], mark) for name, mark in self._deep.items()]
        sized = [place for place, mark in deep if mark.length >= 0]
        self._pick = itemgetter(*sized, sized[0]) if sized else None  # twice the first: always a tuple
        self._lengths = [*map(len, self._pick(values))] if self._pick else []
        self._full = [(place, mark) for place, mark in deep if mark.length]
        self._stale = False
        return found

    def _unchanged(self, name: str, value: object) -> bool:
        old = self._marks.get(name, _NOTHING)
        if type(value) in PLAIN:
            return old is value or (type(old) is type(value) and old == value)
        return isinstance(old, Mark) and old.value_id == id(value) and old.same(value)

    def _set(self, name: str, value: object) -> Change:
        old = self._marks.get(name, _NOTHING)
        if type(value) in PLAIN:
            text = describe(value)
            self._marks[name] = value
            self._stale |= self._deep.pop(name, None) is not None
        else:
            mark = self._marks[name] = mark_of(value)
            text = mark.since(old, value)
            self._stale |= mark.deep or name in self._deep
            self._deep.pop(name, None)
            if mark.deep:
                self._deep[name] = mark
        return Change("set", name, _value(old), None if old is _NOTHING else _text(old), value, text)


def _value(mark: object) -> object:
    return None if mark is _NOTHING else mark.text if isinstance(mark, Mark) else mark


def _text(mark: object) -> str:
    return mark.text if isinstance(mark, Mark) else describe(mark)
