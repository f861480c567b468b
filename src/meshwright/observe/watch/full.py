"""Hooks that also look at attributes, locals, globals and what a wrapper says."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import Any

from meshwright.observe.watch.events import Event
from meshwright.observe.watch.follow import Call, Follower, Where
from meshwright.observe.watch.hooks import Hooks, Thread, error_text, pauses, place, pop, raised_at
from meshwright.observe.watch.points import Point, decode, points_of
from meshwright.observe.watch.snapshot import Change
from meshwright.observe.watch.stream import FULL

_BEFORE = "before this call"


class Full:
    """The hooks of one code object, with everything that is followed.

    `enter`, `point` and `leave` are what a watched call pays: all that is fixed is bound beforehand.
    """

    def __init__(self, follow: Follower, code: CodeType) -> None:
        self._follow, self._recorder, self._said = follow, follow.recorder, follow.said
        self._code, self._key, self._name, self._at = code, object(), code.co_qualname, place(code)
        self._up, self._pauses, self._words = follow.up, pauses(code), bool(follow.said)
        self._file = os.path.basename(code.co_filename)
        first = bool(follow.attributes) and code.co_argcount > 0
        self._attributes = first and (code.co_varnames[0] == "self" or _class_of(code) is not None)
        holds = follow.attributes.hold if self._attributes else lambda _: False
        names, globals_ = follow.names.hold, follow.globals.hold
        self._points = points_of(code, decode(code), attributes=holds, names=names, globals_=globals_)
        self._frames = bool(follow.names or follow.globals) and self._points.frames
        self._own: dict[type, bool] = {}  # kinds of first arguments -> whether those are the method's object

    def hooks(self) -> Hooks:
        points = self._points.at
        if not (self._attributes or self._frames):
            points = {}
        elif not self._attributes:
            points = {at: one for at, one in points.items() if one.frame or one.whole}
        return Hooks(
            self._enter(), self._leave(), self._suspend, self._resume, self._raised, self._point() if points else None,
            points, wants_self=self._attributes,
        )  # fmt: skip

    def _enter(self) -> Callable[[object], None]:
        recorder, local, key, start, own = self._recorder, self._recorder.local, self._key, self._start, self._own
        emit, shift, name, at, now = recorder.emit, recorder.shift, self._name, self._at, perf_counter_ns
        frame_of, up, more, known = sys._getframe, self._up, self._frames or self._words, self._follow.objects.known

        def enter(thing: object) -> None:
            thread, seen = getattr(local, "thread", None), known.get(id(thing))
            if more or thread is None or thread.busy or not own.get(type(thing)) or seen is None:
                start("run", thing, frame_of(up) if more else None)
                return
            thread.busy = True
            try:
                usual = recorder.on and seen.thing() is thing and seen.same(seen.items(thing))
            except Exception:  # of the program's own __eq__, __len__ or properties: `start` looks again, and says it
                usual = False
            finally:
                thread.busy = False
            if usual:
                time, calls = now() + shift, thread.calls
                emit(Event("run", time, 0, thread.name, len(calls), name, at))
                calls.append(Call(key, time, thing, seen, None))
            else:
                start("run", thing, None)

        return enter

    def _resume(self) -> None:
        self._wake(sys._getframe(self._up))

    def _wake(self, frame: FrameType) -> None:
        self._start("resume", frame.f_locals.get(self._code.co_varnames[0]) if self._attributes else None, frame)

    def _start(self, event: str, thing: object, frame: FrameType | None) -> None:
        recorder, follow = self._recorder, self._follow
        thread = recorder.thread()
        if thread.busy or not recorder.on:
            return
        thread.busy = True
        depth, text, seen, names = len(thread.calls), "", None, None
        try:
            if self._attributes and (self._own.get(type(thing)) or self._is_own(thing)):
                seen = follow.objects.seen(thing)
                items = seen.items(thing)
                if not seen.same(items):
                    self._say_attributes(thread, seen.changes(items), thing, (self._at, depth, _BEFORE))
            if frame is not None:
                if self._frames:
                    names = follow.look_at_frame(thread, None, frame, (self._at, depth, _BEFORE))
                if self._words:
                    text = self._said.call(self._name, frame)
        except Exception as error:
            recorder.excuse(thread, self._name, error)
        finally:
            thread.busy = False
        start = perf_counter_ns() + recorder.shift
        recorder.emit(Event(event, start, 0, thread.name, depth, self._name, self._at, None, None, None, text))
        thread.calls.append(Call(self._key, start, thing if seen is not None else None, seen, names))

    def _is_own(self, thing: object) -> bool:
        kind = type(thing)
        if kind not in self._own:
            self._own[kind] = thing is not None and not isinstance(thing, type) and _runs_on(self._code, kind)
        return self._own[kind]

    def _say_attributes(self, thread: Thread, found: list[Change], thing: object, where: Where) -> None:
        if found:
            self._follow.say(thread, found, f"{type(thing).__name__}.", where)

    def _point(self) -> Callable[[Point], None]:
        recorder, local, key, frames, up = self._recorder, self._recorder.local, self._key, self._frames, self._up
        say, file, frame_of, follow = self._say_attributes, self._file, sys._getframe, self._follow

        def point(where: Point) -> None:
            thread = getattr(local, "thread", None)
            if thread is None or thread.busy or not recorder.on:
                return
            calls = thread.calls
            if not calls or calls[-1].key is not key:
                if self._pauses:  # it was woken by `throw`
                    self._wake(frame_of(up))
                return
            call = calls[-1]
            line, stored, in_frame, whole = where
            thread.busy = True
            try:
                seen = call.seen
                if seen is not None:
                    items = seen.items(call.thing)
                    if not whole:
                        found = seen.stored(stored[0], items) if stored else []
                        for name in stored[1:]:
                            found += seen.stored(name, items)
                    else:
                        found = [] if seen.same(items) else seen.changes(items)
                    if found:
                        say(thread, found, call.thing, (f"{file}:{line or _handled()}", len(calls), ""))
                if frames and (in_frame or whole):
                    place_ = f"{file}:{line or _handled()}", len(calls), ""
                    call.names = follow.look_at_frame(thread, call.names, frame_of(up), place_)
            except Exception as error:
                recorder.excuse(thread, self._name, error)
            finally:
                thread.busy = False

        return point

    def _leave(self) -> Callable[[object, int], None]:
        recorder, local, key, stop = self._recorder, self._recorder.local, self._key, self._stop
        emit, shift, name, now = recorder.emit, recorder.shift, self._name, perf_counter_ns
        frame_of, up, buffer = sys._getframe, self._up, recorder.stream.buffer
        words, more = self._said.returned if self._words else None, self._frames or self._words or self._pauses

        def leave(value: object, at: int) -> None:
            thread = getattr(local, "thread", None)
            if more or thread is None or thread.busy or not thread.calls or thread.calls[-1].key is not key:
                stop("end", words, value, frame_of(up), at)
                return
            if not recorder.on:
                return
            time, call = now() + shift, thread.calls[-1]
            seen = call.seen
            if seen is not None:
                thread.busy = True
                try:  # here and not in a function: this is half of what a short call pays
                    if not seen.same(seen.items(call.thing)) or not seen.weak:
                        thread.busy = False
                        stop("end", None, value, None, at)
                        return
                except Exception as error:
                    recorder.excuse(thread, name, error)
                finally:
                    thread.busy = False
            del thread.calls[-1]
            emit(Event("end", time, 0, thread.name, len(thread.calls), name, "", time - call.start))
            if len(buffer) >= FULL:
                recorder.stream.write()

        return leave

    def _suspend(self, value: object, at: int) -> None:
        self._stop("yield", self._said.returned, value, sys._getframe(self._up), at)

    def _raised(self, error: BaseException | None = None) -> None:
        gone = error or sys.exc_info()[1]
        if isinstance(gone, GeneratorExit):
            self._stop("end", lambda *_: "closed", gone, sys._getframe(self._up), None)
        else:
            self._stop("raise", lambda *_: error_text(gone), gone, sys._getframe(self._up), None)

    def _stop(
        self,
        event: str,
        text: Callable[[str, Any], str] | None,
        value: object,
        frame: FrameType | None,
        at: int | None,  # byte of the instruction; None: an exception, which is the value
    ) -> None:
        recorder = self._recorder
        thread = recorder.thread()
        if thread.busy or not recorder.on:
            return
        if self._pauses and frame is not None and not (thread.calls and thread.calls[-1].key is self._key):
            self._wake(frame)  # it paused, and was woken by `throw` or `close`
        now = perf_counter_ns() + recorder.shift
        call = pop(thread.calls, self._key)
        if call is None:
            return  # it began before the watch did
        thread.busy = True
        depth, said = len(thread.calls), ""
        raised = raised_at(self._code, value) if at is None and isinstance(value, BaseException) else ""
        try:
            self._last_look(thread, call, frame, raised or place(self._code, self._line(at)))
            said = text(self._name, value) if text is not None else ""
        except Exception as error:
            recorder.excuse(thread, self._name, error)
        finally:
            thread.busy = False
        last = perf_counter_ns() + recorder.shift
        where = {"raise": raised, "yield": self._at}.get(event, "")
        recorder.emit(Event(event, last, 0, thread.name, depth, self._name, where, now - call.start, None, None, said))
        if len(recorder.stream.buffer) >= FULL:
            recorder.stream.write()

    def _last_look(self, thread: Thread, call: Call, frame: FrameType | None, at: str) -> None:
        where = at, len(thread.calls) + 1, ""
        if call.seen is not None:
            items = call.seen.items(call.thing)
            if not call.seen.same(items):
                self._say_attributes(thread, call.seen.changes(items), call.thing, where)
            if not call.seen.weak and not any(one.thing is call.thing for one in thread.calls):
                self._follow.objects.forget(call.thing)
        if self._frames and frame is not None:
            self._follow.look_at_frame(thread, call.names, frame, where)

    def _line(self, at: int | None) -> int | None:
        found = (line for start, end, line in self._code.co_lines() if at is not None and start <= at < end)
        return next(found, None)


def _handled() -> int:
    """The line of the watched frame that raised the exception which is being handled."""
    error = sys.exc_info()[1]
    return error.__traceback__.tb_lineno if error is not None and error.__traceback__ is not None else 0


def _class_of(code: CodeType) -> str | None:
    """The name of the class that its text stands in."""
    around = code.co_qualname.split(".")[-2:-1]
    return around[0] if around and around[0] != "<locals>" else None


def _runs_on(code: CodeType, kind: type) -> bool:
    """Whether an object of this kind, as first argument, is the one that the method runs on."""
    if code.co_varnames[0] == "self":
        return True
    for one in kind.__mro__:
        if one.__name__ == _class_of(code):
            return not isinstance(vars(one).get(code.co_name), staticmethod)
    return False
