"""The names of one object, call or module, and what they held when last looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from meshwright.observe.watch.describe import PLAIN, describe
from meshwright.observe.watch.known import Inside, makers
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
    """After every line `known.moved` is asked, which almost always finds nothing; else `changes` says what it is."""

    __slots__ = ("_holds", "_marks", "_names", "known")

    def __init__(self, items: Mapping[str, object], holds: Holds | None) -> None:
        self._holds = holds  # None: all
        self._marks: dict[str, object] = {}  # a plain value, or a `Mark`
        pairs = [*items.items()]  # at once: another thread may add to them
        self._know(pairs, [self._first(name, value) for name, value in pairs])

    def _first(self, name: str, value: object) -> Inside:
        if self._holds is not None and not self._holds(name, value):
            return None
        if type(value) in PLAIN:
            self._marks[name] = value
            return None
        mark = self._marks[name] = mark_of(value)
        return mark.checker

    def _know(self, pairs: list[tuple[str, object]], checkers: list[Inside]) -> None:
        self._names = [name for name, _ in pairs]
        self.known = makers().known(self._names, [id(value) for _, value in pairs], checkers)

    def look(self, items: Mapping[str, object]) -> list[Change]:
        """What is different from the last time; nothing in between is remembered."""
        return self.changes(self.known.moved(items), items)

    def changes(self, moved: Sequence[tuple[int, str, object]] | None, items: Mapping[str, object]) -> list[Change]:
        """As `look`, for what `known.moved` has found."""
        if moved is None:
            return self._compare(items)
        found = list[Change]()
        for place, name, value in moved:
            self.known.put(place, name, value, self._take(name, value, found))
            if place == len(self._names):
                self._names.append(name)
        return found

    def stored(self, names: tuple[str, ...], items: Mapping[str, object]) -> list[Change]:
        """As `look`, where no other names can be different."""
        found = list[Change]()
        for name in names:
            value, old = items.get(name, _NOTHING), self._marks.get(name, _NOTHING)
            if type(value) not in PLAIN or type(old) not in PLAIN:
                return found + self.look(items)
            if old is not value:
                self.known.put(self._names.index(name), name, value, None)
                if type(old) is not type(value) or old != value:
                    self._marks[name] = value
                    found.append(Change("set", name, old, describe(old), value, describe(value)))
        return found

    def _compare(self, items: Mapping[str, object]) -> list[Change]:
        """Names are gone, or came in between."""
        pairs, marks = [*items.items()], self._marks
        here, found, checkers = dict(pairs), list[Change](), list[Inside]()
        for name, value in pairs:
            old = marks.get(name)
            known = isinstance(old, Mark) and old.value_id == id(value) and old.same(value)
            checkers.append(old.checker if known and isinstance(old, Mark) else self._take(name, value, found))
        for name in [name for name in marks if name not in here]:
            gone = marks.pop(name)
            found.append(Change("del", name, _value(gone), _text(gone), None, None))
        self._know(pairs, checkers)
        return found

    def _take(self, name: str, value: object, found: list[Change]) -> Inside:
        """Remember another value, or one that is different inside, and say so; what tells when it is again."""
        marks = self._marks
        old = marks.get(name, _NOTHING)
        plain = type(value) in PLAIN
        if plain and type(old) is type(value) and old == value:
            return None
        if self._holds is not None and not self._holds(name, value):
            return None
        old_text = old.text if isinstance(old, Mark) else None if old is _NOTHING else describe(old)
        old_value = old_text if isinstance(old, Mark) else None if old is _NOTHING else old
        if plain:
            marks[name] = value
            found.append(Change("set", name, old_value, old_text, value, describe(value)))
            return None
        mark, text = old, ""
        if isinstance(old, Mark) and old.value_id == id(value):
            text = old.again(value)
        if not text:
            mark = marks[name] = mark_of(value)
            text = mark.since(old, value)
        found.append(Change("set", name, old_value, old_text, value, text))
        return mark.checker if isinstance(mark, Mark) else None


def _value(mark: object) -> object:
    return mark.text if isinstance(mark, Mark) else mark


def _text(mark: object) -> str:
    return mark.text if isinstance(mark, Mark) else describe(mark)
