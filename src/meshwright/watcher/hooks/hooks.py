"""Hooks of one code object that a watched function calls, in a short form (calls only) and a full one."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter_ns, time_ns
from types import CodeType, FrameType
from typing import Any

from meshwright.watcher.events.events import Event
from meshwright.watcher.events.stream import FULL, Stream
from meshwright.watcher.hooks.points import Point
from meshwright.watcher.values.thread import Thread
from meshwright.watcher.values.unchanged import makers


class Missed(list[object]):
    """List of dropped exceptions that is hashable, as a constant of watched code."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ()


@dataclass(frozen=True, slots=True)
class Hooks:
    enter: Callable[[object], None]  # gets the first argument if `wants_self`, else None
    leave: Callable[[object, int], None]  # gets the returned value, and the byte of the instruction
    suspend: Callable[[object, int], None]  # gets the yielded value when a generator or coroutine pauses
    resume: Callable[[], None]
    raised: Callable[..., None]  # gets the exception, or finds it in sys.exc_info()
    point: Callable[[Point], None] | None = None  # called where something may have changed
    points: dict[int, Point] = field(default_factory=dict)  # points by the byte of the instruction after them
    wants_self: bool = False
    missed: Missed = field(default_factory=Missed)  # grows when recursion was too deep to call `raised`


