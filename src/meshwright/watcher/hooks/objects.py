"""Followed names, and the last seen values of every watched object."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.watcher.values.snapshot import Snapshot

_NONE: Mapping[str, object] = {}
_OF_A_MODULE = ("_parameters", "_buffers", "_modules")  # nn.Module stores these apart, and shows them as attributes


Places = tuple[tuple[str, ...], tuple[str, ...]]  # where attributes are besides __dict__: slots, and dicts in it


class Names:
    """Filter of names: all, or those that a pattern matches.

    >>> Names(["loss*"]).hold("loss_scale"), Names(True).hold("step"), bool(Names(False))
    (True, True, False)
    """

    def __init__(self, asked: bool | list[str]) -> None:
        self._asked, self._known = asked, dict[str, bool]()

    def __bool__(self) -> bool:
        return bool(self._asked)

    def filter(self) -> Callable[[str, object], bool] | None:
        """Return the filter, or None if all names are followed."""
        return None if self._asked is True else self.hold

    def hold(self, name: str, value: object = None) -> bool:
        if isinstance(self._asked, bool):
            return self._asked
        if name not in self._known:
            self._known[name] = any(fnmatch.fnmatchcase(name, pattern) for pattern in self._asked)
        return self._known[name]


class Seen(Snapshot):
    """Last look at one object."""

    __slots__ = ("_apart", "_slots", "in_dict", "thing", "weak")

    def __init__(self, thing: Any, names: Names, places: Places, forget: Callable[[object], object]) -> None:
        self._slots, self._apart = places
        self.thing: Callable[[], object]
        try:
            self.thing, self.weak = weakref.ref(thing, forget), True
        except TypeError:  # __slots__ without __weakref__: held until its last call ends, see `Objects.forget`
            self.thing, self.weak = lambda: thing, False
        self.in_dict = not any(places) and hasattr(thing, "__dict__")  # then `items` is just that
        super().__init__(self.items(thing), names.filter())

    def items(self, thing: Any) -> Mapping[str, object]:
        """Return the attributes, without evaluating properties."""
        if not self._slots and not self._apart:
            return getattr(thing, "__dict__", _NONE)
        found = dict(getattr(thing, "__dict__", ()))
        for name in self._apart:
            found.update(found.get(name) or ())
        for name in self._slots:
            try:
                found[name] = object.__getattribute__(thing, name)
            except AttributeError:
                continue
        return found


class Objects:
    """Last looks at all watched objects, shared by their calls, so that a change is reported once."""

    def __init__(self, names: Names) -> None:
        self._names, self._places = names, dict[type, Places]()
        self.known: dict[int, Seen] = {}  # by id; an entry may be of an object that is gone

    def seen(self, thing: object) -> Seen:
        """Return the last look at an object, or a first one."""
        key = id(thing)
        found = self.known.get(key)
        if found is not None and found.thing() is thing:
            return found
        kind = type(thing)
        if kind not in self._places:
            by_name = self._names.filter() is not None  # without a filter each separate dict is one attribute
            self._places[kind] = _slots(kind), _OF_A_MODULE if by_name and _is_module(kind) else ()
        found = self.known[key] = Seen(thing, self._names, self._places[kind], lambda _: self.known.pop(key, None))
        return found

    def forget(self, thing: object) -> None:
        """Forget an object that cannot be referenced weakly."""
        self.known.pop(id(thing), None)


def _is_module(kind: type) -> bool:
    return any((one.__module__, one.__name__) == ("torch.nn.modules.module", "Module") for one in kind.__mro__)


def _slots(kind: type) -> tuple[str, ...]:
    """Return slot names as they are stored: a class mangles names with two leading underscores."""
    found = []
    for one in kind.__mro__:
        slots = one.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{one.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))
