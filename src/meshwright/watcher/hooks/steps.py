"""Steps of a watched call: it starts, passes points where something may have changed, and ends.

`Steps` is the reference; steps.c does the same if it can be built and no global variables are followed. `Rare` does
what is seldom needed, for both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter_ns
from types import FrameType
from typing import Any, NamedTuple

from meshwright.watcher.events.events import Event
from meshwright.watcher.events.stream import FULL
from meshwright.watcher.hooks.follow import Call, Follower, Where
from meshwright.watcher.hooks.hooks import Recorder, call_of, pop
from meshwright.watcher.hooks.objects import Seen
from meshwright.watcher.hooks.points import Point
from meshwright.watcher.hooks.site import CodeSite
from meshwright.watcher.values.describe import describe
from meshwright.watcher.values.marks import KINDS, kind_of, mark_of
from meshwright.watcher.values.snapshot import NOTHING, Change, Snapshot, gone, take
from meshwright.watcher.values.thread import Thread
from meshwright.watcher.wrappers import argument_names

_BEFORE = "before this call"
Words = Callable[[str, Any], str]  # text of a wrapper about a call or a value


class Rare:
    """Steps too rare to need speed. It has no reference to its owner: a cycle would keep the code alive."""

    def __init__(self, follow: Follower, site: CodeSite) -> None:
        self._follow, self._site = follow, site
        self.thread, self.write = follow.recorder.thread, follow.recorder.stream.write
        self.is_own, self.left_at, self.first_look = site.is_own, site.left_at, follow.objects.seen
        self.kind_of, self.mark_of, self.describe = kind_of, mark_of, describe

    def look(
        self, thread: Thread, thing: object, seen: Seen, items: Any, stored: tuple[str, ...] | None, where: Where
    ) -> None:
        """Report changes among all attributes of an object, or among those that were stored."""
        found: list[Change] = []
        try:
            if stored is None:
                seen.look(items, found)
            else:
                seen.stored(stored, items, found)
        finally:  # report changes also if a later value cannot be looked at
            self._follow.say(thread, f"{type(thing).__name__}.", found, where)

    def take(self, thread: Thread, name: str, old: object, value: object, where: Where) -> object:
        """Report that a local variable has another value; return what to remember of it."""
        if type(old) is type(value) and kind_of(value) == 0 and old == value:
            return value
        mark, change = take(name, old, value)
        self._follow.say(thread, "", [change], where)
        return mark

    def gone(self, thread: Thread, name: str, old: object, where: Where) -> None:
        self._follow.say(thread, "", [gone(name, old)], where)

    def forget(self, thread: Thread, thing: object) -> None:
        """Forget an object that cannot be referenced weakly, once the last call on it has ended."""
        if not any(one.thing is thing for one in thread.calls):
            self._follow.objects.forget(thing)

    def excuse(self, thread: Thread, error: Exception) -> None:
        self._follow.recorder.excuse(thread, self._site.name, error)

    def handled(self) -> int:
        """Return the line of the watched frame that raised the exception being handled."""
        error = sys.exc_info()[1]
        return error.__traceback__.tb_lineno if error is not None and error.__traceback__ is not None else 0


class Parts(NamedTuple):
    """Fixed data of the steps of one code object; steps.c reads it in this order."""

    local: Any  # holds the `Thread`
    recorder: Recorder
    buffer: list[Event]
    event: type[Event]
    now: Callable[[], int]
    shift: int
    key: object  # key of its calls
    name: str
    at: str
    file: str
    own: dict[type, bool]  # type of the first argument -> True if that is the method's object
    known: dict[int, Seen]  # id of an object -> the last look at it
    called: Words | None
    returned: Words | None
    plain: bool  # True if the wrapper is `Plain`
    names: tuple[str, ...]  # followed local variables, in order
    places: tuple[int, ...]  # their slots in the frame; ~slot of one that inner functions share
    arguments: tuple[str, ...]  # arguments that `Plain` shows
    argument_places: tuple[int, ...]
    kinds: dict[type, int]  # see `marks.kind_of`
    nothing: object  # stands for the value of a new name
    first: str | None  # the first argument's name, if its object is followed
    rare: Rare
    pauses: bool  # True for a generator or coroutine
    up: int  # frames from a hook to the watched one
    full: int  # number of events at which they are written at once


def parts_of(follow: Follower, site: CodeSite, *, attributes: bool, frames: bool) -> Parts:
    recorder, said, places = follow.recorder, follow.said, site.variables()
    followed = tuple(name for name in places if frames and follow.names.hold(name))
    shown = argument_names(site.code)
    return Parts(
        local=recorder.local,
        recorder=recorder,
        buffer=recorder.stream.buffer,
        event=Event,
        now=perf_counter_ns,
        shift=recorder.shift,
        key=site.key,
        name=site.name,
        at=site.at,
        file=site.file,
        own=site.own,
        known=follow.objects.known,
        called=said.call if said else None,
        returned=said.returned if said else None,
        plain=said.plain,
        names=followed,
        places=tuple(places[name] for name in followed),
        arguments=shown,
        argument_places=tuple(places[name] for name in shown),
        kinds=KINDS,
        nothing=NOTHING,
        first=site.code.co_varnames[0] if attributes else None,
        rare=Rare(follow, site),
        pauses=site.pauses,
        up=follow.up,
        full=FULL,
    )


class Steps:
    """Steps of one code object."""

    def __init__(self, parts: Parts, follow: Follower, *, frames: bool) -> None:
        self._is, self._rare, self._follow, self._frames = parts, parts.rare, follow, frames
        self._globals = bool(follow.globals)
        self._recorder, self._emit = parts.recorder, parts.buffer.append

    def start(self, thing: object, event: str = "run", frame: FrameType | None = None) -> None:
        thread, parts = self._recorder.thread(), self._is
        if thread.busy or not self._recorder.on:
            return
        text, seen, names, where = "", None, None, lambda: (parts.at, len(thread.calls), _BEFORE)
        frame = frame or sys._getframe(parts.up)
        thread.busy = True
        try:
            if parts.first is not None:
                seen = self._seen(thing)
                if seen is not None:
                    self._look_at_object(thread, thing, seen, None, where)
            if self._frames:
                names = self._look_at_frame(thread, None, frame, where)
            if parts.called is not None:
                text = parts.called(parts.name, frame)
        except Exception as error:  # raised by the program's own __eq__, __len__ or properties
            self._rare.excuse(thread, error)
        finally:
            thread.busy = False
        time = parts.now() + parts.shift
        self._emit(Event(event, time, 0, thread.name, len(thread.calls), parts.name, parts.at, text=text))
        thread.calls.append(Call(parts.key, time, thing if seen is not None else None, seen, names, id(frame)))

    def point(self, where: Point) -> None:
        parts, thread = self._is, getattr(self._is.local, "thread", None)
        if thread is None or thread.busy or not self._recorder.on:
            return
        frame = sys._getframe(parts.up)
        call = call_of(thread.calls, parts.key, id(frame))
        if call is None:
            if parts.pauses:  # it was woken by `throw`
                self.wake(frame)
            return
        line, stored, in_frame, whole = where
        said = lambda: (f"{parts.file}:{line or self._rare.handled()}", len(thread.calls), "")  # noqa: E731
        thread.busy = True
        try:
            if call.seen is not None:
                self._look_at_object(thread, call.thing, call.seen, None if whole else stored, said)
            if self._frames and (in_frame or whole):
                call.names = self._look_at_frame(thread, call.names, frame, said)
        except Exception as error:
            self._rare.excuse(thread, error)
        finally:
            thread.busy = False

    def leave(self, value: object, at: int) -> None:
        self.stop("end", self._is.returned, value, sys._getframe(self._is.up), at)

    def wake(self, frame: FrameType) -> None:
        """Record that a paused call goes on."""
        self.start(frame.f_locals.get(self._is.first) if self._is.first is not None else None, "resume", frame)

    def stop(self, event: str, words: Words | None, value: object, frame: FrameType, at: int | None) -> None:
        """Record that a call pauses or ends; `at` is the byte of the instruction, or None if the value is an exception."""
        thread, parts = self._recorder.thread(), self._is
        if thread.busy or not self._recorder.on:
            return
        if parts.pauses and call_of(thread.calls, parts.key, id(frame)) is None:
            self.wake(frame)  # by `throw` or `close`
        time = parts.now() + parts.shift  # before our own work
        call = pop(thread.calls, parts.key, id(frame))
        if call is None:
            return  # it began before the watch
        text = self._last_look(thread, call, words, value, frame, at)
        where = "" if event == "end" else self._rare.left_at(at, value) if event == "raise" else parts.at
        last, depth, took = parts.now() + parts.shift, len(thread.calls), time - call.start
        self._emit(Event(event, last, 0, thread.name, depth, parts.name, where, took, None, None, text))
        if len(parts.buffer) >= parts.full:
            self._rare.write()

    def _last_look(
        self, thread: Thread, call: Call, words: Words | None, value: object, frame: FrameType, at: int | None
    ) -> str:
        """Report the last changes, and return the wrapper's text."""
        where = lambda: (self._rare.left_at(at, value), len(thread.calls) + 1, "")  # noqa: E731
        thread.busy = True
        try:
            if call.seen is not None:
                self._look_at_object(thread, call.thing, call.seen, None, where)
                if not call.seen.weak:
                    self._rare.forget(thread, call.thing)
            if self._frames:
                self._look_at_frame(thread, call.names, frame, where)
            return words(self._is.name, value) if words is not None else ""
        except Exception as error:
            self._rare.excuse(thread, error)
            return ""
        finally:
            thread.busy = False

    def _seen(self, thing: object) -> Seen | None:
        """Return the last look at the method's object, or a first one; None if it runs on none."""
        if not (self._is.own.get(type(thing)) or self._rare.is_own(thing)):
            return None
        seen = self._is.known.get(id(thing))
        return seen if seen is not None and seen.thing() is thing else self._rare.first_look(thing)

    def _look_at_object(
        self, thread: Thread, thing: object, seen: Seen, stored: tuple[str, ...] | None, where: Callable[[], Where]
    ) -> None:
        items = seen.items(thing)
        if stored is not None or not seen.known.same(items):
            self._rare.look(thread, thing, seen, items, stored, where())

    def _look_at_frame(
        self, thread: Thread, names: Snapshot | None, frame: FrameType, where: Callable[[], Where]
    ) -> Snapshot | None:
        local: list[Change] = []
        global_: list[Change] = []
        try:
            if self._is.names:
                names = self._follow.look_at_names(names, frame, self._is.names, local)
            if self._globals:
                self._follow.look_at_globals(frame, global_)
        finally:
            for owner, found in (("", local), ("global ", global_)):
                if found:
                    self._follow.say(thread, owner, found, where())
        return names