class Recorder:
    """State that all hooks of a watch share."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.on = stream, True
        self.emit = stream.buffer.append
        self.shift = time_ns() - perf_counter_ns()  # monotonic, but counted from 1970: ranks are merged by time
        self.local = threading.local()
        self._unknown = count(1)  # numbers of threads that Python's threading did not start

    def thread(self) -> Thread:
        try:
            return self.local.thread  # type: ignore[no-any-return]
        except AttributeError:
            self.local.thread = makers().thread(self._thread_name())
            return self.local.thread  # type: ignore[no-any-return]

    def _thread_name(self) -> str:
        """Return the name that `current_thread()` gives; that call would keep an object forever for foreign threads."""
        known = vars(threading)["_active"].get(threading.get_ident())
        return known.name if known is not None else f"Dummy-{next(self._unknown)}"

    def now(self) -> int:
        return perf_counter_ns() + self.shift

    def excuse(self, thread: Thread, name: str, error: Exception) -> None:
        """Note in the stream that looking at something has failed; the program goes on."""
        self.emit(
            Event("note", self.now(), 0, thread.name, len(thread.calls), name, text=f"not seen: {error_text(error)}")
        )


def place(code: CodeType, line: int | None = None) -> str:
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno if line is None else line}"


def error_text(error: BaseException | None) -> str:
    try:
        said = " ".join(str(error).split())[:200]
    except Exception as worse:
        said = f"(its text raises {type(worse).__name__})"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def raised_at(code: CodeType, error: BaseException | None) -> str:
    """Return the line of this code from which an exception came, itself or through a call."""
    trace = error.__traceback__ if error is not None else None
    return place(code, trace.tb_lineno if trace is not None else None)


class CallsOnly:
    """Hooks for runs, ends and raises of one code object.

    A watched call pays for `enter` and `leave`: all that is fixed is bound beforehand, and nothing is called twice.
    """

    def __init__(self, recorder: Recorder, code: CodeType) -> None:
        self._recorder, self._code, self._key = recorder, code, object()
        self._name, self._at, self._pauses = code.co_qualname, place(code), pauses(code)
        self._missed, self._dropped = Missed(), dict[int, int]()  # the latter by thread: misses handled

    def hooks(self) -> Hooks:
        # the frame tells which of several generators runs; other functions need not pay for it
        enter, leave = (self._started, self._returned) if self._pauses else (self._enter(), self._leave())
        return Hooks(enter, leave, self._suspend, self._resume, self._raised, missed=self._missed)

    def _enter(self) -> Callable[[object], None]:
        recorder, local, emit, now = self._recorder, self._recorder.local, self._recorder.emit, perf_counter_ns
        shift, name, at, key = recorder.shift, self._name, self._at, self._key

        def enter(_: object) -> None:
            try:
                thread = local.thread
            except AttributeError:
                thread = recorder.thread()
            if recorder.on:
                calls = thread.calls
                time = now() + shift
                emit(Event("run", time, 0, thread.name, len(calls), name, at))
                calls.append((key, time))

        return enter

    def _leave(self) -> Callable[[object, int], None]:
        recorder, local, emit, now = self._recorder, self._recorder.local, self._recorder.emit, perf_counter_ns
        shift, name, key, buffer, otherwise = recorder.shift, self._name, self._key, recorder.stream.buffer, self._stop
        missed = self._missed

        def leave(_: object, __: int) -> None:
            time = now() + shift
            thread = getattr(local, "thread", None) or recorder.thread()
            calls = thread.calls
            if not calls or calls[-1][0] is not key or missed or not recorder.on:
                otherwise("end")
                return
            start = calls.pop()[1]
            emit(Event("end", time, 0, thread.name, len(calls), name, "", time - start))
            if len(buffer) >= FULL:
                recorder.stream.write()

        return leave

    def _returned(self, _: object, __: int) -> None:
        self._stop("end")

    def _suspend(self, _: object, __: int) -> None:
        self._stop("yield", where=self._at)

    def _started(self, _: object) -> None:
        self._resume("run")

    def _resume(self, event: str = "resume") -> None:
        thread = self._recorder.thread()
        if self._recorder.on:
            time = self._recorder.now()
            self._recorder.emit(Event(event, time, 0, thread.name, len(thread.calls), self._name, self._at))
            thread.calls.append((self._key, time, running(self._code)))

    def _raised(self, error: BaseException | None = None) -> None:
        gone = error or sys.exc_info()[1]
        if isinstance(gone, GeneratorExit):
            self._stop("end", "closed")
        else:
            self._stop("raise", error_text(gone), raised_at(self._code, gone))

    def _stop(self, event: str, text: str = "", where: str = "") -> None:
        """Record an exit other than a normal return."""
        thread = self._recorder.thread()
        frame = running(self._code) if self._pauses else None
        if self._pauses and call_of(thread.calls, self._key, frame) is None:
            self._resume()  # a paused generator was woken by `throw` or `close`
        if self._missed:
            self._drop(thread)
        time = self._recorder.now()
        began = pop(thread.calls, self._key, frame)
        if self._recorder.on and began is not None:  # else it began before the watch
            depth, duration = len(thread.calls), time - began[1]
            self._recorder.emit(Event(event, time, 0, thread.name, depth, self._name, where, duration, text=text))
            if len(self._recorder.stream.buffer) >= FULL:
                self._recorder.stream.write()

    def _drop(self, thread: Thread) -> None:
        """Drop calls that ended without a hook, because recursion was too deep, with all calls above the last."""
        if self._dropped.get(id(thread)) == len(self._missed):
            return
        missed = len(self._missed)
        there = sum(one[0] is self._key for one in thread.calls) - sum(1 for _ in frames_of(self._code))
        for _ in range(there):
            pop(thread.calls, self._key)
        self._dropped[id(thread)] = missed  # last: this call itself may exceed the recursion limit


def frames_of(code: CodeType) -> Iterator[FrameType]:
    """Yield this thread's frames that run the code, innermost first; with hooks it is another object."""
    frame: FrameType | None = sys._getframe(1)
    wanted = code.co_firstlineno, code.co_qualname, code.co_filename
    while frame is not None:
        one = frame.f_code
        if (one.co_firstlineno, one.co_qualname, one.co_filename) == wanted:
            yield frame
        frame = frame.f_back


def running(code: CodeType) -> int:
    """Return the identity of the frame that runs the code: generators of one function each have their own."""
    return id(next(frames_of(code), None))


def pauses(code: CodeType) -> bool:
    """Return True for a generator or coroutine."""
    return bool(code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))


def call_of(calls: list[Any], key: object, frame: int | None) -> Any:
    """Return the call of this frame, or None if no start was recorded."""
    return next((one for one in reversed(calls) if one[0] is key and one[2] == frame), None)


def pop(calls: list[Any], key: object, frame: int | None = None) -> Any:
    """Remove and return the call of this key and frame, with those above it; None if it began before the watch."""
    for i in range(len(calls) - 1, -1, -1):
        if calls[i][0] is key and (frame is None or calls[i][2] == frame):
            found = calls[i]
            del calls[i:]
            return found
    return None
