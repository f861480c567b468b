"""Hooks that also look at attributes, locals, globals and what a wrapper says."""

from __future__ import annotations

import dis
import fnmatch
import sys
import weakref
from collections.abc import Callable, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from meshwright.observe.watch.events import Event
from meshwright.observe.watch.hooks import Hooks, Recorder, Thread, error_text, pauses, place, pop, raised_at
from meshwright.observe.watch.marks import Change, Snapshot
from meshwright.observe.watch.stream import FULL
from meshwright.observe.watch.wrappers import Said

# After a line of nothing but these, no object of the program is different.
_HARMLESS = frozenset(
    {"RESUME", "NOP", "CACHE", "POP_TOP", "PUSH_NULL", "COPY", "SWAP", "EXTENDED_ARG", "LOAD_FAST", "LOAD_CONST",
     "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD", "STORE_FAST", "RETURN_VALUE", "RETURN_CONST", "IS_OP",
     "CONTAINS_OP", "COMPARE_OP", "BUILD_TUPLE", "UNPACK_SEQUENCE", "FOR_ITER", "GET_ITER", "END_FOR", "TO_BOOL"}
)  # fmt: skip


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

    def look(self, thing: object) -> list[Change]:
        """What has changed since the last look; nothing at the first."""
        key, items = id(thing), self._items(thing)
        seen = self._seen.get(key)
        if seen is not None and (seen[0] is thing or (isinstance(seen[0], weakref.ref) and seen[0]() is thing)):
            return seen[1].changes(items)
        try:
            held: object = weakref.ref(thing, lambda _: self._seen.pop(key, None))
        except TypeError:  # of __slots__ without __weakref__: held until it is left, see `forget`
            held = thing
        self._seen[key] = (held, Snapshot(items))
        return []

    def forget(self, thing: object) -> None:
        seen = self._seen.get(id(thing))
        if seen is not None and seen[0] is thing:
            del self._seen[id(thing)]

    def _items(self, thing: Any) -> Mapping[str, object]:
        kind = type(thing)
        if kind not in self._slots:
            names = [one.__dict__.get("__slots__", ()) for one in kind.__mro__]
            flat = [name for one in names for name in ((one,) if isinstance(one, str) else one)]
            self._slots[kind] = tuple(name for name in flat if name not in ("__dict__", "__weakref__"))
        slots, own = self._slots[kind], getattr(thing, "__dict__", None)
        if own is not None and not slots:
            return own  # type: ignore[no-any-return]
        found = dict(own or {})
        for name in slots:
            hidden = (
                f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            )
            try:
                found[name] = object.__getattribute__(thing, hidden)
            except AttributeError:
                continue
        return found


class Call:
    """A watched call that has begun; `pop` reads its key."""

    __slots__ = ("code", "dirty", "key", "line", "names", "start", "thing")

    def __init__(self, key: object, code: CodeType, thing: object) -> None:
        self.key, self.code, self.thing, self.line = key, code, thing, code.co_firstlineno
        self.start, self.dirty, self.names = 0, False, None

    names: Snapshot | None

    def __getitem__(self, index: int) -> object:
        return (self.key, self.start)[index]


class Follower:
    """What is followed, and how it is said."""

    def __init__(self, recorder: Recorder, names: tuple[Names, Names, Names], said: Said, frames_up: int) -> None:
        self.recorder = recorder
        self.attributes, self.names, self.globals = names
        self.said, self.up, self.objects = said, frames_up, Objects()
        self._modules: dict[int, Snapshot] = {}

    def hooks(self, code: CodeType) -> Hooks:
        return Full(self, code).hooks()

    def look(self, thread: Thread, call: Call, frame: FrameType | None, depth: int, text: str = "") -> None:
        """Say what the last line, or what came before this call, has changed."""
        where = place(call.code, call.line)
        if call.thing is not None:
            kind = type(call.thing).__name__
            for one in self.objects.look(call.thing):
                if self.attributes.hold(one.name):
                    self._say(thread, one, f"{kind}.{one.name}", where, depth, text)
        if frame is None:
            return
        if self.names:
            items = {name: value for name, value in frame.f_locals.items() if self.names.hold(name)}
            if call.names is None:
                call.names = Snapshot(items)
            else:
                for one in call.names.changes(items):
                    self._say(thread, one, one.name, where, depth, text)
        if self.globals:
            items = {name: value for name, value in list(frame.f_globals.items()) if self._global(name, value)}
            seen = self._modules.get(id(frame.f_globals))
            if seen is None:
                self._modules[id(frame.f_globals)] = Snapshot(items)
            else:
                for one in seen.changes(items):
                    self._say(thread, one, f"global {one.name}", where, depth, text)

    def _global(self, name: str, value: object) -> bool:
        hidden = name.startswith("__") or isinstance(value, ModuleType | FunctionType | type)
        return not hidden and self.globals.hold(name)

    def _say(self, thread: Thread, one: Change, name: str, where: str, depth: int, text: str) -> None:
        said = "  ".join(
            part for part in (text, self.said.changed(one.old, one.new) if one.event == "set" else "") if part
        )
        event = Event(one.event, self.recorder.now(), 0, thread.name, depth, name, where)
        event.old, event.new, event.text = one.old_text, one.new_text, said
        self.recorder.emit(event)


