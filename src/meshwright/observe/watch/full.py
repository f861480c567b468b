"""Hooks that also look at attributes, locals, globals and what a wrapper says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import Any

from meshwright.observe.watch.events import Event
from meshwright.observe.watch.follow import Call, Follower
from meshwright.observe.watch.hooks import Hooks, Thread, error_text, pop
from meshwright.observe.watch.points import Point, decode, points_of
from meshwright.observe.watch.site import Site
from meshwright.observe.watch.stream import FULL

_BEFORE = "before this call"
Words = Callable[[str, Any], str]  # what a wrapper says about a call or a value


class Full:
    """The hooks of one code object, with everything that is followed.

    `enter`, `point` and `leave` are what a watched call pays: all that is fixed is bound beforehand.
    """

    def __init__(self, follow: Follower, code: CodeType) -> None:
        self._follow, self._recorder, self._said = follow, follow.recorder, follow.said
        self._site, self._up, self._words = Site(code), follow.up, bool(follow.said)
        self._attributes = bool(follow.attributes) and self._site.is_method()
        holds = follow.attributes.hold if self._attributes else lambda _: False
        names, globals_ = follow.names.hold, follow.globals.hold
        self._points = points_of(code, decode(code), attributes=holds, names=names, globals_=globals_)
        self._frames = bool(follow.names or follow.globals) and self._points.frames
        self._start, self._end = self._starts(), self._ends()  # these do not know us: a cycle would keep the code alive

    def hooks(self) -> Hooks:
        points = self._points.at
        if not (self._attributes or self._frames):
            points = {}
        elif not self._attributes:
            points = {at: one for at, one in points.items() if one.frame or one.whole}
        return Hooks(
            self._start, self._leave(), self._suspend, self._resume, self._raised, self._point() if points else None,
            points, wants_self=self._attributes,
        )  # fmt: skip

    def _resume(self) -> None:
        self._wake(sys._getframe(self._up))

    def _wake(self, frame: FrameType) -> None:
        thing = frame.f_locals.get(self._site.code.co_varnames[0]) if self._attributes else None
        self._start(thing, "resume", frame)

    def _starts(self) -> Callable[..., None]:
        recorder, local, follow, site, now = (
            self._recorder,
            self._recorder.local,
            self._follow,
            self._site,
            perf_counter_ns,
        )
        emit, shift, say, key, name, at = recorder.emit, recorder.shift, follow.say, site.key, site.name, site.at
        attributes, frames, own, known = self._attributes, self._frames, site.own, follow.objects.known
        words = self._said.call if self._words else None

        frame_of, up, more = sys._getframe, self._up, self._frames or self._words

        def start(thing: object, event: str = "run", frame: FrameType | None = None) -> None:
            thread = getattr(local, "thread", None) or recorder.thread()
            if thread.busy or not recorder.on:
                return
            text, seen, names, calls = "", None, None, thread.calls
            thread.busy = True
            try:
                if attributes and (own.get(type(thing)) or site.is_own(thing)):
                    seen = known.get(id(thing))
                    if seen is None or seen.thing() is not thing:
                        seen = follow.objects.seen(thing)
                    else:
                        items = thing.__dict__ if seen.in_dict else seen.items(thing)
                        moved = seen.known.moved(items)
                        if moved or moved is None:
                            found = seen.changes(moved, items)
                            say(thread, [(f"{type(thing).__name__}.", found)], (at, len(calls), _BEFORE))
                if more:
                    frame = frame or frame_of(up)
                    if frames:
                        names, changes = follow.look_at_frame(None, frame)
                        if changes:
                            say(thread, changes, (at, len(calls), _BEFORE))
                    if words is not None:
                        text = words(name, frame)
            except Exception as error:  # of the program's own __eq__, __len__ or properties
                recorder.excuse(thread, name, error)
            finally:
                thread.busy = False
            time = now() + shift
            emit(Event(event, time, 0, thread.name, len(calls), name, at, None, None, None, text))
            calls.append(Call(key, time, thing if seen is not None else None, seen, names))

        return start

    def _point(self) -> Callable[[Point], None]:
        recorder, local, frames, up = self._recorder, self._recorder.local, self._frames, self._up
        follow, say, key, file = self._follow, self._follow.say, self._site.key, self._site.file
        frame_of = sys._getframe

        def point(where: Point) -> None:
            thread = getattr(local, "thread", None)
            if thread is None or thread.busy or not recorder.on:
                return
            calls = thread.calls
            if not calls or calls[-1].key is not key:
                if self._site.pauses:  # it was woken by `throw`
                    self._wake(frame_of(up))
                return
            call = calls[-1]
            line, stored, in_frame, whole = where
            thread.busy = True
            try:
                seen = call.seen
                if seen is not None:
                    items = call.thing.__dict__ if seen.in_dict else seen.items(call.thing)
                    if whole:
                        moved = seen.known.moved(items)
                        found = seen.changes(moved, items) if moved or moved is None else None
                    else:
                        found = seen.stored(stored, items)
                    if found:
                        owner = f"{type(call.thing).__name__}."
                        say(thread, [(owner, found)], (f"{file}:{line or _handled()}", len(calls), ""))
                if frames and (in_frame or whole):
                    call.names, changes = follow.look_at_frame(call.names, frame_of(up))
                    if changes:
                        say(thread, changes, (f"{file}:{line or _handled()}", len(calls), ""))
            except Exception as error:
                recorder.excuse(thread, self._site.name, error)
            finally:
                thread.busy = False

        return point

    def _leave(self) -> Callable[[object, int], None]:
        recorder, local, key, stop, end = self._recorder, self._recorder.local, self._site.key, self._stop, self._end
        shift, now, frame_of, up, frames = recorder.shift, perf_counter_ns, sys._getframe, self._up, self._frames
        words, pauses = self._said.returned if self._words else None, self._site.pauses

        def leave(value: object, at: int) -> None:
            thread = getattr(local, "thread", None)
            if pauses or thread is None or thread.busy or not thread.calls or thread.calls[-1].key is not key:
                stop("end", words, value, frame_of(up), at)
            elif recorder.on:
                end(
                    "end", thread, thread.calls.pop(), now() + shift, words, value, frame_of(up) if frames else None, at
                )

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
        self, event: str, text: Words | None, value: object, frame: FrameType | None, at: int | None
    ) -> None:  # fmt: skip
        """The way out that is not the usual one."""
        recorder = self._recorder
        thread = recorder.thread()
        if thread.busy or not recorder.on:
            return
        if self._site.pauses and frame is not None and not (thread.calls and thread.calls[-1].key is self._site.key):
            self._wake(frame)  # it paused, and was woken by `throw` or `close`
        now = perf_counter_ns() + recorder.shift
        call = pop(thread.calls, self._site.key)
        if call is not None:  # else it began before the watch did
            self._end(event, thread, call, now, text, value, frame, at)

    def _ends(self) -> Callable[..., None]:
        recorder, follow, say, site, now = self._recorder, self._follow, self._follow.say, self._site, perf_counter_ns
        emit, shift, buffer, frames = recorder.emit, recorder.shift, recorder.stream.buffer, self._frames
        name = site.name

        def end(
            event: str,
            thread: Thread,
            call: Call,
            time: int,  # when it was left, before our looking
            text: Words | None,
            value: object,
            frame: FrameType | None,
            at: int | None,  # byte of the instruction; None: an exception, which is the value
        ) -> None:
            said, seen = "", call.seen
            thread.busy = True
            try:
                if seen is not None:
                    items = call.thing.__dict__ if seen.in_dict else seen.items(call.thing)
                    moved = seen.known.moved(items)
                    if moved or moved is None:
                        owner, found = f"{type(call.thing).__name__}.", seen.changes(moved, items)
                        say(thread, [(owner, found)], (site.left_at(at, value), len(thread.calls) + 1, ""))
                    if not seen.weak and not any(one.thing is call.thing for one in thread.calls):
                        follow.objects.forget(call.thing)
                if frames and frame is not None:
                    _, changes = follow.look_at_frame(call.names, frame)
                    if changes:
                        say(thread, changes, (site.left_at(at, value), len(thread.calls) + 1, ""))
                if text is not None:
                    said = text(name, value)
            except Exception as error:
                recorder.excuse(thread, name, error)
            finally:
                thread.busy = False
            last, where = now() + shift, ""
            if event != "end":
                where = site.left_at(at, value) if event == "raise" else site.at
            emit(
                Event(event, last, 0, thread.name, len(thread.calls), name, where, time - call.start, None, None, said)
            )
            if len(buffer) >= FULL:
                recorder.stream.write()

        return end


def _handled() -> int:
    """The line of the watched frame that raised the exception which is being handled."""
    error = sys.exc_info()[1]
    return error.__traceback__.tb_lineno if error is not None and error.__traceback__ is not None else 0
