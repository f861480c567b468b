"""Which names are followed, and what every watched object held when last looked at."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Mapping
from typing import Any

from meshwright.observe.watch.marks import Snapshot


class Names:
    """Which names are followed: all, or those that a pattern fits.

    >>> Names(["loss*"]).hold("loss_scale"), Names(True).hold("step"), bool(Names(False))
    (True, True, False)
    """

    def __init__(self, asked: bool | list[str]) -> None:
        self._asked, self._known = asked, dict[str, bool]()

    def __bool__(self) -> bool:
        return bool(self._asked)

    def hold(self, name: str) -> bool:
        if isinstance(self._asked, bool):
            return self._asked
        if name not in self._known:
            self._known[name] = any(fnmatch.fnmatchcase(name, pattern) for pattern in self._asked)
        return self._known[name]


class Objects:
    """The last look at every watched object, shared by all calls on it, so that a change is said once."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, Snapshot]] = {}
        self._slots: dict[type, tuple[str, ...]] = {}

    def seen(self, thing: object) -> Snapshot:
        """The last look at an object, or a first one."""
        key = id(thing)
        found = self._seen.get(key)
        if found is not None and (found[0] is thing or (type(found[0]) is weakref.ref and found[0]() is thing)):
            return found[1]
        try:
            held: object = weakref.ref(thing, lambda _: self._seen.pop(key, None))
        except TypeError:  # of __slots__ without __weakref__: held until it is left, see `forget`
            held = thing
        self._seen[key] = (held, Snapshot(self.items(thing)))
        return self._seen[key][1]

    def forget(self, thing: object) -> None:
        """Let go of an object that cannot be held weakly."""
        found = self._seen.get(id(thing))
        if found is not None and found[0] is thing:
            del self._seen[id(thing)]

    def items(self, thing: Any) -> Mapping[str, object]:
        """Its attributes, without asking properties."""
        kind = type(thing)
        slots = self._slots.get(kind)
        if slots is None:
            slots = self._slots[kind] = _slots(kind)
        own = getattr(thing, "__dict__", None)
        if own is not None and not slots:
            return own  # type: ignore[no-any-return]
        found = dict(own or {})
        for name in slots:
            try:
                found[name] = object.__getattribute__(thing, name)
            except AttributeError:
                continue
        return found


def _slots(kind: type) -> tuple[str, ...]:
    """Names as they are stored: a class writes its own into those that begin with two underscores."""
    found = []
    for one in kind.__mro__:
        slots = one.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{one.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))
