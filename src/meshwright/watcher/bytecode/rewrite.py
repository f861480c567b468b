"""Hooks inserted into watched functions for Python 3.11, so that all other code runs unchanged.

A trace function (`sys.settrace`) would slow down every instruction of the thread, also in unwatched code.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable
from operator import is_
from types import CodeType, FunctionType

from meshwright.watcher.bytecode.assemble import OP, Added, call, put_together, unless
from meshwright.watcher.bytecode.torch_compile import Uncompiled
from meshwright.watcher.hooks.hooks import Hooks
from meshwright.watcher.hooks.points import decode
from meshwright.watcher.values.unchanged import makers

Make = Callable[[CodeType], Hooks]
_PLACES = frozenset((OP["RESUME"], OP["RETURN_VALUE"], OP["YIELD_VALUE"]))  # where calls begin, end and pause
FRAMES_UP = 1  # the watched frame itself calls the hooks
_LEFT: dict[tuple[int, int], tuple[FunctionType, CodeType, CodeType]] = {}  # hooks of watches that have ended


class Rewritten:
    """Rewritten functions with their old code, which is restored at the end."""

    def __init__(self, make: Make) -> None:
        self._make, self._old = make, list[tuple[FunctionType, CodeType, CodeType]]()
        self._hooked: dict[int, CodeType] = {}  # by id: code that has our hooks gets no others
        self._uncompiled = Uncompiled()

    def install(self, functions: Iterable[FunctionType], codes: Iterable[CodeType], others: bool = True) -> None:
        """Insert hooks into the codes, in these functions and, if `others`, in all functions that can be found."""
        wanted = {id(code): code for code in codes}
        done: dict[int, CodeType] = {}
        found = list(functions)
        inner = [code for code in wanted.values() if "<locals>" in code.co_qualname]
        if inner and others:  # functions that an earlier call, watched or not, has created
            found += [one for one in gc.get_referrers(*inner) if isinstance(one, FunctionType)]
        for function in found:
            old = function.__code__
            new = self.rewritten(old, wanted, done)
            if new is not old:
                self._old.append((function, old, new))
                function.__code__ = new

    def rewritten(self, code: CodeType, wanted: dict[int, CodeType], done: dict[int, CodeType]) -> CodeType:
        """Return the code with hooks if it is watched, and the same for every code inside it."""
        if id(code) not in done:
            constants = tuple(
                self.rewritten(one, wanted, done) if isinstance(one, CodeType) else one for one in code.co_consts
            )
            if any(new is not old for new, old in zip(constants, code.co_consts, strict=True)):
                done[id(code)] = code.replace(co_consts=constants)
            else:
                done[id(code)] = code
            if id(code) in wanted and id(code) not in self._hooked:
                new = done[id(code)] = hooked(done[id(code)], self._make(code))
                self._hooked[id(new)] = new
                self._uncompiled.add(new)
        return done[id(code)]

    def run(self, code: CodeType, codes: Iterable[CodeType], namespace: dict[str, object]) -> None:
        """Execute a module's code, whose functions do not exist yet."""
        exec(self.rewritten(code, {id(one): one for one in codes}, {}), namespace)

    def remove(self) -> None:
        self._uncompiled.end()
        while self._old:
            function, old, new = self._old.pop()
            if function.__code__ is new:
                function.__code__ = _beneath(function, old)
            else:  # a later watch has its hooks on top of ours: it removes both
                _LEFT[id(function), id(new)] = function, new, old


def _beneath(function: FunctionType, code: CodeType) -> CodeType:
    """Return the code without hooks of ended watches that lie below those of a later one."""
    while (left := _LEFT.pop((id(function), id(code)), None)) is not None:
        code = left[2]
    return code


def hooked(code: CodeType, hooks: Hooks) -> CodeType:
    """Return the code with calls of the hooks in it."""
    constants: list[object] = list(code.co_consts)

    def load(value: object) -> int:
        constants.append(value)
        return len(constants) - 1

    body = decode(code)
    added: defaultdict[int, Added] = defaultdict(Added)
    make = makers().hook  # each hook has a twin that takes the same arguments and does nothing
    if hooks.point is not None:
        point = load(make(hooks.point, id))
        for start, where in hooks.points.items():
            added[start].before = call(point, (OP["LOAD_CONST"], load(where)))
    enter, leave = load(make(hooks.enter, id)), load(make(hooks.leave, is_))
    suspend, resume = load(make(hooks.suspend, is_)), load(make(hooks.resume, object))
    on_raise = call(load(make(hooks.raised, object)))
    top = (OP["COPY"], 3)  # the returned value lies under the two values that a call pushes
    for one in body:
        if one.op not in _PLACES:
            continue
        if one.op == OP["RESUME"]:
            me = _first_argument(code) if hooks.wants_self else (OP["LOAD_CONST"], load(None))
            added[one.end].after = call(resume) if one.arg & 3 else call(enter, me)
        elif one.op == OP["RETURN_VALUE"]:
            added[one.start].before += call(leave, top, (OP["LOAD_CONST"], load(one.at)))
        elif one.op == OP["YIELD_VALUE"]:
            added[one.start].before += call(suspend, top, (OP["LOAD_CONST"], load(one.at)))
    otherwise = unless(load(RecursionError), load(hooks.missed))
    return put_together(code, body, added, tuple(constants), on_raise, otherwise)


def _first_argument(code: CodeType) -> tuple[int, int]:
    inside = code.co_varnames[0] in code.co_cellvars  # a nested function uses it too
    return (OP["LOAD_DEREF"] if inside else OP["LOAD_FAST"], 0)