class Full:
    """The hooks of one code object, with everything that is followed."""

    def __init__(self, follow: Follower, code: CodeType) -> None:
        self._follow, self._recorder, self._said = follow, follow.recorder, follow.said
        self._code, self._key, self._name, self._at = code, object(), code.co_qualname, place(code)
        self._up, self._pauses = follow.up, pauses(code)
        self._attributes = bool(follow.attributes) and code.co_argcount > 0 and code.co_varnames[0] == "self"
        self._frames = bool(follow.names or follow.globals)
        self._dirty = frozenset(_changing_lines(code, every=self._frames))

    def hooks(self) -> Hooks:
        line = self._line if self._attributes or self._frames else None
        return Hooks(self._enter, self._leave, self._suspend, self._resume, self._raised, line, self._attributes)

    def _enter(self, thing: object) -> None:
        self._start("run", thing, sys._getframe(self._up))

    def _resume(self) -> None:
        frame = sys._getframe(self._up)
        self._wake(frame)

    def _wake(self, frame: FrameType) -> None:
        self._start("resume", frame.f_locals.get("self") if self._attributes else None, frame)

    def _leave(self, value: object) -> None:
        self._stop("end", self._said.returned, value, sys._getframe(self._up))

    def _suspend(self, value: object) -> None:
        self._stop("yield", self._said.returned, value, sys._getframe(self._up), self._at)

    def _raised(self, error: BaseException | None = None) -> None:
        gone = error or sys.exc_info()[1]
        if isinstance(gone, GeneratorExit):
            self._stop("end", lambda *_: "closed", gone, sys._getframe(self._up))
        else:
            where = raised_at(self._code, gone)
            self._stop("raise", lambda *_: error_text(gone), gone, sys._getframe(self._up), where)

    def _line(self, number: int) -> None:
        thread = self._recorder.thread()
        calls = thread.calls
        if thread.busy or not self._recorder.on:
            return
        if not calls or calls[-1].key is not self._key:
            if self._pauses:  # it was woken by `throw`
                self._wake(sys._getframe(self._up))
            return
        call = calls[-1]
        if call.dirty:
            thread.busy = True
            try:
                self._follow.look(thread, call, sys._getframe(self._up) if self._frames else None, len(calls))
            finally:
                thread.busy = False
        call.line, call.dirty = number, number in self._dirty

    def _start(self, event: str, thing: object, frame: FrameType) -> None:
        recorder, thread = self._recorder, self._recorder.thread()
        if thread.busy or not recorder.on:
            return
        thread.busy = True
        try:
            depth = len(thread.calls)
            call = Call(self._key, self._code, thing if not isinstance(thing, type) else None)
            self._follow.look(thread, call, frame if self._frames else None, depth, "before this call")
            text = self._said.call(self._name, frame)
            recorder.emit(Event(event, recorder.now(), 0, thread.name, depth, self._name, self._at, text=text))
            thread.calls.append(call)
            call.start = recorder.now()
        finally:
            thread.busy = False

    def _stop(
        self, event: str, text: Callable[[str, Any], str], value: object, frame: FrameType, where: str = ""
    ) -> None:
        recorder, thread = self._recorder, self._recorder.thread()
        if thread.busy or not recorder.on:
            return
        if self._pauses and not (thread.calls and thread.calls[-1].key is self._key):
            self._wake(frame)  # it paused, and was woken by `throw` or `close`
        now = recorder.now()
        call = pop(thread.calls, self._key)
        if call is None:
            return  # it began before the watch did
        thread.busy = True
        try:
            depth = len(thread.calls)
            self._follow.look(thread, call, frame if self._frames else None, depth + 1)
            if not any(one.thing is call.thing for one in thread.calls):
                self._follow.objects.forget(call.thing)
            duration, said = now - call.start, text(self._name, value)
            recorder.emit(Event(event, recorder.now(), 0, thread.name, depth, self._name, where, duration, text=said))
            if len(recorder.stream.buffer) >= FULL:
                recorder.stream.write()
        finally:
            thread.busy = False


def _changing_lines(code: CodeType, *, every: bool) -> set[int]:
    """Lines after which something can be different."""
    lines, line = set(), code.co_firstlineno
    starts = dict(dis.findlinestarts(code))
    for one in dis.get_instructions(code):
        line = starts.get(one.offset) or line
        if every or not (one.opname in _HARMLESS or "JUMP" in one.opname or one.opname.startswith("LOAD_FAST")):
            lines.add(line)
    return lines
