"""What a watched function calls: the hooks of one code object, in a short form (calls only) and a full one."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter_ns, time_ns
from types import CodeType
from typing import Any

from meshwright.observe.watch.events import Event
from meshwright.observe.watch.known import makers
from meshwright.observe.watch.points import Point
from meshwright.observe.watch.stream import FULL, Stream
from meshwright.observe.watch.thread import Thread


@dataclass(frozen=True, slots=True)
class Hooks:
    enter: Callable[[object], None]  # gets the first argument where `wants_self`, else None
    leave: Callable[[object, int], None]  # gets what is returned, and the byte of the instruction
    suspend: Callable[[object, int], None]  # a generator or coroutine pauses with a value
    resume: Callable[[], None]
    raised: Callable[..., None]  # gets the exception, or finds it in sys.exc_info()
    point: Callable[[Point], None] | None = None  # something may have changed
    points: dict[int, Point] = field(default_factory=dict)  # where that is called: byte of the instruction after it
    wants_self: bool = False


class Recorder:
    """What all hooks of a watch share."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.on = stream, True
        self.emit = stream.buffer.append
        self.shift = time_ns() - perf_counter_ns()  # monotonic, but as if since 1970: ranks are merged by time
        self.local = threading.local()
        self._unknown = count(1)  # threads that Python's threading did not start

    def thread(self) -> Thread:
        try:
            return self.local.thread  # type: ignore[no-any-return]
        except AttributeError:
            self.local.thread = makers().thread(self._thread_name())
            return self.local.thread  # type: ignore[no-any-return]

    def _thread_name(self) -> str:
        """As `current_thread()` says it, which would keep an object for ever where the program itself made none."""
        known = vars(threading)["_active"].get(threading.get_ident())
        return known.name if known is not None else f"Dummy-{next(self._unknown)}"

    def now(self) -> int:
        return perf_counter_ns() + self.shift

    def excuse(self, thread: Thread, name: str, error: Exception) -> None:
        """Looking at something has failed: the program goes on, and the stream says so."""
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
    """Where in this code an exception came from, itself or through a call."""
    trace = error.__traceback__ if error is not None else None
    return place(code, trace.tb_lineno if trace is not None else None)


class CallsOnly:
    """Runs, ends and raises of one code object.

    `enter` and `leave` are what a watched call pays: all that is fixed is bound beforehand, and nothing is called twice.
    """

    def __init__(self, recorder: Recorder, code: CodeType) -> None:
        self._recorder, self._code, self._key = recorder, code, object()
        self._name, self._at, self._pauses = code.co_qualname, place(code), pauses(code)

    def hooks(self) -> Hooks:
        return Hooks(self._enter(), self._leave(), self._suspend, self._resume, self._raised)

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

        def leave(_: object, __: int) -> None:
            time = now() + shift
            thread = getattr(local, "thread", None) or recorder.thread()
            calls = thread.calls
            if not calls or calls[-1][0] is not key or not recorder.on:
                otherwise("end")
                return
            start = calls.pop()[1]
            emit(Event("end", time, 0, thread.name, len(calls), name, "", time - start))
            if len(buffer) >= FULL:
                recorder.stream.write()

        return leave

    def _suspend(self, _: object, __: int) -> None:
        self._stop("yield", where=self._at)

    def _resume(self) -> None:
        thread = self._recorder.thread()
        if self._recorder.on:
            time = self._recorder.now()
            self._recorder.emit(Event("resume", time, 0, thread.name, len(thread.calls), self._name, self._at))
            thread.calls.append((self._key, time))

    def _raised(self, error: BaseException | None = None) -> None:
        gone = error or sys.exc_info()[1]
        if isinstance(gone, GeneratorExit):
            self._stop("end", "closed")
        else:
            self._stop("raise", error_text(gone), raised_at(self._code, gone))

    def _stop(self, event: str, text: str = "", where: str = "") -> None:
        """The way out that is not the usual one."""
        thread = self._recorder.thread()
        if self._pauses and not (thread.calls and thread.calls[-1][0] is self._key):
            self._resume()  # it paused, and was woken by `throw` or `close`
        time = self._recorder.now()
        began = pop(thread.calls, self._key)
        if self._recorder.on and began is not None:  # else it began before the watch did
            depth, duration = len(thread.calls), time - began[1]
            self._recorder.emit(Event(event, time, 0, thread.name, depth, self._name, where, duration, text=text))
            if len(self._recorder.stream.buffer) >= FULL:
                self._recorder.stream.write()


def pauses(code: CodeType) -> bool:
    """Whether it is a generator or coroutine."""
    return bool(code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))


def pop(calls: list[Any], key: object) -> Any:
    """The call of this key, and out with what lies above it; None where it began before the watch."""
    for i in range(len(calls) - 1, -1, -1):
        if calls[i][0] is key:
            found = calls[i]
            del calls[i:]
            return found
    return None
