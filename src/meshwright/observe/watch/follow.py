"""Hooks that also look at attributes, locals, globals and what a wrapper says."""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from meshwright.observe.watch.events import Event
from meshwright.observe.watch.hooks import Hooks, Recorder, Thread, error_text, pauses, place, pop, raised_at
from meshwright.observe.watch.marks import Change, Snapshot
from meshwright.observe.watch.objects import Names, Objects
from meshwright.observe.watch.stream import FULL
from meshwright.observe.watch.wrappers import Said

# After a line of nothing but these, no object of the program is different.
_HARMLESS = frozenset(
    {"RESUME", "NOP", "CACHE", "POP_TOP", "PUSH_NULL", "COPY", "SWAP", "EXTENDED_ARG", "LOAD_FAST", "LOAD_CONST",
     "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD", "STORE_FAST", "RETURN_VALUE", "RETURN_CONST", "IS_OP",
     "CONTAINS_OP", "COMPARE_OP", "BUILD_TUPLE", "UNPACK_SEQUENCE", "FOR_ITER", "GET_ITER", "END_FOR", "TO_BOOL"}
)  # fmt: skip


class Call:
    """A watched call that has begun; `pop` reads its key."""

    __slots__ = ("dirty", "file", "key", "line", "names", "seen", "start", "thing")
    names: Snapshot | None
    seen: Snapshot | None  # of `thing`

    def __init__(self, key: object, file: str, line: int, thing: object) -> None:
        self.key, self.file, self.line, self.thing = key, file, line, thing
        self.seen, self.start, self.dirty, self.names = None, 0, False, None

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
        if call.seen is not None:
            found = call.seen.changes(self.objects.items(call.thing))
            if found:
                kind, hold = type(call.thing).__name__, self.attributes.hold
                self._say(thread, call, [one for one in found if hold(one.name)], f"{kind}.", depth, text)
        if frame is None:
            return
        if self.names:
            items = {name: value for name, value in frame.f_locals.items() if self.names.hold(name)}
            if call.names is None:
                call.names = Snapshot(items)
            else:
                self._say(thread, call, call.names.changes(items), "", depth, text)
        if self.globals:
            items = {name: value for name, value in list(frame.f_globals.items()) if self._global(name, value)}
            seen = self._modules.get(id(frame.f_globals))
            if seen is None:
                self._modules[id(frame.f_globals)] = Snapshot(items)
            else:
                self._say(thread, call, seen.changes(items), "global ", depth, text)

    def _global(self, name: str, value: object) -> bool:
        hidden = name.startswith("__") or isinstance(value, ModuleType | FunctionType | type)
        return not hidden and self.globals.hold(name)

    def _say(self, thread: Thread, call: Call, changes: Iterable[Change], owner: str, depth: int, text: str) -> None:
        for one in changes:
            said = self.said.changed(one.old, one.new) if self.said and one.event == "set" else ""
            words = f"{text}  {said}" if text and said else text or said
            where, now = f"{call.file}:{call.line}", self.recorder.now()
            name = owner + one.name
            self.recorder.emit(
                Event(one.event, now, 0, thread.name, depth, name, where, None, one.old_text, one.new_text, words)
            )


class Full:
    """The hooks of one code object, with everything that is followed."""

    def __init__(self, follow: Follower, code: CodeType) -> None:
        self._follow, self._recorder, self._said = follow, follow.recorder, follow.said
        self._code, self._key, self._name, self._at = code, object(), code.co_qualname, place(code)
        self._up, self._pauses = follow.up, pauses(code)
        self._attributes = bool(follow.attributes) and code.co_argcount > 0 and code.co_varnames[0] == "self"
        self._frames = bool(follow.names or follow.globals)
        self._words, self._file = bool(follow.said), os.path.basename(code.co_filename)
        self._dirty = frozenset(_changing_lines(code, every=self._frames))

    def hooks(self) -> Hooks:
        line = self._line if self._attributes or self._frames else None
        return Hooks(self._enter, self._leave, self._suspend, self._resume, self._raised, line, self._attributes)

    def _enter(self, thing: object) -> None:
        self._start("run", thing, sys._getframe(self._up) if self._frames or self._words else None)

    def _resume(self) -> None:
        frame = sys._getframe(self._up)
        self._wake(frame)

    def _wake(self, frame: FrameType) -> None:
        self._start("resume", frame.f_locals.get("self") if self._attributes else None, frame)

    def _leave(self, value: object) -> None:
        words = self._said.returned if self._words else None
        self._stop("end", words, value, sys._getframe(self._up) if self._frames or self._pauses else None)

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
        recorder = self._recorder
        thread = recorder.thread()
        calls = thread.calls
        if thread.busy or not recorder.on:
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
            except Exception as error:
                recorder.excuse(thread, self._name, error)
            finally:
                thread.busy = False
        call.line, call.dirty = number, number in self._dirty

    def _start(self, event: str, thing: object, frame: FrameType | None) -> None:
        recorder = self._recorder
        thread = recorder.thread()
        if thread.busy or not recorder.on:
            return
        thread.busy = True
        depth, text = len(thread.calls), ""
        call = Call(self._key, self._file, self._code.co_firstlineno, thing)
        try:
            if thing is not None and not isinstance(thing, type):
                call.seen = self._follow.objects.seen(thing)
            if call.seen is not None or self._frames:
                self._follow.look(thread, call, frame if self._frames else None, depth, "before this call")
            if self._words and frame is not None:
                text = self._said.call(self._name, frame)
        except Exception as error:
            recorder.excuse(thread, self._name, error)
        finally:
            thread.busy = False
        call.start = perf_counter_ns() + recorder.shift
        recorder.emit(Event(event, call.start, 0, thread.name, depth, self._name, self._at, None, None, None, text))
        thread.calls.append(call)

    def _stop(
        self,
        event: str,
        text: Callable[[str, Any], str] | None,
        value: object,
        frame: FrameType | None,
        where: str = "",
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
        try:
            self._follow.look(thread, call, frame if self._frames else None, depth + 1)
            if call.seen is not None and not any(one.thing is call.thing for one in thread.calls):
                self._follow.objects.forget(call.thing)
            said = text(self._name, value) if text is not None else ""
        except Exception as error:
            recorder.excuse(thread, self._name, error)
        finally:
            thread.busy = False
        last = perf_counter_ns() + recorder.shift
        recorder.emit(Event(event, last, 0, thread.name, depth, self._name, where, now - call.start, None, None, said))
        if len(recorder.stream.buffer) >= FULL:
            recorder.stream.write()


def _changing_lines(code: CodeType, *, every: bool) -> set[int]:
    """Lines after which something can be different."""
    lines, line = set(), code.co_firstlineno
    starts = dict(dis.findlinestarts(code))
    for one in dis.get_instructions(code):
        line = starts.get(one.offset) or line
        if every or not (one.opname in _HARMLESS or "JUMP" in one.opname or one.opname.startswith("LOAD_FAST")):
            lines.add(line)
    return lines
