"""Fixed facts of one watched code object: its name, its place, and the objects that it runs on."""

from __future__ import annotations

import os
from types import CodeType

from meshwright.watcher.hooks.hooks import pauses, place, raised_at


class CodeSite:
    def __init__(self, code: CodeType) -> None:
        self.code, self.name, self.at, self.pauses = code, code.co_qualname, place(code), pauses(code)
        self.file = os.path.basename(code.co_filename)
        self.key = object()  # key of its calls
        self.own: dict[type, bool] = {}  # type of the first argument -> True if that is the method's object

    def is_method(self) -> bool:
        """Return True if its first argument may be an object that it runs on."""
        return self.code.co_argcount > 0 and (self.code.co_varnames[0] == "self" or self._class() is not None)

    def is_own(self, thing: object) -> bool:
        """Return True if this first argument is the object that the method runs on."""
        kind = type(thing)
        if kind not in self.own:
            self.own[kind] = thing is not None and not isinstance(thing, type) and self._runs_on(kind)
        return self.own[kind]

    def variables(self) -> dict[str, int]:
        """Return local variables and their slots in a frame; ~slot for those in a cell, which inner functions share."""
        code = self.code
        shared = {*code.co_cellvars, *code.co_freevars}
        names = dict.fromkeys((*code.co_varnames, *code.co_cellvars, *code.co_freevars))
        return {name: ~place if name in shared else place for place, name in enumerate(names)}

    def left_at(self, at: int | None, value: object) -> str:
        """Return where it ended: the byte of the instruction, or None with the exception."""
        if at is None and isinstance(value, BaseException):
            return raised_at(self.code, value)
        found = (line for start, end, line in self.code.co_lines() if at is not None and start <= at < end)
        return place(self.code, next(found, None))

    def _class(self) -> str | None:
        """Return the name of the class that its source is in."""
        around = self.name.split(".")[-2:-1]
        return around[0] if around and around[0] != "<locals>" else None

    def _runs_on(self, kind: type) -> bool:
        if self.code.co_varnames[0] == "self":
            return True
        for one in kind.__mro__:
            if one.__name__ == self._class():
                return not isinstance(vars(one).get(self.code.co_name), staticmethod)
        return False
