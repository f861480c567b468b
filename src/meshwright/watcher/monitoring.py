"""Watching on Python 3.12 and later: `sys.monitoring`, switched on for watched code objects only.

Exceptions that leave a function cannot be monitored for one code object alone. So each Python frame that an exception
leaves costs a table lookup.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any

from meshwright.errors import InputError
from meshwright.watcher.hooks.hooks import Hooks

Make = Callable[[CodeType], Hooks]
FRAMES_UP = 2  # a callback calls the hook, and the watched frame calls the callback


class Monitored:
    def __init__(self, make: Make) -> None:
        self._make, self._hooks, self._tool = make, dict[int, Hooks](), -1
        self._codes: list[CodeType] = []  # kept, so that no other code gets the id of one
        self._api: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]

    def install(self, functions: Iterable[FunctionType], codes: Iterable[CodeType], others: bool = True) -> None:
        """Watch codes; every function that has one of them is watched, whenever it was created."""
        self._start()
        events = self._api.events
        for code in codes:
            if id(code) in self._hooks:
                continue
            self._codes.append(code)
            hooks = self._hooks[id(code)] = self._make(code)
            wanted = events.PY_START | events.PY_RETURN | events.PY_YIELD | events.PY_RESUME
            self._api.set_local_events(self._tool, code, wanted | (events.INSTRUCTION if hooks.point else 0))

    def run(self, code: CodeType, codes: Iterable[CodeType], namespace: dict[str, object]) -> None:
        """Execute a module's code, whose functions do not exist yet."""
        self.install((), codes)
        exec(code, namespace)

    def remove(self) -> None:
        if self._tool < 0:
            return
        for code in self._codes:
            self._api.set_local_events(self._tool, code, 0)
        self._api.set_events(self._tool, 0)
        for event in self._callbacks():
            self._api.register_callback(self._tool, event, None)
        self._api.free_tool_id(self._tool)
        self._tool = -1

    def _start(self) -> None:
        if self._tool >= 0:
            return
        free = [tool for tool in (4, 3, 2, 1, 0, 5) if self._api.get_tool(tool) is None]
        if not free:
            used = ", ".join(str(self._api.get_tool(tool)) for tool in range(6))
            raise InputError(f"all places of sys.monitoring are taken: {used}", field="watch")
        self._tool = free[0]
        self._api.use_tool_id(self._tool, "meshwright.watch")
        for event, callback in self._callbacks().items():
            self._api.register_callback(self._tool, event, callback)
        self._api.set_events(self._tool, self._api.events.PY_UNWIND | self._api.events.PY_THROW)

    def _callbacks(self) -> dict[int, Callable[..., object]]:
        hooks_of, frame_of, names, off = self._hooks.get, sys._getframe, self._api.events, self._api.DISABLE

        def start(code: CodeType, _: int) -> None:
            if hooks := hooks_of(id(code)):
                hooks.enter(frame_of(1).f_locals.get(code.co_varnames[0]) if hooks.wants_self else None)

        def leave(code: CodeType, at: int, value: object) -> None:
            if hooks := hooks_of(id(code)):
                hooks.leave(value, at)

        def suspend(code: CodeType, at: int, value: object) -> None:
            if hooks := hooks_of(id(code)):
                hooks.suspend(value, at)

        def instruction(code: CodeType, at: int) -> object:
            hooks = hooks_of(id(code))
            where = hooks.points.get(at) if hooks else None
            if hooks is None or hooks.point is None or where is None:
                return off  # never again for this code
            hooks.point(where)
            return None

        ways: dict[int, Callable[..., object]] = {
            names.PY_START: start,
            names.PY_RETURN: leave,
            names.PY_YIELD: suspend,
            names.INSTRUCTION: instruction,
        }
        return ways | self._unusual()

    def _unusual(self) -> dict[int, Callable[..., object]]:
        hooks_of, names = self._hooks.get, self._api.events

        def resume(code: CodeType, *_: object) -> None:
            if hooks := hooks_of(id(code)):
                hooks.resume()

        def raised(code: CodeType, _: int, error: BaseException) -> None:
            if hooks := hooks_of(id(code)):
                hooks.raised(error)

        return {names.PY_RESUME: resume, names.PY_THROW: resume, names.PY_UNWIND: raised}
